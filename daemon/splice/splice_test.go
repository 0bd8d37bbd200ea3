package splice

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// ends are the far ends of the two connections of a pair that is joined.
type ends struct {
	app, up *net.TCPConn
	nearApp *net.TCPConn // joined with the one to up
	set     Set
	done    chan struct{} // closed when Join returns
	cancel  context.CancelFunc
}

// joined joins a pair until the test ends. If appState is nil, the peer's protocol can carry a half-close.
func joined(t *testing.T, first string, appState func() sockdiag.AppState) *ends {
	t.Helper()
	e := &ends{done: make(chan struct{})}
	p := Pair{First: []byte(first), AppState: appState, HalfClose: appState == nil}
	if appState == nil {
		p.AppState = func() sockdiag.AppState { return sockdiag.AppUnknown }
	}
	e.app, e.nearApp = testbed.ConnPair(t)
	p.App = e.nearApp
	e.up, p.Peer = testbed.ConnPair(t)
	var ctx context.Context
	ctx, e.cancel = context.WithCancel(t.Context())
	go func() {
		defer close(e.done)
		e.set.Join(ctx, p)
	}()
	t.Cleanup(func() {
		e.cancel()
		<-e.done
		if got := e.set.Counts().Open; got != 0 {
			t.Errorf("got %d pairs counted as open after the end, want none", got)
		}
	})
	return e
}

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

func TestJoinCarriesBothWays(t *testing.T) {
	t.Parallel()
	e := joined(t, "", nil)
	for range 3 {
		testbed.Send(t, e.app, "question")
		testbed.CheckReads(t, "the upstream", e.up, "question")
		testbed.Send(t, e.up, "answer")
		testbed.CheckReads(t, "the app", e.app, "answer")
	}
}

func TestJoinDeliversFirstBytesFirst(t *testing.T) {
	t.Parallel()
	e := joined(t, "said already, ", nil)
	testbed.Send(t, e.up, "said later")
	testbed.CheckReads(t, "the app", e.app, "said already, said later")
}

func TestJoinPassesOnEachHalfClose(t *testing.T) {
	t.Parallel()
	for name, upFirst := range map[string]bool{"app first": false, "upstream first": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := joined(t, "", nil)
			first, second := e.app, e.up
			if upFirst {
				first, second = second, first
			}
			testbed.Send(t, first, "all")
			testbed.CloseWrite(t, first)
			testbed.CheckReads(t, "the second", second, "all")
			testbed.CheckReadFails(t, "the second", second, io.EOF)
			testbed.Send(t, second, "the other direction")
			testbed.CheckReads(t, "the first", first, "the other direction")
			testbed.CloseWrite(t, second)
			testbed.CheckReadFails(t, "the first", first, io.EOF)
			<-e.done
		})
	}
}

func TestJoinCarriesLargeDataBothWaysAtOnce(t *testing.T) {
	t.Parallel()
	const size = 8 << 20
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	want := sha256.Sum256(data)
	e := joined(t, "", nil)
	got := make(chan [sha256.Size]byte)
	for _, c := range []*net.TCPConn{e.app, e.up} {
		go func() {
			_, _ = io.Copy(c, bytes.NewReader(data))
			_ = c.CloseWrite()
		}()
		go func() {
			h := sha256.New()
			_, _ = io.Copy(h, c)
			got <- [sha256.Size]byte(h.Sum(nil))
		}()
	}
	for range 2 {
		if g := <-got; g != want {
			t.Errorf("got %x, want %x", g, want)
		}
	}
	<-e.done
}

func TestJoinPassesOnResets(t *testing.T) {
	t.Parallel()
	for name, appState := range map[string]func() sockdiag.AppState{
		"with half-close": nil, "without": func() sockdiag.AppState { return sockdiag.AppUnknown },
	} {
		for from, upResets := range map[string]bool{"the app": false, "the upstream": true} {
			t.Run(name+"/"+from, func(t *testing.T) {
				t.Parallel()
				e := joined(t, "", appState)
				first, second := e.app, e.up
				if upResets {
					first, second = second, first
				}
				testbed.Send(t, second, "x") // the data shows that Join has begun
				testbed.CheckReads(t, from, first, "x")
				socket.Reset(first)
				testbed.CheckReadFails(t, "the other end", second, syscall.ECONNRESET)
				<-e.done
			})
		}
	}
}

func TestJoinResetsBothWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	e := joined(t, "", nil)
	e.cancel()
	testbed.CheckReadFails(t, "the app", e.app, syscall.ECONNRESET)
	testbed.CheckReadFails(t, "the upstream", e.up, syscall.ECONNRESET)
	<-e.done
}

// TestJoinHoldsTheAppsFINBack: an upstream without half-close would drop the data of the other direction.
func TestJoinHoldsTheAppsFINBack(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	e := joined(t, "", func() sockdiag.AppState {
		calls.Add(1)
		return sockdiag.AppOpen
	})
	testbed.Send(t, e.app, "question")
	testbed.CloseWrite(t, e.app)
	testbed.CheckReads(t, "the upstream", e.up, "question")
	testbed.Eventually(t, "the FIN is held back", func() bool { return calls.Load() >= 4 })
	_ = e.up.SetReadDeadline(time.Now().Add(time.Millisecond))
	testbed.CheckReadFails(t, "the upstream", e.up, os.ErrDeadlineExceeded)
	_ = e.up.SetReadDeadline(time.Now().Add(time.Minute))
	testbed.Send(t, e.up, "slow answer")
	testbed.CheckReads(t, "the app", e.app, "slow answer")
	testbed.CloseWrite(t, e.up)
	testbed.CheckReadFails(t, "the app", e.app, io.EOF)
	testbed.CheckReadFails(t, "the upstream", e.up, io.EOF)
	<-e.done
}

// TestJoinPassesOnTheCloseOfTheApp at once, because no process waits for an answer.
func TestJoinPassesOnTheCloseOfTheApp(t *testing.T) {
	t.Parallel()
	e := joined(t, "", func() sockdiag.AppState { return sockdiag.AppClosed })
	testbed.Send(t, e.app, "bye")
	_ = e.app.Close()
	testbed.CheckReads(t, "the upstream", e.up, "bye")
	testbed.CheckReadFails(t, "the upstream", e.up, io.EOF)
}

// TestJoinNoticesALaterCloseOfTheApp: the app half-closes first, and closes while its FIN is held back.
func TestJoinNoticesALaterCloseOfTheApp(t *testing.T) {
	t.Parallel()
	var state atomic.Int32
	state.Store(int32(sockdiag.AppOpen))
	e := joined(t, "", func() sockdiag.AppState { return sockdiag.AppState(state.Load()) })
	testbed.CloseWrite(t, e.app)
	state.Store(int32(sockdiag.AppClosed))
	testbed.CheckReadFails(t, "the upstream", e.up, io.EOF)
}

func TestCountsOpenPairsAndBytes(t *testing.T) {
	t.Parallel()
	e := joined(t, "", nil)
	testbed.Send(t, e.app, "four")
	testbed.CheckReads(t, "the upstream", e.up, "four")
	testbed.Send(t, e.up, "three")
	testbed.CheckReads(t, "the app", e.app, "three")
	want := sockdiag.Counts{Open: 1, Bytes: 9}
	testbed.Eventually(t, "all bytes are acknowledged and counted", func() bool { return e.set.Counts() == want })
	testbed.CloseWrite(t, e.app)
	testbed.CloseWrite(t, e.up)
	<-e.done
	want.Open = 0
	if got := e.set.Counts(); got != want {
		t.Errorf("after the end: got %+v, want %+v", got, want)
	}
}
