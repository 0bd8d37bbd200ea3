package relay

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

const chatPort = "9000"

// endsCase is an upstream through which connections come to their ends.
type endsCase struct {
	name, protocol string
	start          func(*testbed.Node)
	// forgets: mitmproxy 8.1.1 never closes a raw connection that the other end was the first to shut its side of.
	forgets bool
}

var (
	throughConnect = endsCase{"connect", "connect", func(n *testbed.Node) { n.StartConnectProxy() }, false}
	throughSOCKS5  = endsCase{"socks5", "socks5", func(n *testbed.Node) { n.StartAnsweringProxy("socks5", "").Mend() }, false}
	throughMitm    = endsCase{"mitmproxy connect", "connect", func(n *testbed.Node) { n.StartMitmdump() }, true}
	throughMitm5   = endsCase{"mitmproxy socks5", "socks5", func(n *testbed.Node) { n.StartMitmdump("--mode", "socks5") }, true}

	allWays = []endsCase{throughConnect, throughSOCKS5, throughMitm, throughMitm5}
)

// chat is both ends of one relayed connection.
type chat struct {
	d           *testbed.Daemon
	pod         *testbed.Pod
	app, server *net.TCPConn
}

// begin opens a connection from the pod, or from a container nested in it, and carries a first word both ways.
func (c endsCase) begin(t *testing.T, world string, nested bool) chat {
	t.Helper()
	n := testbed.NewWith(t, c.protocol)
	address := net.JoinHostPort(world, chatPort)
	conns := testbed.Accepted(t, n, address)
	c.start(n)
	d := n.StartDaemon()
	pod := n.AddPod("chatty")
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
	return chat{d, pod, app, server}
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
		t.Fatal("received something else than was sent")
	}
}

func shut(t *testing.T, c *net.TCPConn) {
	t.Helper()
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
}

// wantEnd fails the test unless the next that comes is the end of the other's direction.
func wantEnd(t *testing.T, c net.Conn) {
	t.Helper()
	if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
		t.Errorf("got %d bytes, %v; want the end", len(b), err)
	}
}

// wantResetOf fails the test unless the next that comes is a reset.
func wantResetOf(t *testing.T, c net.Conn) {
	t.Helper()
	if b, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("got %d bytes, %v; want a reset", len(b), err)
	}
}

// letGo waits until the daemon is done with the connection.
func (c chat) letGo(t *testing.T) {
	t.Helper()
	testbed.Eventually(t, "the connection is relayed no more", func() bool { return c.d.Of(c.pod).Open == 0 })
}

// TestAppThatHasShutItsSideGetsTheWholeAnswer: also where the upstream would drop the answer if it knew.
func TestAppThatHasShutItsSideGetsTheWholeAnswer(t *testing.T) {
	t.Parallel()
	for _, c := range allWays {
		for _, nested := range []bool{false, true} {
			name := c.name
			if nested {
				name += " nested"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				chat := c.begin(t, testbed.WorldIPv4, nested)
				question, answer := testbed.RandomBytes(100<<10), testbed.RandomBytes(1<<20)
				go func() {
					_, _ = chat.app.Write(question) // what is lost is missed
					_ = chat.app.CloseWrite()
				}()
				receive(t, chat.server, question)
				for part := range 4 { // each when the one before has arrived
					b := answer[part<<18 : (part+1)<<18]
					go func() { _, _ = chat.server.Write(b) }() // what is lost is missed
					receive(t, chat.app, b)
				}
				if err := chat.server.Close(); err != nil {
					t.Fatal(err)
				}
				if c.forgets && c.protocol == "socks5" {
					return
				}
				wantEnd(t, chat.app)
				chat.letGo(t)
			})
		}
	}
}

// TestServerThatReadsToTheEnd: SOCKS5 carries the end of one direction, so a server may wait for it.
func TestServerThatReadsToTheEnd(t *testing.T) {
	t.Parallel()
	for _, c := range []endsCase{throughSOCKS5, throughMitm5} {
		for _, world := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
			t.Run(c.name+" to "+world, func(t *testing.T) {
				t.Parallel()
				chat := c.begin(t, world, false)
				question := testbed.RandomBytes(1 << 20)
				go func() {
					_, _ = chat.app.Write(question) // what is lost is missed
					_ = chat.app.CloseWrite()
				}()
				got, err := io.ReadAll(chat.server)
				if err != nil || !bytes.Equal(got, question) {
					t.Fatalf("the server got %d bytes, %v; want the %d that were sent", len(got), err, len(question))
				}
				sum := sha256.Sum256(got)
				send(t, chat.server, sum[:])
				shut(t, chat.server)
				receive(t, chat.app, sum[:])
				if !c.forgets {
					wantEnd(t, chat.app)
					chat.letGo(t)
				}
			})
		}
	}
}

// TestServerThatHasShutItsSideHearsTheRest: the other way round no protocol is in the way.
func TestServerThatHasShutItsSideHearsTheRest(t *testing.T) {
	t.Parallel()
	for _, c := range []endsCase{throughConnect, throughSOCKS5, throughMitm5} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			chat := c.begin(t, testbed.WorldIPv4, false)
			shut(t, chat.server)
			wantEnd(t, chat.app)
			rest := testbed.RandomBytes(1 << 20)
			go func() {
				_, _ = chat.app.Write(rest) // what is lost is missed
				_ = chat.app.CloseWrite()
			}()
			receive(t, chat.server, rest)
			if !c.forgets {
				wantEnd(t, chat.server)
				chat.letGo(t)
			}
		})
	}
}

// TestResetsArePassedOn, in both directions. Through connectproxy, that passes them on itself.
func TestResetsArePassedOn(t *testing.T) {
	t.Parallel()
	for _, world := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
		for _, who := range []string{"app", "server"} {
			t.Run(who+" at "+world, func(t *testing.T) {
				t.Parallel()
				chat := throughConnect.begin(t, world, false)
				one, other := chat.app, chat.server
				if who == "server" {
					one, other = other, one
				}
				if err := errors.Join(one.SetLinger(0), one.Close()); err != nil {
					t.Fatal(err)
				}
				wantResetOf(t, other)
				chat.letGo(t)
			})
		}
	}
}

// TestClosedAppIsLetGo: its FIN is held back only as long as somebody may wait for an answer. Of a container
// nested in the pod that is not known at once.
func TestClosedAppIsLetGo(t *testing.T) {
	t.Parallel()
	for _, c := range allWays {
		for _, from := range []struct {
			name, world string
			nested      bool
		}{
			{"the pod over IPv4", testbed.WorldIPv4, false},
			{"the pod over IPv6", testbed.WorldIPv6, false},
			{"a nested container", testbed.WorldIPv4, true},
		} {
			t.Run(c.name+" from "+from.name, func(t *testing.T) {
				t.Parallel()
				chat := c.begin(t, from.world, from.nested)
				if err := chat.app.Close(); err != nil {
					t.Fatal(err)
				}
				wantEnd(t, chat.server)
				if c.forgets {
					return
				}
				if err := chat.server.Close(); err != nil {
					t.Fatal(err)
				}
				chat.letGo(t)
			})
		}
	}
}

// TestClosedAppIsForgottenWhateverTheUpstreamDoes: mitmproxy 8.1.1 never closes such a connection, and nobody
// is left who could hear what it still has to say.
func TestClosedAppIsForgottenWhateverTheUpstreamDoes(t *testing.T) {
	t.Parallel()
	for _, c := range []endsCase{throughMitm, throughMitm5} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			chat := c.begin(t, testbed.WorldIPv4, false)
			if err := chat.app.Close(); err != nil {
				t.Fatal(err)
			}
			wantEnd(t, chat.server)
			if err := chat.server.Close(); err != nil {
				t.Fatal(err)
			}
			chat.letGo(t)
		})
	}
}

// TestAppThatClosesInTheMiddle: a server that still sends learns that nobody reads.
func TestAppThatClosesInTheMiddle(t *testing.T) {
	t.Parallel()
	for _, c := range allWays {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			chat := c.begin(t, testbed.WorldIPv4, false)
			failed := make(chan error, 1)
			go func() {
				_, err := io.Copy(chat.server, endless{})
				failed <- err
			}()
			if _, err := io.CopyN(io.Discard, chat.app, 1<<20); err != nil {
				t.Fatal(err)
			}
			if err := chat.app.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-failed; !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
				t.Errorf("the server's write ended with %v; want a reset", err)
			}
			chat.letGo(t)
		})
	}
}

// endless can be read for ever.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }
