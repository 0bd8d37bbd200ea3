package direct

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/splice"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// queued is a pod. Its connections to ports 81 to 83 of 10.0.0.5 wait at a gate. Only port 81 is open.
type queued struct {
	*testbed.Host
	gate    *gate.Gate
	carrier *Carrier
	carry   func() // carries the connection that has waited longest
}

func newQueued(t *testing.T) *queued {
	t.Helper()
	q := &queued{Host: testbed.NewHost(t, "pod")}
	q.IP("addr", "add", "10.0.0.5/32", "dev", "lo")
	q.Exec("iptables", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-d", "10.0.0.5", "--dport", "81:83",
		"-j", "REDIRECT", "--to-ports", "15001")
	q.Serve("10.0.0.5:81", func(c net.Conn) { _, _ = io.WriteString(c, "direct") })
	var err error
	if q.gate, err = gate.Open(q.Path(), ruleset.DefaultPorts); err != nil {
		t.Fatal(err)
	}
	q.carrier = NewCarrier(new(splice.Set), captured.Policy{}, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		_ = q.gate.Close()
	})
	q.carry = func() {
		t.Helper()
		testbed.Eventually(t, "a connection is accepted", func() bool {
			for _, l := range q.gate.Listeners {
				ok, err := q.carrier.AcceptOne(ctx, &wg, q.gate, l)
				if err != nil {
					t.Fatalf("AcceptOne: %v", err)
				}
				if ok {
					return true
				}
			}
			return false
		})
	}
	return q
}

// dial makes a connection that waits at the gate.
func (q *queued) dial(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	c, err := q.Dial(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// TestCarrierCountsConnections since the last Take. A destination that refuses is no failure of the node.
func TestCarrierCountsConnections(t *testing.T) {
	t.Parallel()
	q := newQueued(t)
	for range 2 {
		for range 3 {
			app := q.dial(t, "10.0.0.5:81")
			q.carry()
			testbed.CheckReads(t, "the app", app, "direct")
		}
		refused := q.dial(t, "10.0.0.5:82")
		q.carry()
		testbed.CheckReadFails(t, "the app of a closed port", refused, syscall.ECONNRESET)
		if got, want := q.carrier.Take(), (Results{Direct: 3}); got != want {
			t.Errorf("Take: got %+v, want %+v", got, want)
		}
		if got := q.carrier.Take(); got != (Results{}) {
			t.Errorf("second Take: got %+v, want no results", got)
		}
	}
}

// TestCarrierCountsConnectionsThatAreNotExempt, with the last reason. The kernel would redirect them to the gate again.
func TestCarrierCountsConnectionsThatAreNotExempt(t *testing.T) {
	t.Parallel()
	q := newQueued(t)
	app := q.dial(t, "10.0.0.5:83")
	q.Exec("sysctl", "-qw", "net.ipv4.ip_local_port_range=2000 2003")
	for _, port := range []string{"2000", "2001", "2002", "2003"} {
		q.Exec("conntrack", "-I", "-p", "tcp", "-s", "10.0.0.5", "-d", "10.0.0.5", "--sport", port, "--dport", "83",
			"--state", "TIME_WAIT", "-u", "SEEN_REPLY,ASSURED", "-t", "60", "--dst-nat", "10.0.0.5:15001")
	}
	q.carry()
	testbed.CheckReadFails(t, "the app", app, syscall.ECONNRESET)
	got := q.carrier.Take()
	if got.Direct != 0 || got.NotExempt != 1 || !errors.Is(got.Err, ErrNotExempt) {
		t.Errorf("Take: got %+v, want one connection that is not exempt", got)
	}
}

// TestCarrierDoesNotCarryForbiddenDestinations: a connection to the listener itself would come back without end.
func TestCarrierDoesNotCarryForbiddenDestinations(t *testing.T) {
	t.Parallel()
	q := newQueued(t)
	app := q.dial(t, "10.0.0.5:15001")
	q.carry()
	testbed.CheckReadFails(t, "the app", app, syscall.ECONNRESET)
	if got := q.carrier.Take(); got != (Results{}) {
		t.Errorf("Take: got %+v, want no results", got)
	}
}

func TestAcceptOneWithoutAConnection(t *testing.T) {
	t.Parallel()
	q := newQueued(t)
	for _, l := range q.gate.Listeners {
		ok, err := q.carrier.AcceptOne(t.Context(), nil, q.gate, l)
		if ok || err != nil {
			t.Errorf("got %t, %v; want no connection", ok, err)
		}
	}
}
