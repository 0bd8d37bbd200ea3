package agent

import (
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestQueuedConnectionsExpire: each connection is reset when it has waited for its pod's timeout itself. An event
// reports the first reset alone.
func TestQueuedConnectionsExpire(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	h.IP("link", "set", "lo", "up")
	o := newOrchestrator()
	o.set(func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		d, err := capture(at, interfaces)
		d.Late = attach.Late{Policy: attach.Queue, Timeout: time.Minute}
		return d, err
	})
	a := newAgentFor(t, o)
	at := attachment(h, "eth0")
	if _, err := a.Attach(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	connect := func(waiting int) net.Conn {
		t.Helper()
		c, err := h.Dial(t.Context(), "tcp", "127.0.0.1:15001")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		testbed.Eventually(t, "the connection waits", func() bool {
			s, _ := a.statusOf(at.ID)
			return s.Waiting == waiting
		})
		return c
	}
	isReset := func(c net.Conn) bool {
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, err := c.Read(make([]byte, 1))
		if errors.Is(err, io.EOF) {
			t.Error("the connection was ended, not reset")
		}
		return errors.Is(err, syscall.ECONNRESET)
	}
	start := time.Now()
	first := connect(1)
	a.tick(start)
	second := connect(2)
	a.tick(start.Add(30 * time.Second))
	a.tick(start.Add(59 * time.Second))
	if isReset(first) || isReset(second) {
		t.Error("a connection was reset too early")
	}
	a.tick(start.Add(60 * time.Second))
	if !isReset(first) {
		t.Error("the first was not reset after its timeout")
	}
	if isReset(second) {
		t.Error("the second was reset with the first")
	}
	a.tick(start.Add(90 * time.Second))
	if !isReset(second) {
		t.Error("the second was not reset after its timeout")
	}
	if got := a.table.Expired(); got != 2 {
		t.Errorf("got %d expired connections counted, want 2", got)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	resets := slices.DeleteFunc(slices.Clone(o.events), func(e string) bool {
		return !strings.Contains(e, endpoint.ReasonReset)
	})
	if len(resets) != 1 || !strings.Contains(resets[0], "for more than 1m0s") {
		t.Errorf("got events about resets %q, want one", resets)
	}
}
