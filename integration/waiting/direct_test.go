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

// direct are annotations for the policy direct, with the shortest timeout that the tests need.
var direct = late("direct", "1s")

// endings are the ways in which a server can end a connection, by its port. They differ in conntrack.
var endings = map[string]func(*net.TCPConn){
	"1113": func(*net.TCPConn) {},
	"1114": func(c *net.TCPConn) {
		_, _ = c.Read(make([]byte, 1)) // until the client has the answer
		_ = c.SetLinger(0)
	},
}

// servePeers serves in the world. It answers with the address and port that a connection comes from.
func servePeers(n *testbed.Node) {
	for port, end := range endings {
		n.World.Serve(":"+port, func(c net.Conn) {
			fmt.Fprintln(c, c.RemoteAddr())
			end(c.(*net.TCPConn))
		})
	}
}

// peerFrom connects from h, from the port unless it is 0. It returns the address that the server saw, and the port.
func peerFrom(
	ctx context.Context, h *testbed.Host, address string, port uint16,
) (seen netip.AddrPort, own uint16, err error) {
	reuse := func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) // bind fails without it
		})
	}
	var c net.Conn
	err = h.Do(func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{Port: int(port)}, Control: reuse}
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
		_, _ = io.Copy(io.Discard, c) // to any end
	}
	seen, err = netip.ParseAddrPort(strings.TrimSpace(line))
	return seen, c.LocalAddr().(*net.TCPAddr).AddrPort().Port(), err
}

// TestDirect: while the upstream is late, a connection goes to its original destination after the timeout, from the
// pod's own address. The daemon logs and counts it. With the upstream there, or without the annotation, no connection
// does.
func TestDirect(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		for _, f := range testbed.Flavours {
			t.Run(protocol+" "+f.Name, func(t *testing.T) {
				t.Parallel()
				n := testbed.NewWith(t, protocol)
				n.Config["metricsAddress"] = "127.0.0.1:15090"
				n.LogLevel = "INFO"
				testbed.ServeEcho(n)
				n.World.ServeCaller(":80")
				d := n.StartDaemon()
				patient := f.AddPod(t, n, "patient", nil)
				waits := testbed.Echoes(t, 2, 100, patient.Host)
				pod := f.AddPod(t, n, "hasty", n.Annotated(direct))
				nested := pod.Nested()
				var wg sync.WaitGroup
				for _, h := range []*testbed.Host{pod.Host, nested} {
					wg.Go(func() { testbed.WantCaller(t, h, net.JoinHostPort(testbed.WorldIPv4, "80"), pod.IPv4) })
					wg.Go(func() { testbed.WantCaller(t, h, net.JoinHostPort(testbed.WorldIPv6, "80"), pod.IPv6) })
				}
				testbed.EchoAll(t, 4, 3<<20, pod.Host)
				wg.Wait()
				testbed.Eventually(t, "they are counted", func() bool {
					metrics, err := n.Get(testbed.Context(t), "http://127.0.0.1:15090/metrics")
					return err == nil && strings.Contains(metrics, "\nsluice_direct_connections_total 8\n")
				})
				const warning = `level=WARN msg="connections went direct, without the upstream`
				testbed.WantMatch(t, d.Log(), warning)
				testbed.Eventually(t, "no connection is open any more", func() bool { return d.Of(pod).Open == 0 })
				if got := d.Waiting(patient); got != 2 {
					t.Errorf("%d connections of the other pod wait, want 2", got)
				}
				testbed.StartUpstream(n)
				testbed.WantServed(t, waits, 2)
				testbed.WantCaller(t, pod.Host, net.JoinHostPort(testbed.WorldIPv4, "80"), testbed.NodeIPv4)
				testbed.WantCaller(t, pod.Host, net.JoinHostPort(testbed.WorldIPv6, "80"), testbed.NodeIPv6)
			})
		}
	}
}

// TestNextConnectionFromADirectPortIsCaptured: a process in the pod takes the port of a connection that went direct. It
// is captured, however that connection has ended.
func TestNextConnectionFromADirectPortIsCaptured(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			servePeers(n)
			n.StartDaemon()
			pod := f.AddPod(t, n, "pod", n.Annotated(direct))
			// After a reset conntrack remembers a connection for this long, and its next SYN is dropped until then. The
			// kernel's default is 10 seconds.
			pod.Exec("sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_timeout_close=2")
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
		if !errors.Is(err, syscall.EADDRINUSE) { // sluiced has the port for a moment
			break
		}
	}
	if err != nil || port != seen.Port() || again.Port() == port {
		t.Errorf("from port %d, %s saw %s, %v: want it to see another", port, address, again, err)
	}
}

// TestSYNOfAKnownConnectionIsDropped: nat does not see a SYN that conntrack takes for part of a known connection.
func TestSYNOfAKnownConnectionIsDropped(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			servePeers(n)
			testbed.StartConnectProxy(n)
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
				pod.Exec("conntrack", "-I", "-p", "tcp", "-s", from.src, "-d", from.dst, "--sport", "4000",
					"--dport", "1113", "--state", "ESTABLISHED", "-u", "SEEN_REPLY,ASSURED", "-t", "60")
				// The second SYN goes after one second.
				ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond)
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

// TestEndsOfDirectConnections: a connection that cannot go direct is reset. Half-closes and resets are passed on.
func TestEndsOfDirectConnections(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	server := testbed.Accepted(t, n, testbed.WorldIPv4+":82")
	d := n.StartDaemon()
	pod := testbed.Flavours[0].AddPod(t, n, "pod", n.Annotated(direct))
	t.Run("all", func(t *testing.T) { // at the same time, since each waits for the timeout
		for name, address := range map[string]string{
			"refused": testbed.WorldIPv4 + ":81", "unreachable": "203.0.113.1:80",
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				c := testbed.MustOpen(t, pod.Host, address)
				if _, err := testbed.ReadAll(testbed.Context(t), c); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("got %v, want a reset", err)
				}
			})
		}
		t.Run("half-close", func(t *testing.T) {
			t.Parallel()
			c := testbed.MustOpen(t, pod.Host, testbed.EchoAddresses[0])
			if _, err := c.Write([]byte("all of it")); err != nil {
				t.Fatal(err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if got, err := testbed.ReadAll(testbed.Context(t), c); got != "all of it" || err != nil {
				t.Errorf("got %q, %v after the half-close", got, err)
			}
		})
		t.Run("reset", func(t *testing.T) {
			t.Parallel()
			app := testbed.MustOpen(t, pod.Host, testbed.WorldIPv4+":82")
			there := <-server
			if err := app.SetLinger(0); err != nil {
				t.Fatal(err)
			}
			_ = app.Close()
			if _, err := testbed.ReadAll(testbed.Context(t), there); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %v, want the app's reset", err)
			}
		})
	})
	testbed.Eventually(t, "no connection is open any more", func() bool { return d.Of(pod).Open == 0 })
}

// TestDirectConnectionsSurviveAHandOver, and the next daemon has the same policy.
func TestDirectConnectionsSurviveAHandOver(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			testbed.ServeEcho(n)
			d := n.StartDaemon()
			pod := testbed.Flavours[0].AddPod(t, n, "pod", n.Annotated(direct))
			talks := testbed.StartTalks(t, pod.Host, 2, 1000)
			testbed.WantEchoes(t, talks)
			d = n.HandOver(d)
			testbed.ForEach(t, len(talks), func(i int) error { return talks[i].Send(testbed.RandomBytes(1000)) })
			testbed.WantEchoes(t, talks)
			testbed.EchoAll(t, 2, 100, pod.Host)
			d.Kill()
			waits := testbed.Echoes(t, 2, 100, pod.Host)
			n.StartDaemon()
			testbed.WantServed(t, waits, 2)
		})
	}
}
