package gate

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

const (
	webIPv4 = "192.0.2.7:443"
	webIPv6 = "[2001:db8::7]:443"
)

// newPod makes a netns with a gate, to which TCP connections to the documentation addresses are redirected.
func newPod(t *testing.T) (*testbed.Host, *Gate) {
	t.Helper()
	h := testbed.NewHost(t, "gate")
	h.IP("addr", "add", "10.0.0.5/32", "dev", "lo")
	h.IP("addr", "add", "fd00::5/128", "dev", "lo", "nodad")
	h.IP("route", "add", "default", "dev", "lo")
	h.IP("-6", "route", "add", "default", "dev", "lo")
	port := strconv.Itoa(int(ruleset.DefaultPorts.Outbound))
	for command, network := range map[string]string{"iptables-nft": "192.0.2.0/24", "ip6tables-nft": "2001:db8::/32"} {
		h.Exec(command, "-t", "nat", "-A", "OUTPUT", "-d", network, "-p", "tcp", "-j", "REDIRECT", "--to-ports", port)
	}
	g, err := Open(h.Path(), ruleset.DefaultPorts)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() { _ = g.Close() }) // for the second time in some tests
	return h, g
}

// dial connects from h, and closes the connection at the end of the test.
func dial(t *testing.T, h *testbed.Host, address string) *net.TCPConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", address)
	if err != nil {
		t.Fatalf("dialling %s: %v", address, err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

// accept waits for a connection at any listener of g.
func accept(t *testing.T, g *Gate) *socket.Conn {
	t.Helper()
	var conn *socket.Conn
	testbed.Eventually(t, "a connection can be accepted", func() bool {
		for _, l := range g.Listeners {
			c, err := l.Accept()
			if err != nil {
				t.Fatalf("Accept: %v", err)
			}
			if c != nil {
				conn = c
				return true
			}
		}
		return false
	})
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func TestOpenListensInOneNetnsOnly(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	if got := len(g.Listeners); got != 2 {
		t.Errorf("got %d listeners, want one for each family", got)
	}
	other := testbed.NewHost(t, "other")
	for _, loopback := range []string{"127.0.0.1:15001", "[::1]:15001"} {
		dial(t, h, loopback)
		if _, err := other.Dial(t.Context(), "tcp", loopback); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s in another netns: got %v, want it refused", loopback, err)
		}
	}
}

func TestWaitDoesNotAccept(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	l := g.Listeners[0]
	for want := 1; want <= 3; want++ {
		dial(t, h, webIPv4)
		for range 2 {
			if err := l.Wait(); err != nil {
				t.Fatalf("Wait: %v", err)
			}
		}
		checkQueued(t, g, want)
	}
	dial(t, h, webIPv6)
	checkQueued(t, g, 4)
	for want := 3; want >= 0; want-- {
		accept(t, g)
		checkQueued(t, g, want)
	}
	for _, l := range g.Listeners {
		if c, err := l.Accept(); c != nil || err != nil {
			t.Errorf("Accept without a connection: got %v, %v; want nothing", c, err)
		}
	}
}

// checkQueued waits until want connections are queued: the client sees the end of the handshake a moment earlier.
func checkQueued(t *testing.T, g *Gate, want int) {
	t.Helper()
	testbed.Eventually(t, strconv.Itoa(want)+" connections are queued", func() bool {
		got, err := g.Queued()
		if err != nil {
			t.Fatalf("Queued: %v", err)
		}
		return got == want
	})
}

func TestWaitWakesForAConnection(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	done := make(chan error)
	for _, l := range g.Listeners {
		go func() { done <- l.Wait() }()
	}
	for _, address := range []string{webIPv4, webIPv6} {
		dial(t, h, address)
		if err := <-done; err != nil {
			t.Errorf("Wait: %v", err)
		}
	}
}

func TestCloseUnblocksWait(t *testing.T) {
	t.Parallel()
	_, g := newPod(t)
	done := make(chan error)
	for _, l := range g.Listeners {
		go func() { done <- l.Wait() }()
	}
	if err := g.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	for range g.Listeners {
		if err := <-done; !errors.Is(err, os.ErrClosed) {
			t.Errorf("Wait: got %v, want os.ErrClosed", err)
		}
	}
	for _, l := range g.Listeners {
		if err := l.Wait(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Wait after Close: got %v, want os.ErrClosed", err)
		}
		if c, err := l.Accept(); c != nil || !errors.Is(err, os.ErrClosed) {
			t.Errorf("Accept after Close: got %v, %v; want os.ErrClosed", c, err)
		}
	}
	if _, err := g.Queued(); err == nil {
		t.Error("Queued after Close: got no error")
	}
}

func TestCloseResetsQueuedConnections(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	c := dial(t, h, webIPv4)
	checkQueued(t, g, 1)
	if err := g.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the app reads: got %v, want a reset", err)
	}
}

// TestAcceptedConnectionsWork: data that was sent before can be read, and deadlines work.
func TestAcceptedConnectionsWork(t *testing.T) {
	t.Parallel()
	for _, address := range []string{webIPv4, webIPv6} {
		h, g := newPod(t)
		app := dial(t, h, address)
		if _, err := io.WriteString(app, "early"); err != nil {
			t.Fatal(err)
		}
		c := accept(t, g)
		got := make([]byte, 5)
		if _, err := io.ReadFull(c, got); err != nil || string(got) != "early" {
			t.Errorf("%s: got %q, %v", address, got, err)
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, err := c.Read(got); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: read with a deadline: got %v, want os.ErrDeadlineExceeded", address, err)
		}
	}
}

func TestOpenFails(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	const none = "/run/netns/there-is-no-such-netns"
	if g, err := Open(none, ruleset.DefaultPorts); g != nil || err == nil || !strings.Contains(err.Error(), none) {
		t.Errorf("no netns: got %v, %v; want an error that names it", g, err)
	}
	h := testbed.NewHost(t, "taken")
	taken := h.Listen("[::1]:15001")
	g, err := Open(h.Path(), ruleset.DefaultPorts)
	where := "netns " + h.Path() + ": port 15001 of ::"
	if g != nil || !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), where) {
		t.Errorf("the port is taken: got %v, %v; want an error that names it", g, err)
	}
	_ = taken.Close()
	g, err = Open(h.Path(), ruleset.DefaultPorts) // the listener of the other family was closed
	if err != nil {
		t.Fatalf("the port is free again: %v", err)
	}
	_ = g.Close()
}

// TestOpenWhileOldConnectionsRemain: open connections of a daemon that died, and those in TIME_WAIT, do not occupy the
// port.
func TestOpenWhileOldConnectionsRemain(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h, g := newPod(t)
	app := dial(t, h, webIPv4)
	c := accept(t, g)
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(h.Path(), ruleset.DefaultPorts)
	if err != nil {
		t.Fatalf("Open with an open connection: %v", err)
	}
	_ = again.Close()
	_ = c.Close() // first, so that this side goes to TIME_WAIT
	_, _ = io.ReadAll(app)
	_ = app.Close()
	if again, err = Open(h.Path(), ruleset.DefaultPorts); err != nil {
		t.Fatalf("Open with a connection in TIME_WAIT: %v", err)
	}
	_ = again.Close()
}

func TestOriginalDestinationOfRedirectedConnections(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	for _, want := range []string{webIPv4, webIPv6, "192.0.2.9:1", "[2001:db8:ffff::1]:65535"} {
		dial(t, h, want)
		got, err := conntrack.OriginalDestination(accept(t, g))
		if err != nil || got != netip.MustParseAddrPort(want) {
			t.Errorf("got %v, %v; want %s", got, err, want)
		}
	}
	for _, direct := range []string{"127.0.0.1:15001", "[::1]:15001", "10.0.0.5:15001", "[fd00::5]:15001"} {
		dial(t, h, direct)
		if got, err := conntrack.OriginalDestination(accept(t, g)); !errors.Is(err, conntrack.ErrNotRedirected) {
			t.Errorf("%s: got %v, %v; want ErrNotRedirected", direct, got, err)
		}
	}
}

// TestOriginalDestinationWithoutConntrack: the netns has no nat rules.
func TestOriginalDestinationWithoutConntrack(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "plain")
	g, err := Open(h.Path(), ruleset.DefaultPorts)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close() //nolint:errcheck // nothing was written
	for _, direct := range []string{"127.0.0.1:15001", "[::1]:15001"} {
		dial(t, h, direct)
		if got, err := conntrack.OriginalDestination(accept(t, g)); err == nil {
			t.Errorf("%s: got %v, want an error", direct, got)
		}
	}
}

// TestWidenAndNarrowKeepConnections: neither open nor queued connections are reset.
func TestWidenAndNarrowKeepConnections(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	addresses := []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")}
	dial(t, h, webIPv4)
	checkQueued(t, g, 1)
	same, err := g.Widen(h.Path(), nil)
	if err != nil || same != g {
		t.Errorf("Widen without addresses: got %v, %v; want the same gate", same, err)
	}
	wide, err := g.Widen(h.Path(), addresses)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = wide.Close() })
	if same, err := wide.Widen(h.Path(), addresses[:1]); err != nil || same != wide {
		t.Errorf("Widen again: got %v, %v; want the same gate", same, err)
	}
	checkQueued(t, wide, 1)
	dial(t, h, "10.0.0.5:15006")
	dial(t, h, "[fd00::5]:15006")
	checkQueued(t, wide, 3)
	if c, err := wide.Counts(); err != nil || c.Open != 0 {
		t.Errorf("Counts before accepting: got %+v, %v; want none open", c, err)
	}
	if _, err := h.Dial(t.Context(), "tcp", "127.0.0.1:15006"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("at another address: got %v, want it refused", err)
	}
	if same, err := wide.Narrow(); err != nil || same != wide {
		t.Errorf("Narrow while connections wait: got %v, %v; want the same gate", same, err)
	}
	for range 3 {
		accept(t, wide)
	}
	if c, err := wide.Counts(); err != nil || c.Open != 3 {
		t.Errorf("Counts after accepting: got %+v, %v; want 3 open", c, err)
	}
	narrow, err := wide.Narrow()
	if err != nil || len(narrow.Listeners) != 2 {
		t.Fatalf("Narrow: got %v, %v; want the two outbound listeners", narrow, err)
	}
	// Not at once: a process that another test forks holds the sockets until it has executed its program.
	testbed.Eventually(t, "the inbound port is closed", func() bool {
		_, err := h.Dial(t.Context(), "tcp", "10.0.0.5:15006")
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	dial(t, h, webIPv6)
	checkQueued(t, narrow, 1)
}

// TestAdoptedListenersKnowTheirDirection, also at an address that the netns does not have yet.
func TestAdoptedListenersKnowTheirDirection(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	addresses := []netip.Addr{netip.MustParseAddr("198.51.100.2")}
	wide, err := g.Widen(h.Path(), addresses)
	if err != nil {
		t.Fatal(err)
	}
	adopted, err := Adopt(h.Path(), wide.Files(), ruleset.DefaultPorts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = adopted.Close() })
	for i, want := range []bool{false, false, true} {
		if got := adopted.Listeners[i].Inbound; got != want {
			t.Errorf("listener %d: got inbound %t, want %t", i, got, want)
		}
	}
	if same, err := adopted.Widen(h.Path(), addresses); err != nil || same != adopted {
		t.Errorf("Widen: got %v, %v; want the same gate", same, err)
	}
}
