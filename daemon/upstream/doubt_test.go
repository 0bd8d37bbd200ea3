package upstream

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestUnclearAnswersEndWithAProof: connections that the upstream makes in between show that the destination is dead.
func TestUnclearAnswersEndWithAProof(t *testing.T) {
	t.Parallel()
	u := newUpstream("127.0.0.1:1", config.Connect)
	unclear := &unclearError{ErrLate, "503 Service Unavailable"}
	var d Doubt
	for i := range maxFailures - 1 {
		if err := u.Judge(&d, unclear); !errors.Is(err, ErrLate) || errors.Is(err, ErrUnreachable) {
			t.Fatalf("answer %d: got %v, want ErrLate", i, err)
		}
		u.recordConnected()
	}
	err := u.Judge(&d, unclear)
	if !errors.Is(err, ErrUnreachable) || errors.Is(err, ErrLate) || !strings.Contains(err.Error(), "503") {
		t.Errorf("the last answer: got %v, want ErrUnreachable with the answer", err)
	}
}

// TestFewSlowAnswersEndWithAProof: a connection does not wait for eight answers that take two minutes each.
func TestFewSlowAnswersEndWithAProof(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		u := newUpstream("127.0.0.1:1", config.Connect)
		unclear := &unclearError{ErrLate, "500 Unable to connect"}
		var d Doubt
		for i := range fewFailures {
			wantJudged(t, u, &d, unclear, i == fewFailures-1)
			time.Sleep(longDoubt / 2)
			u.recordConnected()
		}
	})
}

// TestUnclearMisconfigurationEndsWithAProof as well, and means one until then.
func TestUnclearMisconfigurationEndsWithAProof(t *testing.T) {
	t.Parallel()
	u := newUpstream("127.0.0.1:1", config.Connect)
	unclear := &unclearError{ErrMisconfigured, "400 Bad Request"}
	var d Doubt
	for i := range maxFailures {
		wantJudged(t, u, &d, unclear, i == maxFailures-1)
		u.recordConnected()
	}
}

// wantJudged fails unless an unclear answer keeps its meaning, or means ErrUnreachable if it is the last one.
func wantJudged(t *testing.T, u *Upstream, d *Doubt, unclear *unclearError, last bool) {
	t.Helper()
	want := unclear.until
	if last {
		want = ErrUnreachable
	}
	if err := u.Judge(d, unclear); !errors.Is(err, want) {
		t.Fatalf("got %v, want %v", err, want)
	}
}

// TestUnclearAnswersWithoutAProofMeanLate, however many there are.
func TestUnclearAnswersWithoutAProofMeanLate(t *testing.T) {
	t.Parallel()
	u := newUpstream("127.0.0.1:1", config.Connect)
	u.recordConnected() // before the first of them: no proof
	var d Doubt
	for range 10 * maxFailures {
		if err := u.Judge(&d, &unclearError{ErrLate, "500"}); !errors.Is(err, ErrLate) {
			t.Fatalf("got %v, want ErrLate", err)
		}
	}
}

// TestAnotherAnswerEndsTheDoubt: only answers in a row count.
func TestAnotherAnswerEndsTheDoubt(t *testing.T) {
	t.Parallel()
	u := newUpstream("127.0.0.1:1", config.Connect)
	var d Doubt
	for i := range 3 * maxFailures {
		err := error(&unclearError{ErrLate, "500"})
		if i%maxFailures == 0 {
			err = ErrLate
		}
		if err := u.Judge(&d, err); !errors.Is(err, ErrLate) {
			t.Fatalf("got %v, want ErrLate", err)
		}
		u.recordConnected()
	}
	if err := u.Judge(&d, nil); err != nil {
		t.Errorf("without an error: got %v", err)
	}
}

// TestDoubtAsksForAProof: the upstream is asked for a connection to the daemon itself, and for none without a doubt.
func TestDoubtAsksForAProof(t *testing.T) {
	t.Parallel()
	for protocol, refusal := range map[config.Protocol]string{
		config.Connect: "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
		config.SOCKS5:  "\x05\x01\x00" + boundIPv4,
	} {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			var own atomic.Int32
			u := newUpstream(freeAddress(), protocol)
			startProxy(t, u.name, refusing(protocol, request.Destination.String(), refusal, &own))
			run(t, u)
			if err := u.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			var d Doubt
			_, _, err := dialAndAsk(t.Context(), u, request)
			if err = u.Judge(&d, err); !errors.Is(err, ErrLate) {
				t.Fatalf("the first answer: got %v, want ErrLate", err)
			}
			testbed.Eventually(t, "the requests end with a proof", func() bool {
				_, _, err := dialAndAsk(t.Context(), u, request)
				return errors.Is(u.Judge(&d, err), ErrUnreachable)
			})
			if got := own.Load(); got < maxFailures-1 {
				t.Errorf("the upstream was asked for %d connections as a proof, want %d", got, maxFailures-1)
			}
		})
	}
}

// refusing makes a handler that answers requests for a destination with refusal, and counts and grants all others.
func refusing(protocol config.Protocol, destination, refusal string, granted *atomic.Int32) func(*net.TCPConn) {
	if protocol == config.Connect {
		return func(conn *net.TCPConn) {
			switch asked, err := readConnect(conn); {
			case err != nil:
			case strings.Contains(asked, destination):
				_, _ = io.WriteString(conn, refusal)
			default:
				granted.Add(1)
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
			}
		}
	}
	return func(conn *net.TCPConn) {
		if _, err := io.ReadFull(conn, make([]byte, 3)); err != nil {
			return
		}
		_, _ = io.WriteString(conn, "\x05\x00")
		asked := make([]byte, 10)
		if _, err := io.ReadFull(conn, asked); err != nil {
			return
		}
		if bytes.Equal(asked[4:8], request.Destination.Addr().AsSlice()) {
			_, _ = io.WriteString(conn, refusal)
			return
		}
		granted.Add(1)
		_, _ = io.WriteString(conn, "\x05\x00\x00"+boundIPv4)
	}
}
