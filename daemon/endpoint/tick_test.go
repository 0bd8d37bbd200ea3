package endpoint

import (
	"context"
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/daemon/late"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

var (
	lateUpstream  = attach.UpstreamStatus{Address: "127.0.0.1:18080", Reason: "connection refused"}
	readyUpstream = attach.UpstreamStatus{Address: "127.0.0.1:18080", Ready: true}
	// The upstream answers, and an operator has to change its configuration or that of sluice.
	misconfiguredUpstream = attach.UpstreamStatus{Address: "127.0.0.1:18080", Ready: true, Reason: "407"}
)

// stays is the app of a connection that is never given up.
func stays() error { return nil }

// tick calls Tick, and returns the reasons of the notices.
func (table *testTable) tick(now time.Time, up attach.UpstreamStatus) (reasons []string) {
	table.Tick(now, up, func(_ *Endpoint, n Notice) { reasons = append(reasons, n.Reason) })
	return reasons
}

// checkReasons checks the reasons of the notices of one tick.
func checkReasons(t *testing.T, when string, got []string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s: reasons of the notices (-want +got):\n%s", when, diff)
	}
}

// checkWaiting waits until n connections wait at e: the client sees the end of a handshake a moment earlier.
func checkWaiting(t *testing.T, e *Endpoint, n int) {
	t.Helper()
	testbed.Eventually(t, "the connections wait", func() bool {
		got, err := e.snapshot(attach.Record{}).waiting()
		return got == n && err == nil
	})
}

// TestLongWaitIsNoticedOnceEachTime that the upstream is late.
func TestLongWaitIsNoticedOnceEachTime(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	e := table.capture(t, h, attach.Late{Policy: attach.Queue})
	now := time.Now()
	checkReasons(t, "no connection", table.tick(now, lateUpstream))
	checkReasons(t, "no connection for an hour", table.tick(now.Add(time.Hour), lateUpstream))
	_, wait := table.acceptor(e).Accepted.Add(t.Context(), stays)
	defer wait.Done()
	for range 2 {
		now = now.Add(2 * time.Hour)
		checkReasons(t, "first sight of the connection", table.tick(now, lateUpstream))
		checkReasons(t, "short wait", table.tick(now.Add(longWait-time.Nanosecond), lateUpstream))
		checkReasons(t, "long wait", table.tick(now.Add(longWait), lateUpstream), ReasonWaiting)
		checkReasons(t, "longer wait", table.tick(now.Add(2*longWait), lateUpstream))
		checkReasons(t, "upstream is ready", table.tick(now.Add(3*longWait), readyUpstream))
	}
}

// TestAcceptedConnectionExpires: its relay is told to reset it. Expiries are noticed once and counted each.
func TestAcceptedConnectionExpires(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	e := table.capture(t, h, attach.Late{Policy: attach.Queue, Timeout: time.Nanosecond})
	var reasons []string
	for range 2 {
		ctx, wait := table.acceptor(e).Accepted.Add(t.Context(), stays)
		defer wait.Done()
		checkReasons(t, "upstream refuses other connections", table.tick(time.Now(), misconfiguredUpstream))
		if ctx.Err() != nil {
			t.Errorf("with a ready upstream: got %v, want the wait to go on", context.Cause(ctx))
		}
		reasons = append(reasons, table.tick(time.Now(), lateUpstream)...)
		if !errors.Is(context.Cause(ctx), late.ErrExpired) {
			t.Errorf("with a late upstream: got %v, want %v", context.Cause(ctx), late.ErrExpired)
		}
	}
	checkReasons(t, "two expiries", reasons, ReasonReset)
	if got := table.Expired(); got != 2 {
		t.Errorf("got %d expired connections, want 2", got)
	}
}

// TestQueuedConnectionExpires: it is reset in the accept queue.
func TestQueuedConnectionExpires(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	e := table.capture(t, h, attach.Late{Policy: attach.Queue, Timeout: 5 * time.Second})
	app := dial(t, h)
	checkWaiting(t, e, 1)
	now := time.Now()
	checkReasons(t, "first sight", table.tick(now, lateUpstream))
	checkReasons(t, "before the timeout", table.tick(now.Add(5*time.Second-time.Nanosecond), lateUpstream))
	checkWaiting(t, e, 1)
	checkReasons(t, "at the timeout", table.tick(now.Add(5*time.Second), lateUpstream), ReasonReset)
	if _, err := app.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the app reads: got %v, want %v", err, syscall.ECONNRESET)
	}
	if got := table.Expired(); got != 1 {
		t.Errorf("got %d expired connections, want 1", got)
	}
}

// TestGivenUpConnectionDoesNotWait: the next tick leaves it out, and it does not expire. The accept queue still has it.
func TestGivenUpConnectionDoesNotWait(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	e := table.capture(t, h, attach.Late{Policy: attach.Queue, Timeout: time.Minute})
	app := dial(t, h)
	checkWaiting(t, e, 1)
	now := time.Now()
	table.tick(now, lateUpstream)
	checkWaiting(t, e, 1)
	if err := app.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	_ = app.Close()
	testbed.Eventually(t, "a tick sees that it is over", func() bool {
		table.tick(now, lateUpstream)
		n, err := e.snapshot(attach.Record{}).waiting()
		return n == 0 && err == nil
	})
	if n, err := e.snapshot(attach.Record{}).queued(); n != 1 || err != nil {
		t.Errorf("got %d connections in the accept queue, %v; want 1", n, err)
	}
	checkReasons(t, "at the timeout", table.tick(now.Add(time.Minute), lateUpstream))
	if got := table.Expired(); got != 0 {
		t.Errorf("got %d expired connections, want none", got)
	}
}

// TestHoldQueuesWithoutTimeout: its timeout is that of the ADD.
func TestHoldQueuesWithoutTimeout(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	e := table.capture(t, h, attach.Late{Policy: attach.Hold, Timeout: time.Nanosecond})
	ctx, wait := table.acceptor(e).Accepted.Add(t.Context(), stays)
	defer wait.Done()
	dial(t, h)
	checkWaiting(t, e, 2)
	now := time.Now()
	checkReasons(t, "first sight", table.tick(now, lateUpstream))
	checkReasons(t, "an hour later", table.tick(now.Add(time.Hour), lateUpstream), ReasonWaiting)
	checkWaiting(t, e, 2)
	if ctx.Err() != nil || table.Expired() != 0 {
		t.Errorf("got cause %v, %d expired; want both connections waiting", context.Cause(ctx), table.Expired())
	}
}

// TestExpiryGoesDirect: the policy direct tells the relay so, and takes queued connections to their destinations.
func TestExpiryGoesDirect(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	h.IP("addr", "add", "10.0.0.5/32", "dev", "lo")
	h.Exec("iptables", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-d", "10.0.0.5", "--dport", "80",
		"-j", "REDIRECT", "--to-ports", "15001")
	destination := h.Listen("10.0.0.5:80")
	table := newTable(t)
	e := table.capture(t, h, attach.Late{Policy: attach.Direct, Timeout: time.Nanosecond})
	app, err := h.Dial(t.Context(), "tcp", "10.0.0.5:80")
	if err != nil {
		t.Fatal(err)
	}
	defer app.Close() //nolint:errcheck // everything was read
	checkWaiting(t, e, 1)
	ctx, wait := table.acceptor(e).Accepted.Add(t.Context(), stays)
	defer wait.Done()
	now := time.Now()
	checkReasons(t, "first sight", table.tick(now, lateUpstream))
	if !errors.Is(context.Cause(ctx), late.ErrDirect) {
		t.Errorf("accepted connection: got cause %v, want %v", context.Cause(ctx), late.ErrDirect)
	}
	checkReasons(t, "after the timeout", table.tick(now.Add(time.Second), lateUpstream))
	peer, err := destination.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close() //nolint:errcheck // everything was sent
	if _, err := io.WriteString(peer, "direct"); err != nil {
		t.Error(err)
	}
	got := make([]byte, len("direct"))
	if _, err := io.ReadFull(app, got); err != nil || string(got) != "direct" {
		t.Errorf("the app reads: got %q, %v; want the destination's data", got, err)
	}
	checkReasons(t, "the connection is counted", table.tick(now.Add(2*time.Second), lateUpstream), ReasonDirect)
	if table.Direct() != 1 || table.Expired() != 0 {
		t.Errorf("got %d direct, %d expired; want 1 and 0", table.Direct(), table.Expired())
	}
}

// TestNoticeNamesUpstreamAndReason, because the notice becomes an event on the pod.
func TestNoticeNamesUpstreamAndReason(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	e := table.capture(t, h, attach.Late{Policy: attach.Queue})
	_, wait := table.acceptor(e).Accepted.Add(t.Context(), stays)
	defer wait.Done()
	now := time.Now()
	table.tick(now, lateUpstream)
	notices := 0
	table.Tick(now.Add(longWait), lateUpstream, func(got *Endpoint, n Notice) {
		notices++
		if got != e || !strings.Contains(n.Message, lateUpstream.Address) ||
			!strings.Contains(n.Message, lateUpstream.Reason) {
			t.Errorf("got notice %+v of %s, want upstream and reason, of %s", n, got.ID, e.ID)
		}
	})
	if notices != 1 {
		t.Errorf("got %d notices, want 1", notices)
	}
}

// TestTickSkipsAnEnteredEndpoint, so that a slow ADD does not delay the other pods.
func TestTickSkipsAnEnteredEndpoint(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	e := table.capture(t, h, attach.Late{Policy: attach.Queue, Timeout: time.Nanosecond})
	ctx, wait := table.acceptor(e).Accepted.Add(t.Context(), stays)
	defer wait.Done()
	table.Enter(e.ID)
	checkReasons(t, "entered", table.tick(time.Now(), lateUpstream))
	if ctx.Err() != nil {
		t.Errorf("entered: got %v, want the wait to go on", context.Cause(ctx))
	}
	e.Leave()
	checkReasons(t, "left", table.tick(time.Now(), lateUpstream), ReasonReset)
}
