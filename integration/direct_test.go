package integration

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/netns"
)

// direct are the annotations of a pod whose connections wait for no longer than they have to.
var direct = late("direct", "1s")

const peersPort = "1113"

// servePeers tells, in the world, the address and the port that a connection comes from.
func servePeers(n *netns.Node) {
	for _, ip := range []string{netns.WorldIPv4, netns.WorldIPv6} {
		n.World.Serve(net.JoinHostPort(ip, peersPort), func(c net.Conn) { fmt.Fprint(c, c.RemoteAddr()) })
	}
}

// peerFrom connects from h, from one port if that is not 0, and returns what the server saw, and the port.
func peerFrom(ctx context.Context, h *netns.Host, ip string, port uint16) (seen netip.AddrPort, own uint16, err error) {
	var c net.Conn
	err = h.Do(func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{Port: int(port)}, Control: func(_, _ string, raw syscall.RawConn) error {
			return raw.Control(func(fd uintptr) {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) // bind tells
			})
		}}
		c, err = d.DialContext(ctx, "tcp", net.JoinHostPort(ip, peersPort))
		return err
	})
	if err != nil {
		return seen, 0, err
	}
	defer c.Close() //nolint:errcheck // read to its end
	text, err := readAll(ctx, c)
	if err != nil {
		return seen, 0, err
	}
	seen, err = netip.ParseAddrPort(text)
	return seen, c.LocalAddr().(*net.TCPAddr).AddrPort().Port(), err
}

// TestDirect: past the timeout, and while the upstream is late, a connection goes where it was going, from the pod's own
// address, whatever the backend. It is said and counted. With the upstream there, or without the annotation, none does.
func TestDirect(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		for _, f := range flavours {
			t.Run(protocol+" "+f.name, func(t *testing.T) {
				t.Parallel()
				n, start := newNodeFor(t, protocol)
				n.Config["metricsAddress"] = "127.0.0.1:15090"
				n.LogLevel = "INFO"
				echoWorld(n)
				serveCaller(n.World, ":80")
				d := n.StartDaemon()
				patient := f.addPod(t, n, "patient", nil)
				waits := clients(patience(t), 2, random(100), patient.Host)
				pod := f.addPod(t, n, "hasty", annotated(n, direct))
				nested := pod.Nested()
				var wg sync.WaitGroup
				for _, h := range []*netns.Host{pod.Host, nested} {
					wg.Go(func() { wantCaller(t, h, net.JoinHostPort(netns.WorldIPv4, "80"), pod.IPv4) })
					wg.Go(func() { wantCaller(t, h, net.JoinHostPort(netns.WorldIPv6, "80"), pod.IPv6) })
				}
				allWell(t, clients(patience(t), 4, random(3<<20), pod.Host), 4)
				wg.Wait()
				wantText(t, d.Log(), `level=WARN msg="connections went to their destinations WITHOUT the upstream: they have waited too long" .*timeout=1s`)
				metrics, err := get(patience(t), client(n.Host), "http://127.0.0.1:15090/metrics")
				if err != nil || !strings.Contains(metrics, "\nsluice_direct_connections_total 8\n") {
					t.Errorf("got no sluice_direct_connections_total of 8: %v", err)
				}
				netns.Eventually(t, "nothing is open any more", func() bool { return d.Of(pod).Open == 0 })
				if got := waiting(d, patient); got != 2 {
					t.Errorf("%d connections of the other pod wait, want 2", got)
				}
				start()
				allWell(t, waits, 2)
				wantCaller(t, pod.Host, net.JoinHostPort(netns.WorldIPv4, "80"), "198.51.100.1")
				wantCaller(t, pod.Host, net.JoinHostPort(netns.WorldIPv6, "80"), "2001:db8::1")
			})
		}
	}
}

// TestDirectIsNobodyElses: a process in the pod that takes the port that went direct before is captured as ever.
func TestDirectIsNobodyElses(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := netns.NewNode(t, bin)
			servePeers(n)
			n.StartDaemon()
			pod := f.addPod(t, n, "pod", annotated(n, direct))
			for ip, own := range map[string]string{netns.WorldIPv4: pod.IPv4, netns.WorldIPv6: pod.IPv6} {
				seen, port, err := peerFrom(patience(t), pod.Host, ip, 0)
				if err != nil {
					t.Fatal(err)
				}
				if seen.Addr().String() != own || seen.Port() == port {
					t.Errorf("the server saw %s, want %s and another port than %d", seen, own, port)
				}
				var again netip.AddrPort
				netns.Eventually(t, "the port is free", func() bool {
					again, port, err = peerFrom(patience(t), pod.Host, ip, seen.Port())
					return !errors.Is(err, syscall.EADDRINUSE)
				})
				if err != nil {
					t.Fatal(err)
				}
				if port != seen.Port() || again.Port() == port {
					t.Errorf("from port %d, the server saw %s: it has gone around", port, again)
				}
			}
		})
	}
}

// TestDirectEnds: what cannot go direct is reset; halves and resets are passed on.
func TestDirectEnds(t *testing.T) {
	t.Parallel()
	n := netns.NewNode(t, bin)
	echoWorld(n)
	d := n.StartDaemon()
	pod := flavours[0].addPod(t, n, "pod", annotated(n, direct))
	for what, address := range map[string]string{"refused": netns.WorldIPv4 + ":81", "unreachable": "203.0.113.1:80"} {
		c, err := pod.Dial(patience(t), "tcp", address)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if _, err := readAll(patience(t), c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: got %v, want a reset", what, err)
		}
		_ = c.Close()
	}
	c := mustOpen(t, pod.Host, echoAddresses[0])
	if _, err := c.Write([]byte("all of it")); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := readAll(patience(t), c); got != "all of it" || err != nil {
		t.Errorf("got %q, %v after the end of one half", got, err)
	}
	server := accepted(t, n, netns.WorldIPv4+":82")
	gone := mustOpen(t, pod.Host, netns.WorldIPv4+":82")
	there := <-server
	if err := gone.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	_ = gone.Close()
	if _, err := readAll(patience(t), there); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want the app's reset", err)
	}
	netns.Eventually(t, "nothing is open any more", func() bool { return d.Of(pod).Open == 0 })
}

// TestDirectAndRestarts: a hand-over does not end what goes direct, and the next daemon has the same policy.
func TestDirectAndRestarts(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n, _ := newNodeFor(t, protocol)
			echoWorld(n)
			d := n.StartDaemon()
			pod := flavours[0].addPod(t, n, "pod", annotated(n, direct))
			talks := startTalks(t, pod.Host, 2, 1000)
			hearAll(t, talks)
			d = succeed(t, n, d)
			forEach(t, talks, func(i int) error { return talks[i].say(random(1000)) })
			hearAll(t, talks)
			allWell(t, clients(patience(t), 2, random(100), pod.Host), 2)
			d.Kill()
			waits := clients(patience(t), 2, random(100), pod.Host)
			n.StartDaemon()
			allWell(t, waits, 2)
		})
	}
}

// TestDirectInbound: what is sent to the pod gets to it too.
func TestDirectInbound(t *testing.T) {
	t.Parallel()
	n, _ := newNodeFor(t, "sockets")
	n.StartDaemon()
	annotations := late("direct", "1s")
	annotations["sluice.dev/capture-inbound-ports"] = inboundPort
	pod := flavours[0].addPod(t, n, "web", annotated(n, annotations))
	serveCaller(pod.Host, ":"+inboundPort)
	allWell(t, callers(t, n.World, pod, 2, pod.IPv4, pod.IPv6), 2)
}
