package waiting

import (
	"context"
	"errors"
	"io"
	"net"
	"regexp"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// Ports of the servers for clients that end their side first.
const (
	// answerPort answers with answerSize bytes when it has read requestSize bytes and the test lets it.
	answerPort = "1115"
	// sinkPort reads to the end.
	sinkPort = "1116"
)

const (
	requestSize, answerSize = 1000, 1 << 20
	// manyBytes do not fit into a receive window, and fit into a send buffer.
	manyBytes = 1 << 20
	// closeWait is longer than the 60 s for which conntrack by default keeps a connection that is half-closed.
	closeWait = 70 * time.Second
)

// serveAnswers serves answerPort in the world. The servers wait for the end of hold before they answer.
func serveAnswers(hold context.Context, n *testbed.Node) {
	n.World.Serve(":"+answerPort, func(c net.Conn) {
		if _, err := io.CopyN(io.Discard, c, requestSize); err == nil {
			<-hold.Done()
			_, _ = c.Write(make([]byte, answerSize)) // the client misses bytes that are lost
		}
	})
}

// serveSink serves sinkPort in the world. The channel gets the length of each connection that was read to its end.
func serveSink(n *testbed.Node) <-chan int64 {
	read := make(chan int64, 100)
	n.World.Serve(":"+sinkPort, func(c net.Conn) {
		if length, err := io.Copy(io.Discard, c); err == nil {
			read <- length
		}
	})
	return read
}

// startFastUpstream starts connectproxy for the node's protocol: connect or sockets.
func startFastUpstream(n *testbed.Node, protocol string) *testbed.Program {
	if protocol == "sockets" {
		return testbed.StartConnectProxy(n, "-sockets", n.ProxySocket())
	}
	return testbed.StartConnectProxy(n)
}

// halfClosed opens a connection to the port on both addresses of the world, sends size bytes on each, and half-closes.
func halfClosed(ctx context.Context, t *testing.T, h *testbed.Host, port string, size int) []*net.TCPConn {
	t.Helper()
	var conns []*net.TCPConn
	for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
		c, err := h.Open(ctx, net.JoinHostPort(ip, port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() }) // for the second time in some tests
		if _, err := c.Write(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		testbed.CloseWrite(t, c)
		conns = append(conns, c)
	}
	return conns
}

// closedAtOnce opens such connections, sends size bytes on each together with the end, and closes. In many cases the
// kernel gets the acknowledgement while it still closes the socket, and by default resets the connection 60 s later.
func closedAtOnce(ctx context.Context, t *testing.T, h *testbed.Host, port string, size int) {
	t.Helper()
	for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
		c, err := h.Open(ctx, net.JoinHostPort(ip, port))
		if err != nil {
			t.Fatal(err)
		}
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_CORK, 1) })
		_, werr := c.Write(make([]byte, size))
		if err := errors.Join(cerr, err, werr, c.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// closed is halfClosed for connections that the app then closes.
func closed(ctx context.Context, t *testing.T, h *testbed.Host, port string, size int) {
	t.Helper()
	for _, c := range halfClosed(ctx, t, h, port, size) {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEndedConnectionsOutliveConntracksTimeouts: the app has half-closed or closed its connection, and conntrack keeps
// it for longer than its default of 60 s. One test has all the cases, because each takes so long.
func TestEndedConnectionsOutliveConntracksTimeouts(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			answering, answer := context.WithCancel(ctx)
			defer answer()

			// The upstream is late, for longer than the hasty pod waits.
			n := testbed.NewWith(t, protocol)
			serveAnswers(answering, n)
			sink := serveSink(n)
			d := n.StartDaemon()
			patient := n.AddPod("patient")
			nested := patient.Nested()
			hasty := testbed.Flavours[0].AddPod(t, n, "hasty", n.Annotated(late("queue", "65s")))
			waiting := halfClosed(ctx, t, patient.Host, answerPort, requestSize)
			waiting = append(waiting, halfClosed(ctx, t, nested, answerPort, requestSize)...)
			closed(ctx, t, patient.Host, sinkPort, manyBytes)
			// A nested container has sysctls of its own.
			nested.Exec("sysctl", "-qw", "net.ipv4.tcp_fin_timeout=120")
			closed(ctx, t, nested, sinkPort, requestSize)
			for range 5 {
				closedAtOnce(ctx, t, patient.Host, sinkPort, requestSize)
			}
			expiring := halfClosed(ctx, t, hasty.Host, answerPort, requestSize)
			testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(patient, hasty) == 20 })

			// The upstream is there, and the answer is late.
			ready := testbed.NewWith(t, protocol)
			serveAnswers(answering, ready)
			startFastUpstream(ready, protocol)
			e := ready.StartDaemon()
			served := ready.AddPod("served")
			answered := halfClosed(ctx, t, served.Host, answerPort, requestSize)
			answered = append(answered, halfClosed(ctx, t, served.Nested(), answerPort, requestSize)...)
			testbed.Eventually(t, "the upstream has all of them", func() bool { return e.Of(served).Open == 4 })

			time.Sleep(closeWait) // the kernel's timeout is the subject
			for _, c := range expiring {
				if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("at its timeout the half-closed app reads %v, want a reset", err)
				}
			}
			startFastUpstream(n, protocol)
			answer()
			var wg sync.WaitGroup
			for name, conns := range map[string][]*net.TCPConn{"late upstream": waiting, "late answer": answered} {
				for i, c := range conns {
					wg.Go(func() {
						if b, err := io.ReadAll(c); len(b) != answerSize || err != nil {
							t.Errorf("%s, half-closed app %d: got %d bytes, %v; want %d",
								name, i, len(b), err, answerSize)
						}
					})
				}
			}
			wg.Wait()
			var sum int64
			for range 14 {
				select {
				case length := <-sink:
					sum += length
				case <-ctx.Done():
					t.Fatal("the data of a closed app has not arrived")
				}
			}
			if want := int64(2*manyBytes + 12*requestSize); sum != want {
				t.Errorf("%d bytes of the closed apps have arrived, want %d", sum, want)
			}
			if got := n.SYNs() + ready.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pods, want none", got)
			}
		})
	}
}

// closeWaitEntry matches a half-closed connection in the output of conntrack(8), and its timeout in seconds.
var closeWaitEntry = regexp.MustCompile(`(?m)^tcp +6 +(\d+) CLOSE_WAIT .*dport=` + answerPort)

// TestConntrackKeepsEndedConnections for days, with each way to install the rules.
func TestConntrackKeepsEndedConnections(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.StartDaemon()
			pod := f.AddPod(t, n, "pod", nil)
			halfClosed(testbed.Context(t), t, pod.Host, answerPort, requestSize)
			closed(testbed.Context(t), t, pod.Nested(), answerPort, requestSize)
			for _, family := range []string{"ipv4", "ipv6"} {
				var found [][]string
				testbed.Eventually(t, "both FINs are acknowledged", func() bool {
					found = closeWaitEntry.FindAllStringSubmatch(pod.Exec("conntrack", "-L", "-f", family), -1)
					return len(found) == 2
				})
				for _, m := range found {
					seconds, _ := strconv.Atoi(m[1])
					if left := time.Duration(seconds) * time.Second; left < 4*24*time.Hour {
						t.Errorf("%s: the entry of a half-closed connection has %s left, want days", family, left)
					}
				}
			}
		})
	}
}
