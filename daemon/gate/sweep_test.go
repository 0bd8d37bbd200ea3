package gate

import (
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// hold dials, sends data, and half-closes.
func hold(t *testing.T, h *testbed.Host, address, data string) *net.TCPConn {
	t.Helper()
	c := dial(t, h, address)
	testbed.Send(t, c, data)
	testbed.CloseWrite(t, c)
	return c
}

// giveUp dials and ends the connection: with a reset, or with a FIN.
func giveUp(t *testing.T, h *testbed.Host, address string, reset bool) {
	t.Helper()
	c := dial(t, h, address)
	if reset {
		if err := c.SetLinger(0); err != nil {
			t.Fatal(err)
		}
	}
	_ = c.Close()
}

// checkSweep waits until Sweep finds so many connections that are over. A process that another test forks holds closed
// sockets until it has executed its program.
func checkSweep(t *testing.T, g *Gate, want int) {
	t.Helper()
	got, last := 0, 0
	testbed.Eventually(t, "the apps are gone", func() bool {
		var err error
		last = got
		if got, err = g.Sweep(); err != nil {
			t.Fatalf("Sweep: %v", err)
		}
		return got >= want && got == last
	})
	if got != want {
		t.Errorf("Sweep: got %d connections that are over, want %d", got, want)
	}
}

// TestSweepFindsConnectionsThatAreOver, and leaves alone those whose app waits for an answer or has sent data.
func TestSweepFindsConnectionsThatAreOver(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	checkSweep(t, g, 0)
	apps := map[string]net.Conn{} // by their own addresses
	for _, address := range []string{webIPv4, webIPv6} {
		for _, c := range []net.Conn{
			dial(t, h, address), hold(t, h, address, ""), hold(t, h, address, "data"),
		} {
			apps[c.LocalAddr().String()] = c
		}
		gone := hold(t, h, address, "data") // not its data
		apps[gone.LocalAddr().String()] = nil
		_ = gone.Close()
		giveUp(t, h, address, false)
		giveUp(t, h, address, true)
	}
	checkQueued(t, g, 12)
	checkSweep(t, g, 4)
	checkQueued(t, g, 12) // over, and still in the queue
	if c, err := g.Counts(); err != nil || c != (sockdiag.Counts{}) {
		t.Errorf("Counts before accepting: got %+v, %v; want none", c, err)
	}
	over, nowhere := 0, 0
	for range 12 {
		conn := accept(t, g)
		if reset, _ := socket.IsOver(conn); reset {
			over++
			if _, err := conntrack.OriginalDestination(conn); err != nil {
				nowhere++
			}
			continue
		}
		app, ok := apps[conn.Peer.String()]
		if !ok {
			t.Errorf("accepted a connection of %s, want one of %v", conn.Peer, apps)
		}
		testbed.Send(t, conn, "answer")
		if app != nil {
			testbed.CheckReads(t, "the app", app, "answer")
		} else {
			testbed.CheckReads(t, "the server", conn, "data")
		}
	}
	if over != 4 || nowhere != 2 {
		t.Errorf("accepted %d connections that are over, %d without a destination; want 4, and the 2 that Sweep reset",
			over, nowhere)
	}
	checkSweep(t, g, 0)
}

// TestSweepLeavesUnknownApps alone: the app's socket is in another netns, as that of a nested container is.
func TestSweepLeavesUnknownApps(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	other := testbed.NewHost(t, "nested")
	h.IP("link", "add", "v0", "type", "veth", "peer", "name", "eth0", "netns", other.Name)
	h.IP("addr", "add", "172.30.0.1/24", "dev", "v0")
	h.IP("link", "set", "v0", "up")
	other.IP("addr", "add", "172.30.0.2/24", "dev", "eth0")
	other.IP("link", "set", "eth0", "up")
	giveUp(t, other, "172.30.0.1:15001", false)
	checkQueued(t, g, 1)
	if got, err := g.Sweep(); got != 0 || err != nil {
		t.Errorf("Sweep: got %d connections that are over, %v; want none", got, err)
	}
	if b, err := io.ReadAll(accept(t, g)); len(b) > 0 || err != nil {
		t.Errorf("got %q, %v; want the app's end", b, err)
	}
}

// TestRefuseTellsWhetherTheConnectionWasOpen: one that its app has reset does not count as one that was refused.
func TestRefuseTellsWhetherTheConnectionWasOpen(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	l := g.Listeners[0]
	giveUp(t, h, webIPv4, true)
	checkSweep(t, g, 1)
	app := dial(t, h, webIPv4)
	checkQueued(t, g, 2)
	for _, want := range []bool{false, true} {
		if found, open, err := l.Refuse(); !found || open != want || err != nil {
			t.Errorf("got found %t, open %t, %v; want open %t", found, open, err, want)
		}
	}
	testbed.CheckReadFails(t, "the app", app, syscall.ECONNRESET)
	if found, _, err := l.Refuse(); found || err != nil {
		t.Errorf("an empty queue: got %t, %v; want no connection", found, err)
	}
}
