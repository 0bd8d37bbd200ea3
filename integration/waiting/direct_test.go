package waiting

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// direct are the annotations of a pod whose connections wait for no longer than they have to.
var direct = late("direct", "1s")

// endings are how a server can end a connection, by the port that it serves at. To conntrack they are not the same.
var endings = map[string]func(*net.TCPConn){
	"1113": func(*net.TCPConn) {},
	"1114": func(c *net.TCPConn) {
		_, _ = c.Read(make([]byte, 1)) // until the client has heard
		_ = c.SetLinger(0)
	},
}

// servePeers tells, in the world, the address and the port that a connection comes from.
func servePeers(n *testbed.Node) {
	for port, end := range endings {
		n.World.Serve(":"+port, func(c net.Conn) {
			fmt.Fprintln(c, c.RemoteAddr())
			end(c.(*net.TCPConn))
		})
	}
}

// peerFrom connects from h, from one port if that is not 0, and returns what the server saw, and the port.
func peerFrom(ctx context.Context, h *testbed.Host, address string, port uint16) (seen netip.AddrPort, own uint16, err error) {
	var c net.Conn
	err = h.Do(func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{Port: int(port)}, Control: func(_, _ string, raw syscall.RawConn) error {
			return raw.Control(func(fd uintptr) {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) // bind tells
			})
		}}
		c, err = d.DialContext(ctx, "tcp", address)
		return err
	})
	if err != nil {
		return seen, 0, err
	}
	defer c.Close() //nolint:errcheck // read to its end
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return seen, 0, err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return seen, 0, err
	}
	if _, err := c.Write([]byte("x")); err == nil {
		_, _ = io.Copy(io.Discard, c) // however it ends
	}
	seen, err = netip.ParseAddrPort(strings.TrimSpace(line))
	return seen, c.LocalAddr().(*net.TCPAddr).AddrPort().Port(), err
}

// TestDirect: past the timeout, and while the upstream is late, a connection goes where it was going, from the pod's own
// address, whatever the backend. It is said and counted. With the upstream there, or without the annotation, none does.
func TestDirect(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		for _, f := range testbed.Flavours {
			t.Run(protocol+" "+f.Name, func(t *testing.T) {
				t.Parallel()
				n := testbed.NewWith(t, protocol)
				n.Config["metricsAddress"] = "127.0.0.1:15090"
				n.LogLevel = "INFO"
				n.ServeEcho()
				n.World.ServeCaller(":80")
				d := n.StartDaemon()
				patient := f.AddPod(t, n, "patient", nil)
				waits := testbed.Echoes(testbed.Context(t), 2, testbed.RandomBytes(100), patient.Host)
				pod := f.AddPod(t, n, "hasty", n.Annotated(direct))
				nested := pod.Nested()
				var wg sync.WaitGroup
				for _, h := range []*testbed.Host{pod.Host, nested} {
					wg.Go(func() { testbed.WantCaller(t, h, net.JoinHostPort(testbed.WorldIPv4, "80"), pod.IPv4) })
					wg.Go(func() { testbed.WantCaller(t, h, net.JoinHostPort(testbed.WorldIPv6, "80"), pod.IPv6) })
				}
				testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 4, testbed.RandomBytes(3<<20), pod.Host), 4)
				wg.Wait()
				testbed.Eventually(t, "they are counted", func() bool {
					metrics, err := n.Host.Get(testbed.Context(t), "http://127.0.0.1:15090/metrics")
					return err == nil && strings.Contains(metrics, "\nsluice_direct_connections_total 8\n")
				})
				testbed.WantMatch(t, d.Log(), `level=WARN msg="connections went to their destinations WITHOUT the upstream: they had waited for it for too long"`)
				testbed.Eventually(t, "nothing is open any more", func() bool { return d.Of(pod).Open == 0 })
				if got := d.Waiting(patient); got != 2 {
					t.Errorf("%d connections of the other pod wait, want 2", got)
				}
				n.StartUpstream()
				testbed.WantServed(t, waits, 2)
				testbed.WantCaller(t, pod.Host, net.JoinHostPort(testbed.WorldIPv4, "80"), "198.51.100.1")
				testbed.WantCaller(t, pod.Host, net.JoinHostPort(testbed.WorldIPv6, "80"), "2001:db8::1")
			})
		}
	}
}

// TestDirectIsNobodyElses: a process in the pod that takes the port that went direct before is captured as ever, however
// that connection has ended.
func TestDirectIsNobodyElses(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			servePeers(n)
			n.StartDaemon()
			pod := f.AddPod(t, n, "pod", n.Annotated(direct))
			var wg sync.WaitGroup
			for port := range endings {
				wg.Go(func() { takeOverPort(t, pod, net.JoinHostPort(testbed.WorldIPv4, port), pod.IPv4) })
				wg.Go(func() { takeOverPort(t, pod, net.JoinHostPort(testbed.WorldIPv6, port), pod.IPv6) })
			}
			wg.Wait()
		})
	}
}

func takeOverPort(t *testing.T, pod *testbed.Pod, address, ip string) {
	seen, port, err := peerFrom(testbed.Context(t), pod.Host, address, 0)
	if err != nil {
		t.Error(err)
		return
	}
	if seen.Addr().String() != ip || seen.Port() == port {
		t.Errorf("%s saw %s, want %s and another port than %d", address, seen, ip, port)
	}
	var again netip.AddrPort
	for ctx := testbed.Context(t); ctx.Err() == nil; {
		again, port, err = peerFrom(ctx, pod.Host, address, seen.Port())
		if !errors.Is(err, syscall.EADDRINUSE) { // by sluiced, for a moment
			break
		}
	}
	if err != nil || port != seen.Port() || again.Port() == port {
		t.Errorf("from port %d, %s saw %s, %v: want it to see another", port, address, again, err)
	}
}

// TestSYNOfAKnownConnectionStays: nat is not asked about a SYN that conntrack takes for part of a connection that it knows.
func TestSYNOfAKnownConnectionStays(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			servePeers(n)
			n.StartConnectProxy()
			n.StartDaemon()
			pod := f.AddPod(t, n, "pod", nil)
			nested := pod.Nested()
			for _, from := range []struct {
				host     *testbed.Host
				src, dst string
			}{
				{pod.Host, pod.IPv4, testbed.WorldIPv4},
				{pod.Host, pod.IPv6, testbed.WorldIPv6},
				{nested, "172.30.0.2", testbed.WorldIPv4},
			} {
				pod.Exec("conntrack", "-I", "-p", "tcp", "-s", from.src, "-d", from.dst, "--sport", "4000", "--dport", "1113",
					"--state", "ESTABLISHED", "-u", "SEEN_REPLY,ASSURED", "-t", "60")
				ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond) // the second SYN goes after one second
				if seen, _, err := peerFrom(ctx, from.host, net.JoinHostPort(from.dst, "1113"), 4000); err == nil {
					t.Errorf("from %s the server saw %s", from.src, seen)
				}
				cancel()
			}
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}

// TestDirectEnds: what cannot go direct is reset; halves and resets are passed on.
func TestDirectEnds(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.ServeEcho()
	d := n.StartDaemon()
	pod := testbed.Flavours[0].AddPod(t, n, "pod", n.Annotated(direct))
	for what, address := range map[string]string{"refused": testbed.WorldIPv4 + ":81", "unreachable": "203.0.113.1:80"} {
		c, err := pod.Dial(testbed.Context(t), "tcp", address)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if _, err := testbed.ReadAll(testbed.Context(t), c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: got %v, want a reset", what, err)
		}
		_ = c.Close()
	}
	c := testbed.MustOpen(t, pod.Host, testbed.EchoAddresses[0])
	if _, err := c.Write([]byte("all of it")); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := testbed.ReadAll(testbed.Context(t), c); got != "all of it" || err != nil {
		t.Errorf("got %q, %v after the end of one half", got, err)
	}
	server := testbed.Accepted(t, n, testbed.WorldIPv4+":82")
	gone := testbed.MustOpen(t, pod.Host, testbed.WorldIPv4+":82")
	there := <-server
	if err := gone.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	_ = gone.Close()
	if _, err := testbed.ReadAll(testbed.Context(t), there); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want the app's reset", err)
	}
	testbed.Eventually(t, "nothing is open any more", func() bool { return d.Of(pod).Open == 0 })
}

// TestDirectAndRestarts: a hand-over does not end what goes direct, and the next daemon has the same policy.
func TestDirectAndRestarts(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			n.ServeEcho()
			d := n.StartDaemon()
			pod := testbed.Flavours[0].AddPod(t, n, "pod", n.Annotated(direct))
			talks := testbed.StartTalks(t, pod.Host, 2, 1000)
			testbed.WantEchoes(t, talks)
			d = n.HandOver(d)
			testbed.ForEach(t, len(talks), func(i int) error { return talks[i].Send(testbed.RandomBytes(1000)) })
			testbed.WantEchoes(t, talks)
			testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 2, testbed.RandomBytes(100), pod.Host), 2)
			d.Kill()
			waits := testbed.Echoes(testbed.Context(t), 2, testbed.RandomBytes(100), pod.Host)
			n.StartDaemon()
			testbed.WantServed(t, waits, 2)
		})
	}
}
