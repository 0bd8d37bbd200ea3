package waiting

import (
	"io"
	"net"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// Ports of the world, by the behaviour of the client that connects to them.
const (
	closedPort     = "1121" // closes without a byte
	resetPort      = "1122" // resets
	halfClosedPort = "1123" // half-closes without a byte; the server speaks first
	lastWordsPort  = "1124" // sends, and closes
)

// serveGivenUp serves these ports in the world. The channel gets the port and the data of each connection of a client
// that closes.
func serveGivenUp(n *testbed.Node) <-chan string {
	read := make(chan string, 100)
	for _, port := range []string{closedPort, resetPort, lastWordsPort} {
		n.World.Serve(":"+port, func(c net.Conn) {
			b, _ := io.ReadAll(c) // bytes that are lost are missed
			read <- port + " " + string(b)
		})
	}
	n.World.Serve(":"+halfClosedPort, func(c net.Conn) { _, _ = io.WriteString(c, "hello") })
	return read
}

// TestGivenUpConnectionsAreForgotten: an app that closes its connection without a byte, or resets it, waits no longer,
// and the upstream is not asked for it. One that has sent data and closed is served, and so is one that has only ended
// its side.
func TestGivenUpConnectionsAreForgotten(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		for _, f := range testbed.Flavours {
			t.Run(protocol+" "+f.Name, func(t *testing.T) {
				t.Parallel()
				n := testbed.NewWith(t, protocol)
				read := serveGivenUp(n)
				d := n.StartDaemon()
				pod := f.AddPod(t, n, "pod", nil)
				var apps []*net.TCPConn
				for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
					_ = testbed.MustOpen(t, pod.Host, net.JoinHostPort(ip, closedPort)).Close()
					reset := testbed.MustOpen(t, pod.Host, net.JoinHostPort(ip, resetPort))
					if err := reset.SetLinger(0); err != nil {
						t.Fatal(err)
					}
					_ = reset.Close()
				}
				testbed.Eventually(t, "none of them waits", func() bool { return d.Of(pod).Waiting == 0 })
				if got := pod.Queued(); got != 4 {
					t.Errorf("%d connections are in the accept queues, want 4: they leave when they are accepted", got)
				}
				for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
					app := testbed.MustOpen(t, pod.Host, net.JoinHostPort(ip, halfClosedPort))
					testbed.CloseWrite(t, app)
					apps = append(apps, app)
					words := testbed.MustOpen(t, pod.Host, net.JoinHostPort(ip, lastWordsPort))
					testbed.Send(t, words, "words")
					_ = words.Close()
				}
				testbed.Eventually(t, "the others wait", func() bool { return d.Of(pod).Waiting == 4 })

				proxy := startFastUpstream(n, protocol)
				for _, app := range apps {
					if got, err := testbed.ReadAll(testbed.Context(t), app); got != "hello" || err != nil {
						t.Errorf("the half-closed app got %q, %v; want the server's hello", got, err)
					}
				}
				testbed.Eventually(t, "all are accepted", func() bool { return pod.Queued() == 0 })
				wantLastWords(t, read, protocol == "sockets")
				ports := []string{closedPort}
				if protocol == "connect" {
					ports = append(ports, resetPort)
				}
				for _, port := range ports {
					if strings.Contains(proxy.Log(), ":"+port) {
						t.Errorf("the upstream was asked for port %s", port)
					}
				}
			})
		}
	}
}

// wantLastWords waits for the data of both closed apps. A connection of another app fails the test: for ten seconds
// conntrack remembers one that was reset, so a proxy that accepts it may connect to its destination.
func wantLastWords(t *testing.T, read <-chan string, maybeReset bool) {
	t.Helper()
	ctx := testbed.Context(t)
	for words := 0; words < 2; {
		select {
		case got := <-read:
			switch {
			case got == lastWordsPort+" words":
				words++
			case got != resetPort+" " || !maybeReset:
				t.Errorf("a server read %q, want no connection of an app that has given up", got)
			}
		case <-ctx.Done():
			t.Fatal("the data of a closed app has not arrived")
		}
	}
}
