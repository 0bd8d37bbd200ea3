package relay

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/direct"
	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/late"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/daemon/splice"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

const web = "192.0.2.7:443"

// served is a pod with a gate that a relay serves. The upstream is late until a test calls proxy.
type served struct {
	*testbed.Host
	pod      *Server
	accepted late.Accepted
	joined   splice.Set
	gate     *gate.Gate
	up       *upstream.Upstream
	upstream string // its address
	cancel   context.CancelFunc
	done     chan struct{} // closed when Serve returns
}

var addresses atomic.Uint32

func serve(t *testing.T) *served {
	t.Helper()
	s := &served{Host: testbed.NewHost(t, "relay"), done: make(chan struct{})}
	s.IP("addr", "add", "10.0.0.5/32", "dev", "lo")
	s.IP("route", "add", "default", "dev", "lo")
	s.Exec("iptables-nft", "-t", "nat", "-A", "OUTPUT", "!", "-d", "10.0.0.5/32", "-p", "tcp", "-j", "REDIRECT",
		"--to-ports", strconv.Itoa(int(ruleset.DefaultPorts.Outbound)))
	s.upstream = fmt.Sprintf("127.%d.%d.%d:18080", 201+addresses.Add(1)%50, os.Getpid()>>8&0xff, os.Getpid()&0xff)
	log := slog.New(slog.DiscardHandler)
	s.up = upstream.New(config.Upstream{Address: s.upstream, Protocol: config.Connect}, nil, log)
	var err error
	if s.gate, err = gate.Open(s.Path(), ruleset.DefaultPorts); err != nil {
		t.Fatal(err)
	}
	s.pod = New(s.up, log).For(endpoint.Served{
		Pod: attach.Pod{Namespace: "ci", Name: "web-0"}, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.5")},
		Records:  func() []attach.Record { return nil },
		Accepted: &s.accepted, Joined: &s.joined, Direct: direct.NewCarrier(&s.joined, captured.Policy{}, log),
	}, func() attach.PodTrust { return podTrust })
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(t.Context())
	go func() { _ = s.up.Run(ctx) }()
	go func() {
		defer close(s.done)
		s.pod.Serve(ctx, ctx, s.gate)
	}()
	t.Cleanup(func() {
		s.cancel()
		_ = s.gate.Close()
		<-s.done
	})
	return s
}

// proxy starts the upstream. answer returns the status of the answer to each request, or 0 to hang up without one.
// After 200 the upstream sends back the data that it gets.
func (s *served) proxy(t *testing.T, answer func(*http.Request) int) {
	t.Helper()
	l, err := net.Listen("tcp", s.upstream)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { // ends with the connection
				defer c.Close() //nolint:errcheck // everything was sent
				r := bufio.NewReader(c)
				req, err := http.ReadRequest(r)
				if err != nil {
					return
				}
				status := answer(req)
				if status == 0 {
					return
				}
				fmt.Fprintf(c, "HTTP/1.1 %d x\r\n\r\n", status)
				if status == http.StatusOK {
					_, _ = io.Copy(c, r)
				}
			}()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
}

// dial connects from the pod, and closes the connection at the end of the test.
func (s *served) dial(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := s.Dial(ctx, "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c.(*net.TCPConn)
}

// checkReset dials, and wants a reset, after the handshake or during it.
func (s *served) checkReset(t *testing.T, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := s.Dial(ctx, "tcp", address)
	if err == nil {
		defer c.Close() //nolint:errcheck // nothing was written
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: got %v, want a reset", address, err)
	}
}

// queued counts the connections in the accept queue.
func (s *served) queued(t *testing.T) int {
	t.Helper()
	n, err := s.gate.Queued()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// isIdle reports whether no connection waits for an answer or is open.
func (s *served) isIdle() bool { return s.accepted.Len() == 0 && s.pod.Counts() == (sockdiag.Counts{}) }

// podTrust is the trust of the pod in these tests.
var podTrust = attach.PodTrust{State: "trusted", TLS: attach.Pass, Nested: attach.Inspect}

func ok(*http.Request) int { return http.StatusOK }

func TestLateUpstreamLeavesConnectionsInTheQueue(t *testing.T) {
	t.Parallel()
	s := serve(t)
	apps := make([]*net.TCPConn, 5)
	for i := range apps {
		apps[i] = s.dial(t, web)
		testbed.Send(t, apps[i], "early "+strconv.Itoa(i))
	}
	testbed.Eventually(t, "all wait in the accept queue", func() bool { return s.queued(t) == len(apps) })
	if got := s.pod.Counts(); got != (sockdiag.Counts{}) {
		t.Errorf("late: got %+v, want nothing accepted", got)
	}
	asked := make(chan string, len(apps))
	s.proxy(t, func(r *http.Request) int {
		namespace, name := r.Header.Get("Sluice-Pod-Namespace"), r.Header.Get("Sluice-Pod-Name")
		asked <- fmt.Sprintf("%s %s for %s/%s, %s, %s%s", r.Method, r.Host, namespace, name,
			r.Header.Get("Sluice-Trust"), r.Header.Get("Sluice-TLS"), r.Header.Get("Sluice-Nested"))
		return http.StatusOK
	})
	for i, app := range apps {
		testbed.CheckReads(t, "the app", app, "early "+strconv.Itoa(i))
		if got, want := <-asked, "CONNECT 192.0.2.7:443 for ci/web-0, trusted, pass"; got != want {
			t.Errorf("got request %q, want %q", got, want)
		}
	}
	if got := s.pod.Counts(); got.Open != len(apps) || s.accepted.Len() != 0 {
		t.Errorf("ready: got %+v, want %d open", got, len(apps))
	}
	for _, app := range apps {
		testbed.CloseWrite(t, app)
		_ = app.Close()
	}
	testbed.Eventually(t, "all have ended", func() bool { return s.pod.Counts().Open == 0 })
	if got, want := s.pod.Counts().Bytes, uint64(5*2*len("early 0")); got < want {
		t.Errorf("got %d bytes, want %d and the headers", got, want)
	}
}

// TestGivenUpConnectionsAreNotAskedFor, however the app ended them. One with data is served, and so is one whose app
// has only ended its side.
func TestGivenUpConnectionsAreNotAskedFor(t *testing.T) {
	t.Parallel()
	s := serve(t)
	_ = s.dial(t, "192.0.2.1:443").Close()
	socket.Reset(s.dial(t, "192.0.2.2:443"))
	halfClosed := s.dial(t, "192.0.2.3:443")
	testbed.CloseWrite(t, halfClosed)
	forgotten := s.dial(t, "192.0.2.4:443")
	testbed.Send(t, forgotten, "the last words")
	_ = forgotten.Close()
	testbed.Eventually(t, "all are in the accept queue", func() bool { return s.queued(t) == 4 })
	// A process that another test forks holds closed sockets until it has executed its program.
	testbed.Eventually(t, "the apps are gone", func() bool {
		over, err := s.gate.Sweep()
		return over == 2 && err == nil
	})
	asked := make(chan string, 4)
	s.proxy(t, func(r *http.Request) int {
		asked <- r.Host
		return http.StatusOK
	})
	got := []string{<-asked, <-asked}
	_ = halfClosed.Close() // by CONNECT its end is held back until then
	testbed.Eventually(t, "no connection waits or is open", func() bool {
		return s.queued(t)+s.accepted.Len()+s.pod.Counts().Open == 0
	})
	slices.Sort(got)
	if want := []string{"192.0.2.3:443", "192.0.2.4:443"}; !slices.Equal(got, want) || len(asked) > 0 {
		t.Errorf("the upstream was asked for %q and %d others, want %q", got, len(asked), want)
	}
}

// TestAppThatGivesUpEndsItsWait: it closes the connection without a byte while the upstream takes long to answer.
func TestAppThatGivesUpEndsItsWait(t *testing.T) {
	t.Parallel()
	s := serve(t)
	asked, answer := make(chan struct{}, 1), make(chan struct{})
	s.proxy(t, func(*http.Request) int {
		asked <- struct{}{}
		<-answer
		return http.StatusOK
	})
	defer close(answer)
	app := s.dial(t, web)
	<-asked
	_ = app.Close()
	testbed.Eventually(t, "no connection waits or is open", func() bool {
		s.accepted.Forget()
		return s.isIdle()
	})
}

// TestConnectionResetInTheQueueIsDropped, and the next one is served.
func TestConnectionResetInTheQueueIsDropped(t *testing.T) {
	t.Parallel()
	s := serve(t)
	socket.Reset(s.dial(t, web))
	testbed.Eventually(t, "it is in the accept queue", func() bool { return s.queued(t) == 1 })
	s.proxy(t, ok)
	app := s.dial(t, web)
	testbed.Send(t, app, "x")
	testbed.CheckReads(t, "the app", app, "x")
}

// TestFailedRequestIsRepeated: no byte of the app has been sent, so that is safe.
func TestFailedRequestIsRepeated(t *testing.T) {
	t.Parallel()
	for name, status := range map[string]int{
		"hangs up": 0, "503": http.StatusServiceUnavailable, "407": http.StatusProxyAuthRequired,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serve(t)
			var asked atomic.Int32
			s.proxy(t, func(*http.Request) int {
				if asked.Add(1) < 3 {
					return status
				}
				return http.StatusOK
			})
			app := s.dial(t, web)
			testbed.Send(t, app, "not lost")
			testbed.CheckReads(t, "the app", app, "not lost")
		})
	}
}

func TestUnreachableDestinationResetsTheApp(t *testing.T) {
	t.Parallel()
	s := serve(t)
	s.proxy(t, func(*http.Request) int { return http.StatusGatewayTimeout })
	s.checkReset(t, web)
	testbed.Eventually(t, "no connection waits or is open", s.isIdle)
}

func TestDestinationsOfTheNodeAreRefused(t *testing.T) {
	t.Parallel()
	s := serve(t)
	s.proxy(t, func(r *http.Request) int {
		t.Errorf("the upstream was asked for %s", r.Host)
		return http.StatusOK
	})
	for _, address := range []string{
		"10.0.0.5:15001",     // the listener itself
		"127.0.0.1:80",       // redirected by the rule of this test, unlike by those of package ruleset
		"169.254.169.254:80", // likewise
	} {
		s.checkReset(t, address)
	}
}

// TestResetOfTheAppEndsItsWait: the upstream gets no more requests for that connection.
func TestResetOfTheAppEndsItsWait(t *testing.T) {
	t.Parallel()
	s := serve(t)
	var asked atomic.Int32
	s.proxy(t, func(*http.Request) int {
		asked.Add(1)
		return http.StatusServiceUnavailable
	})
	app := s.dial(t, web)
	testbed.Eventually(t, "the request is repeated", func() bool { return asked.Load() > 2 && s.accepted.Len() == 1 })
	socket.Reset(app)
	testbed.Eventually(t, "no connection waits or is open", s.isIdle)
}

func TestEndOfContextResetsOpenConnections(t *testing.T) {
	t.Parallel()
	s := serve(t)
	s.proxy(t, ok)
	app := s.dial(t, web)
	testbed.Send(t, app, "x")
	testbed.CheckReads(t, "the app", app, "x")
	s.cancel()
	testbed.CheckReadFails(t, "the app", app, syscall.ECONNRESET)
	if err := s.gate.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	<-s.done
}

// TestOpenConnectionsOutliveTheGate: Serve returns when the last one has ended.
func TestOpenConnectionsOutliveTheGate(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	s := serve(t)
	s.proxy(t, ok)
	app := s.dial(t, web)
	testbed.Send(t, app, "x")
	testbed.CheckReads(t, "the app", app, "x")
	if err := s.gate.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if _, err := s.Dial(t.Context(), "tcp", web); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dialling after Close: got %v, want it refused", err)
	}
	testbed.Send(t, app, "still")
	testbed.CheckReads(t, "the app", app, "still")
	testbed.CloseWrite(t, app)
	testbed.CheckReadFails(t, "the app", app, io.EOF)
	_ = app.Close()
	<-s.done
}
