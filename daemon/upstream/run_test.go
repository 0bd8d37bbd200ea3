package upstream

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// echoing handles a connection as a proxy that works: the destination sends back the data that it gets.
var echoing = answering("HTTP/1.1 200 OK\r\n\r\n", func(c *net.TCPConn) { _, _ = io.Copy(c, c) })

func TestStatusFollowsTheUpstream(t *testing.T) {
	t.Parallel()
	u := newUpstream(freeAddress(), config.Connect)
	if s := u.Status(); s.Ready || s.Reason == "" || s.Address != u.name || s.Protocol != "connect" {
		t.Errorf("before Run: got %+v, want it late, with a reason", s)
	}
	run(t, u)
	testbed.Eventually(t, "the reason is a refused connection", func() bool {
		return strings.Contains(u.Status().Reason, "refused")
	})
	for range 3 {
		p := startProxy(t, u.name, echoing)
		if err := u.Wait(t.Context()); err != nil {
			t.Fatalf("Wait: %v", err)
		}
		if s := u.Status(); !s.Ready || s.Reason != "" {
			t.Errorf("with a proxy: got %+v, want it ready", s)
		}
		p.stop()
		testbed.Eventually(t, "the upstream is late again", func() bool { return !u.Status().Ready })
		if s := u.Status(); !strings.Contains(s.Reason, "refused") {
			t.Errorf("without a proxy: got %+v, want a refused connection as the reason", s)
		}
	}
}

// TestReadyUpstreamWakesEveryWaiter, of Wait and of WaitToRetry.
func TestReadyUpstreamWakesEveryWaiter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		u := newUpstream(freeAddress(), config.Connect)
		const waiters = 10
		done := make(chan error, waiters)
		for i := range waiters {
			go func() {
				if i%2 == 0 {
					done <- u.Wait(t.Context())
				} else {
					done <- u.WaitToRetry(t.Context(), time.Hour) // returns before the hour is over
				}
			}()
		}
		synctest.Wait()
		if got := len(done); got != 0 {
			t.Fatalf("%d of %d waiters did not wait", got, waiters)
		}
		u.markReady()
		synctest.Wait()
		if got := len(done); got != waiters {
			t.Errorf("%d of %d waiters returned", got, waiters)
		}
		for range waiters {
			if err := <-done; err != nil {
				t.Errorf("waiting: %v", err)
			}
		}
	})
}

// TestLateUpstreamIsDialedOnDemand: seldom while nothing waits, at once and often while something does, and at once
// when its status is asked for.
func TestLateUpstreamIsDialedOnDemand(t *testing.T) {
	t.Parallel()
	address := freeAddress()
	synctest.Test(t, func(t *testing.T) {
		var dials atomic.Int64
		u := New(config.Upstream{Address: address, Protocol: config.Connect}, func() (string, error) {
			dials.Add(1)
			return address, nil
		}, slog.New(slog.DiscardHandler))
		during := func(d time.Duration) int64 {
			synctest.Wait()
			before := dials.Load()
			time.Sleep(d)
			synctest.Wait()
			return dials.Load() - before
		}
		ctx, cancel := context.WithCancel(t.Context())
		var group errgroup.Group
		group.Go(func() error { return u.Run(ctx) })
		if n := during(10 * quietInterval); n < 8 || n > 10 {
			t.Errorf("while nothing waits: %d attempts in %s, want 8 to 10", n, 10*quietInterval)
		}

		time.Sleep(2 * dialInterval) // after the last attempt
		waiting, give := context.WithCancel(ctx)
		before := dials.Load()
		group.Go(func() error {
			_ = u.Wait(waiting) // the test ends it
			return nil
		})
		synctest.Wait()
		if n := dials.Load() - before; n != 1 {
			t.Errorf("when a connection begins to wait: %d attempts at once, want 1", n)
		}
		if n := during(100 * dialInterval); n < 98 || n > 101 {
			t.Errorf("while a connection waits: %d attempts in %s, want about 100", n, 100*dialInterval)
		}
		give()
		if n := during(10 * quietInterval); n > 11 {
			t.Errorf("when nothing waits any more: %d attempts in %s, want at most 11", n, 10*quietInterval)
		}

		time.Sleep(2 * dialInterval)
		before = dials.Load()
		u.Status()
		synctest.Wait()
		if n := dials.Load() - before; n != 1 {
			t.Errorf("when its status is asked for: %d attempts at once, want 1", n)
		}
		cancel()
		if err := group.Wait(); err != nil {
			t.Error(err)
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	u := newUpstream(freeAddress(), config.Connect)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := u.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait: got %v, want context.Canceled", err)
	}
	if err := u.WaitToRetry(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("WaitToRetry: got %v, want context.Canceled", err)
	}
}

// TestProxyThatEndsIdleConnectionsIsReady, because it still accepts new ones.
func TestProxyThatEndsIdleConnectionsIsReady(t *testing.T) {
	t.Parallel()
	var ended atomic.Int32
	u := newUpstream(freeAddress(), config.Connect)
	startProxy(t, u.name, func(*net.TCPConn) { ended.Add(1) })
	run(t, u)
	testbed.Eventually(t, "the proxy has ended a few connections", func() bool { return ended.Load() >= 4 })
	if s := u.Status(); !s.Ready {
		t.Errorf("got %+v, want it ready", s)
	}
}

// TestEachRequestHasAConnectionOfItsOwn, beside the one that Run keeps.
func TestEachRequestHasAConnectionOfItsOwn(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	u := newUpstream(freeAddress(), config.Connect)
	startProxy(t, u.name, func(conn *net.TCPConn) {
		if _, err := readConnect(conn); err != nil {
			return
		}
		asked.Add(1)
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
		_, _ = io.Copy(conn, conn)
	})
	run(t, u)
	if err := u.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	const clients, rounds = 8, 10
	var g errgroup.Group
	for range clients {
		g.Go(func() error {
			for range rounds {
				if err := echo(t.Context(), u); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if got := asked.Load(); got != clients*rounds {
		t.Errorf("the proxy was asked %d times, want %d", got, clients*rounds)
	}
	if s := u.Status(); !s.Ready {
		t.Errorf("got %+v, want it ready", s)
	}
}

// echo makes one request, and sends data through its connection and back.
func echo(ctx context.Context, u *Upstream) error {
	conn, first, err := dialAndAsk(ctx, u, request)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // everything was read
	if _, err := io.WriteString(conn, "ping"); err != nil {
		return err
	}
	if err := conn.CloseWrite(); err != nil {
		return err
	}
	got, err := io.ReadAll(conn)
	if err == nil && string(first)+string(got) != "ping" {
		err = errors.New("echo: got " + string(first) + string(got))
	}
	return err
}

// TestMisconfigurationIsReportedWhileItLasts: the upstream stays ready, so that connections are tried again.
func TestMisconfigurationIsReportedWhileItLasts(t *testing.T) {
	t.Parallel()
	var misconfigured atomic.Bool
	misconfigured.Store(true)
	u := newUpstream(freeAddress(), config.Connect)
	startProxy(t, u.name, func(conn *net.TCPConn) {
		if misconfigured.Load() {
			answering("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", hangUp)(conn)
			return
		}
		echoing(conn)
	})
	run(t, u)
	if err := u.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := echo(t.Context(), u); !errors.Is(err, ErrMisconfigured) {
		t.Errorf("got %v, want ErrMisconfigured", err)
	}
	if s := u.Status(); !s.Ready || !strings.Contains(s.Reason, "user and a password") {
		t.Errorf("after a 407: got %+v, want it ready, with a reason", s)
	}
	misconfigured.Store(false)
	testbed.Eventually(t, "a request succeeds", func() bool { return echo(t.Context(), u) == nil })
	testbed.Eventually(t, "the status has no reason", func() bool {
		s := u.Status()
		return s.Ready && s.Reason == ""
	})
}

// TestProbeDecidesAboutReadiness: with probes, an upstream that only listens is late, and the reason has its answer.
func TestProbeDecidesAboutReadiness(t *testing.T) {
	t.Parallel()
	var answer atomic.Value
	answer.Store("")
	var asked atomic.Value
	c := config.Upstream{Address: freeAddress(), Protocol: config.Connect, ProbeInterval: 10 * time.Millisecond}
	u := New(c, nil, slog.New(slog.DiscardHandler))
	startProxy(t, c.Address, func(conn *net.TCPConn) {
		req, err := readConnect(conn)
		if err != nil {
			return
		}
		asked.Store(req)
		_, _ = io.WriteString(conn, answer.Load().(string))
	})
	run(t, u)
	for _, step := range []struct {
		answer, reason string
		ready          bool
	}{
		{"", "fails a probe: upstream is late", false},
		{"HTTP/1.1 200 OK\r\n\r\n", "", true},
		{"", "fails a probe: upstream is late", false},
		{"HTTP/1.1 200 OK\r\n\r\n", "", true},
		{"HTTP/1.1 503 Service Unavailable\r\n\r\n", "fails a probe: upstream is late: 503", false},
		{"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "", true},
	} {
		answer.Store(step.answer)
		testbed.Eventually(t, "the status follows the answer "+step.answer, func() bool {
			s := u.Status()
			return s.Ready == step.ready && strings.Contains(s.Reason, step.reason)
		})
	}
	if host := asked.Load().(string); !strings.Contains(host, "CONNECT 127.0.0.1:") {
		t.Errorf("got probe %q, want a request for a listener on loopback", host)
	}
}
