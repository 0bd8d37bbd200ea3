package relay

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// upstream is a proxy through which connections come to their ends.
type upstream struct {
	name, protocol string
	start          func(*testbed.Node)
	// neverCloses: mitmproxy 8.1.1 never closes a raw connection if the other end was the first to half-close.
	neverCloses bool
}

var (
	connectProxy = upstream{"connect", "connect", func(n *testbed.Node) { testbed.StartConnectProxy(n) }, false}
	socks5Proxy  = upstream{
		"socks5", "socks5", func(n *testbed.Node) { testbed.StartAnsweringProxy(n, "socks5", "").Mend() }, false,
	}

	mitmproxyByConnect = upstream{
		"mitmproxy connect", "connect", func(n *testbed.Node) { startOldMitmdump(n) }, true,
	}
	mitmproxyBySOCKS5 = upstream{
		"mitmproxy socks5", "socks5", func(n *testbed.Node) { startOldMitmdump(n, "--mode", "socks5") }, true,
	}

	upstreams = []upstream{connectProxy, socks5Proxy, mitmproxyByConnect, mitmproxyBySOCKS5}
)

// startOldMitmdump starts 8.1.1, the newest that is seen to carry a half-close over SOCKS5: 11.0.2 ends such a
// connection with the server's side, and loses the rest.
func startOldMitmdump(n *testbed.Node, args ...string) {
	n.MitmproxyVersion = "8.1.1"
	testbed.StartMitmdump(n, args...)
}

// relayNode is a node with a daemon and one of these upstreams, for any number of pods.
type relayNode struct {
	*testbed.Node
	daemon *testbed.Daemon
	made   atomic.Int64 // pairs
}

func newRelayNode(t *testing.T, u upstream) *relayNode {
	t.Helper()
	n := testbed.NewWith(t, u.protocol)
	u.start(n)
	return &relayNode{Node: n, daemon: n.StartDaemon()}
}

// pair is both ends of one relayed connection, which is the only one of its pod.
type pair struct {
	daemon      *testbed.Daemon
	pod         *testbed.Pod
	app, server *net.TCPConn
}

// connect opens a connection from a new pod, or from a container nested in it, and sends a first message both ways.
func (n *relayNode) connect(t *testing.T, world string, nested bool) pair {
	t.Helper()
	number := int(n.made.Add(1))
	address := net.JoinHostPort(world, strconv.Itoa(9000+number))
	conns := testbed.Accepted(t, n.Node, address)
	pod := n.AddPod("app" + strconv.Itoa(number))
	from := pod.Host
	if nested {
		from = pod.Nested()
	}
	app := testbed.MustOpen(t, from, address)
	hello := []byte("\x00\x01 no protocol that a proxy knows")
	send(t, app, hello)
	server := <-conns
	receive(t, server, hello)
	send(t, server, hello)
	receive(t, app, hello)
	return pair{n.daemon, pod, app, server}
}

func send(t *testing.T, c net.Conn, b []byte) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}

func receive(t *testing.T, c net.Conn, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if n, err := io.ReadFull(c, got); err != nil {
		t.Fatalf("after %d of %d bytes: %v", n, len(want), err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the bytes that were received are not those that were sent")
	}
}

func halfClose(t *testing.T, c *net.TCPConn) {
	t.Helper()
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
}

// wantEnd fails the test unless the other direction ends next.
func wantEnd(t *testing.T, c net.Conn) {
	t.Helper()
	if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
		t.Errorf("got %d bytes, %v; want the end", len(b), err)
	}
}

// wantReset fails the test unless a reset comes next.
func wantReset(t *testing.T, c net.Conn) {
	t.Helper()
	if b, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("got %d bytes, %v; want a reset", len(b), err)
	}
}

// waitForEnd waits until the daemon no longer relays the connection.
func (p pair) waitForEnd(t *testing.T) {
	t.Helper()
	testbed.Eventually(t, "the connection is no longer relayed", func() bool { return p.daemon.Of(p.pod).Open == 0 })
}

// TestHalfClosedAppReceivesTheWholeResponse, even through an upstream that would drop the response at a half-close.
func TestHalfClosedAppReceivesTheWholeResponse(t *testing.T) {
	t.Parallel()
	for _, u := range upstreams {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			n := newRelayNode(t, u)
			for name, nested := range map[string]bool{"pod": false, "nested": true} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					c := n.connect(t, testbed.WorldIPv4, nested)
					request, response := testbed.RandomBytes(100<<10), testbed.RandomBytes(1<<20)
					go func() {
						_, _ = c.app.Write(request) // the server misses bytes that are lost
						_ = c.app.CloseWrite()
					}()
					receive(t, c.server, request)
					for part := range 4 { // each when the one before has arrived
						b := response[part<<18 : (part+1)<<18]
						go func() { _, _ = c.server.Write(b) }() // the app misses bytes that are lost
						receive(t, c.app, b)
					}
					if err := c.server.Close(); err != nil {
						t.Fatal(err)
					}
					if u.neverCloses && u.protocol == "socks5" {
						return
					}
					wantEnd(t, c.app)
					c.waitForEnd(t)
				})
			}
		})
	}
}

// TestServerReadsToTheEnd: SOCKS5 carries a half-close, so a server may read to the end before it answers.
func TestServerReadsToTheEnd(t *testing.T) {
	t.Parallel()
	for _, u := range []upstream{socks5Proxy, mitmproxyBySOCKS5} {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			n := newRelayNode(t, u)
			for _, world := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
				t.Run(world, func(t *testing.T) {
					t.Parallel()
					c := n.connect(t, world, false)
					request := testbed.RandomBytes(1 << 20)
					go func() {
						_, _ = c.app.Write(request) // the server misses bytes that are lost
						_ = c.app.CloseWrite()
					}()
					got, err := io.ReadAll(c.server)
					if err != nil || !bytes.Equal(got, request) {
						t.Fatalf("the server got %d bytes, %v; want the %d that were sent", len(got), err, len(request))
					}
					sum := sha256.Sum256(got)
					send(t, c.server, sum[:])
					halfClose(t, c.server)
					receive(t, c.app, sum[:])
					if !u.neverCloses {
						wantEnd(t, c.app)
						c.waitForEnd(t)
					}
				})
			}
		})
	}
}

// TestHalfClosedServerReceivesTheRest: in this direction every protocol carries a half-close.
func TestHalfClosedServerReceivesTheRest(t *testing.T) {
	t.Parallel()
	for _, u := range []upstream{connectProxy, socks5Proxy, mitmproxyBySOCKS5} {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			c := newRelayNode(t, u).connect(t, testbed.WorldIPv4, false)
			halfClose(t, c.server)
			wantEnd(t, c.app)
			rest := testbed.RandomBytes(1 << 20)
			go func() {
				_, _ = c.app.Write(rest) // the server misses bytes that are lost
				_ = c.app.CloseWrite()
			}()
			receive(t, c.server, rest)
			if !u.neverCloses {
				wantEnd(t, c.server)
				c.waitForEnd(t)
			}
		})
	}
}

// TestResetsArePassedOn in both directions. The upstream is connectproxy, which passes resets on itself.
func TestResetsArePassedOn(t *testing.T) {
	t.Parallel()
	n := newRelayNode(t, connectProxy)
	for _, world := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
		for _, from := range []string{"app", "server"} {
			t.Run(from+" at "+world, func(t *testing.T) {
				t.Parallel()
				c := n.connect(t, world, false)
				one, other := c.app, c.server
				if from == "server" {
					one, other = other, one
				}
				if err := errors.Join(one.SetLinger(0), one.Close()); err != nil {
					t.Fatal(err)
				}
				wantReset(t, other)
				c.waitForEnd(t)
			})
		}
	}
}

// TestConnectionOfClosedAppEnds: the relay holds back the FIN of an app only while a process may wait for a response.
// If the app is in a container nested in the pod, the daemon does not know that at once.
func TestConnectionOfClosedAppEnds(t *testing.T) {
	t.Parallel()
	for _, u := range upstreams {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			n := newRelayNode(t, u)
			for _, from := range []struct {
				name, world string
				nested      bool
			}{
				{"the pod over IPv4", testbed.WorldIPv4, false},
				{"the pod over IPv6", testbed.WorldIPv6, false},
				{"a nested container", testbed.WorldIPv4, true},
			} {
				t.Run("from "+from.name, func(t *testing.T) {
					t.Parallel()
					c := n.connect(t, from.world, from.nested)
					if err := c.app.Close(); err != nil {
						t.Fatal(err)
					}
					wantEnd(t, c.server)
					if u.neverCloses {
						return
					}
					if err := c.server.Close(); err != nil {
						t.Fatal(err)
					}
					c.waitForEnd(t)
				})
			}
		})
	}
}

// TestConnectionOfClosedAppEndsThoughTheUpstreamKeepsIt: mitmproxy 8.1.1 never closes such a connection, but no process
// is left that could read its response.
func TestConnectionOfClosedAppEndsThoughTheUpstreamKeepsIt(t *testing.T) {
	t.Parallel()
	for _, u := range []upstream{mitmproxyByConnect, mitmproxyBySOCKS5} {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			c := newRelayNode(t, u).connect(t, testbed.WorldIPv4, false)
			if err := c.app.Close(); err != nil {
				t.Fatal(err)
			}
			wantEnd(t, c.server)
			if err := c.server.Close(); err != nil {
				t.Fatal(err)
			}
			c.waitForEnd(t)
		})
	}
}

// TestAppThatClosesMidTransferResetsTheServer: a server that still sends learns that its bytes are not read.
func TestAppThatClosesMidTransferResetsTheServer(t *testing.T) {
	t.Parallel()
	for _, u := range upstreams {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			c := newRelayNode(t, u).connect(t, testbed.WorldIPv4, false)
			failed := make(chan error, 1)
			go func() {
				_, err := io.Copy(c.server, endless{})
				failed <- err
			}()
			if _, err := io.CopyN(io.Discard, c.app, 1<<20); err != nil {
				t.Fatal(err)
			}
			if err := c.app.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-failed; !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
				t.Errorf("the server's write ended with %v; want a reset", err)
			}
			c.waitForEnd(t)
		})
	}
}

// endless can be read for ever.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }
