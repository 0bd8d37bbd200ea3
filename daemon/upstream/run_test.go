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
)

var fine = answering("HTTP/1.1 200 OK\r\n\r\n", func(c *net.TCPConn) { _, _ = io.Copy(c, c) })

func TestUpstreamComesAndGoes(t *testing.T) {
	t.Parallel()
	u := newUpstream(freeAddress(), config.Connect)
	if s := u.Status(); s.Ready || s.Reason == "" || s.Address != u.name || s.Protocol != "connect" {
		t.Errorf("before Run: got %+v, want it late, with a reason", s)
	}
	run(t, u)
	eventually(t, "the reason is that nobody listens", func() bool { return strings.Contains(u.Status().Reason, "refused") })
	for range 3 {
		p := startProxy(t, u.name, fine)
		if err := u.Wait(t.Context()); err != nil {
			t.Fatalf("Wait: %v", err)
		}
		if s := u.Status(); !s.Ready || s.Reason != "" {
			t.Errorf("with a proxy: got %+v, want it ready", s)
		}
		p.stop()
		eventually(t, "it is late again", func() bool { return !u.Status().Ready })
		if s := u.Status(); !strings.Contains(s.Reason, "refused") {
			t.Errorf("without a proxy: got %+v, want the reason", s)
		}
	}
}

// TestWaitersGoOnTogether: all of them, however they wait, as soon as the upstream comes.
func TestWaitersGoOnTogether(t *testing.T) {
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
					done <- u.WaitToRetry(t.Context(), time.Hour) // no longer than until the upstream is back
				}
			}()
		}
		synctest.Wait()
		if got := len(done); got != 0 {
			t.Fatalf("%d of %d did not wait", got, waiters)
		}
		u.markReady()
		synctest.Wait()
		if got := len(done); got != waiters {
			t.Errorf("%d of %d went on", got, waiters)
		}
		for range waiters {
			if err := <-done; err != nil {
				t.Errorf("a waiter got %v", err)
			}
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

// TestAProxyThatEndsIdleConnectionsIsReady: it is no less there for that.
func TestAProxyThatEndsIdleConnectionsIsReady(t *testing.T) {
	t.Parallel()
	var ended atomic.Int32
	u := newUpstream(freeAddress(), config.Connect)
	startProxy(t, u.name, func(*net.TCPConn) { ended.Add(1) })
	run(t, u)
	eventually(t, "it has ended a few", func() bool { return ended.Load() >= 4 })
	if s := u.Status(); !s.Ready {
		t.Errorf("got %+v, want it ready", s)
	}
}

// TestEachRequestHasAConnectionOfItsOwn, while Run keeps one to the upstream too.
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

// echo asks for a connection and uses it, with pauses in which a forgotten deadline would strike.
func echo(ctx context.Context, u *Upstream) error {
	conn, first, err := dialAndAsk(ctx, u, request)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // read to the end
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

// TestMisconfiguredIsSaidWhileItLasts: the upstream is there, so connections are tried, and people are told.
func TestMisconfiguredIsSaidWhileItLasts(t *testing.T) {
	t.Parallel()
	var closed atomic.Bool
	closed.Store(true)
	u := newUpstream(freeAddress(), config.Connect)
	startProxy(t, u.name, func(conn *net.TCPConn) {
		if closed.Load() {
			answering("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", hangUp)(conn)
			return
		}
		fine(conn)
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
	closed.Store(false)
	eventually(t, "a request is answered as it should be", func() bool { return echo(t.Context(), u) == nil })
	if s := u.Status(); !s.Ready || s.Reason != "" {
		t.Errorf("after a 200: got %+v, want it ready, without a reason", s)
	}
}

// TestProbe: with probes, an upstream that listens is late until it serves, and its reason says what it answers.
func TestProbe(t *testing.T) {
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
		eventually(t, "the answer to a probe counts: "+step.answer, func() bool {
			s := u.Status()
			return s.Ready == step.ready && strings.Contains(s.Reason, step.reason)
		})
	}
	if host := asked.Load().(string); !strings.Contains(host, "CONNECT 127.0.0.1:") {
		t.Errorf("it was asked for %s, want a listener on the way to it", host)
	}
}
