package capture

import (
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// walled is a captured pod with a tap at its link.
type walled struct {
	node   *testbed.Node
	daemon *testbed.Daemon
	pod    *testbed.Pod
	tap    *testbed.Tap
}

// forWalls runs f with a walled pod, for each flavour.
func forWalls(t *testing.T, protocol string, f func(*testing.T, *walled)) {
	t.Helper()
	t.Parallel()
	for _, flavour := range testbed.Flavours {
		t.Run(flavour.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			n.Config["capture"].(map[string]any)["excludeCIDRs"] = []string{"169.254.0.0/16", excludedIPv4 + "/32"}
			n.World.IP("addr", "add", excludedIPv4+"/32", "dev", "eth0")
			if protocol == "sockets" {
				testbed.StartUpstream(n)
			} else {
				testbed.StartConnectProxy(n)
			}
			w := &walled{node: n, daemon: n.StartDaemon()}
			w.pod = flavour.AddPod(t, n, "walled", nil)
			w.tap = w.pod.Tap()
			f(t, w)
		})
	}
}

// captured are destinations in the world that are captured.
var capturedDestinations = []netip.AddrPort{
	netip.MustParseAddrPort(testbed.WorldIPv4 + ":7"),
	netip.MustParseAddrPort("[" + testbed.WorldIPv6 + "]:7"),
}

// wantNothingOut fails the test if TCP to a captured destination has left the pod.
func (w *walled) wantNothingOut(t *testing.T) {
	t.Helper()
	w.tap.Sync(w.pod)
	for _, to := range capturedDestinations {
		if out := w.tap.Frames(testbed.TCPTo(to)); len(out) > 0 {
			t.Errorf("%d segments to %s have left the pod, the first: %x", len(out), to, out[0])
		}
	}
}

// TestConntrackForgets: a connection whose conntrack entry is deleted goes on, and nothing of it leaves the pod.
func TestConntrackForgets(t *testing.T) {
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			forWalls(t, protocol, func(t *testing.T, w *walled) {
				testbed.ServeEcho(w.node)
				for _, to := range capturedDestinations {
					c, err := w.pod.Dial(testbed.Context(t), "tcp", to.String())
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close() //nolint:errcheck // all has been read
					for _, text := range []string{"before", "after"} {
						if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
							t.Fatal(err)
						}
						if _, err := io.WriteString(c, text); err != nil {
							t.Fatalf("%s, sending %q: %v", to, text, err)
						}
						b := make([]byte, len(text))
						if _, err := io.ReadFull(c, b); err != nil || string(b) != text {
							t.Fatalf("%s: got %q, %v; want %q", to, b, err, text)
						}
						w.pod.Exec("conntrack", "--flush")
					}
				}
				w.wantNothingOut(t)
			})
		})
	}
}

// TestPacketSockets: no TCP segment that a packet socket sends leaves the pod, and other frames do.
func TestPacketSockets(t *testing.T) {
	forWalls(t, "connect", func(t *testing.T, w *walled) {
		const everyMark = 0xffffffff
		const syn, ack = 2, 16
		for _, to := range capturedDestinations {
			from := netip.AddrPortFrom(netip.MustParseAddr(w.pod.IPv4), 4321)
			if to.Addr().Is6() {
				from = netip.AddrPortFrom(netip.MustParseAddr(w.pod.IPv6), 4321)
			}
			for _, flags := range []byte{syn, ack, syn | ack, 0} {
				frame := testbed.Segment{From: from, To: to, Flags: flags, Payload: []byte("secret")}.Frame()
				for _, o := range []testbed.FrameOptions{
					{}, {Mark: everyMark}, {BypassQdisc: true}, {Mark: everyMark, BypassQdisc: true},
					{Protocol: unix.ETH_P_ARP}, {Protocol: unix.ETH_P_ARP, Mark: everyMark, BypassQdisc: true},
				} {
					testbed.SendFrames(w.pod.Host, "eth0", o, frame)
				}
			}
			for _, tag := range [][]byte{{0x81, 0, 0, 0}, {0x81, 0, 0x20, 0}, {0x81, 0, 0, 5}, {0x88, 0xa8, 0, 0}} {
				frame := testbed.Segment{From: from, To: to, Flags: syn, Tags: tag, Payload: []byte("secret")}.Frame()
				testbed.SendFrames(w.pod.Host, "eth0", testbed.FrameOptions{Mark: everyMark}, frame)
			}
		}
		w.tap.Sync(w.pod)
		if out := w.tap.Frames(contains("secret")); len(out) > 0 {
			t.Errorf("%d frames have left the pod, the first: %x", len(out), out[0])
		}
		// The mark of a socket of TCP counts for nothing either.
		testbed.ServeEcho(w.node)
		testbed.EchoAll(t, 2, 100, w.pod.Host)
		w.wantNothingOut(t)
	})
}

func contains(text string) func([]byte) bool {
	return func(f []byte) bool { return len(f) >= len(text) && string(f[len(f)-len(text):]) == text }
}

// TestBoundToInterface: SO_BINDTODEVICE does not lead a connection around the gate, nor into the void.
func TestBoundToInterface(t *testing.T) {
	forWalls(t, "connect", func(t *testing.T, w *walled) {
		for _, to := range capturedDestinations {
			w.node.World.ServeCaller(to.String())
			d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
				cerr := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "eth0") })
				if err == nil {
					err = cerr
				}
				return err
			}}
			var c net.Conn
			if err := w.pod.Do(func() (err error) {
				c, err = d.DialContext(testbed.Context(t), "tcp", to.String())
				return err
			}); err != nil {
				t.Errorf("connecting to %s by eth0: %v", to, err)
				continue
			}
			defer c.Close() //nolint:errcheck // read to its end
			if got, err := testbed.ReadAll(testbed.Context(t), c); err != nil || got == "" {
				t.Errorf("%s: the server saw %q, %v", to, got, err)
			}
		}
		w.wantNothingOut(t)
	})
}

// TestForeignNATInFront: a nat chain of another program that leads connections elsewhere, before sluice's sees them,
// does not lead them out of the pod, and CHECK names it.
func TestForeignNATInFront(t *testing.T) {
	forWalls(t, "connect", func(t *testing.T, w *walled) {
		other := netip.MustParseAddrPort(testbed.WorldIPv4 + ":8080")
		w.node.World.ServeCaller(other.String())
		for _, command := range []string{
			"add table ip foreign",
			"add chain ip foreign output { type nat hook output priority -150; }",
			"add rule ip foreign output ip daddr " + testbed.WorldIPv4 + " tcp dport 7 dnat to " + other.String(),
		} {
			w.pod.Exec("nft", command)
		}
		testbed.WantDropped(t, w.pod.Host, capturedDestinations[0].String())
		w.wantNothingOut(t)
		if out := w.tap.Frames(testbed.TCPTo(other)); len(out) > 0 {
			t.Errorf("%d segments have left the pod, the first: %x", len(out), out[0])
		}
		testbed.WantErrorLike(t, w.pod.Check(), "the nat chain output of table foreign of another program")
	})
}
