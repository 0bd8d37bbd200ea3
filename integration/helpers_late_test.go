package integration

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// The world's echo service, in both families.
const echoPort = "7"

var echoAddresses = []string{net.JoinHostPort(testbed.WorldIPv4, echoPort), net.JoinHostPort(testbed.WorldIPv6, echoPort)}

// echoWorld serves echo in the world and counts who came.
func echoWorld(n *testbed.Node) *atomic.Int64 {
	var seen atomic.Int64
	for _, a := range echoAddresses {
		n.World.Serve(a, func(c net.Conn) {
			seen.Add(1)
			_, _ = io.Copy(c, c) // however it ends, the client tells
		})
	}
	return &seen
}

// newNodeFor is a node, and what starts its upstream: the fast proxy, or with "sockets" mitmdump.
func newNodeFor(t *testing.T, protocol string) (n *testbed.Node, start func() *testbed.Program) {
	t.Helper()
	if protocol == "sockets" {
		n = newSocketsNode(t)
		return n, func() *testbed.Program { return launchAddon(n, raw...) }
	}
	n = testbed.NewNode(t, bin)
	return n, func() *testbed.Program { return startConnectProxy(n) }
}

// startConnectProxy starts the fast proxy as the node's upstream.
func startConnectProxy(n *testbed.Node, args ...string) *testbed.Program {
	p := testbed.Launch(n.Host, filepath.Join(bin, "connectproxy"), append([]string{"-listen", testbed.ProxyAddress}, args...)...)
	n.WaitListening(p, testbed.ProxyAddress)
	return p
}

// echo connects, sends payload, ends its side, and wants all of it back.
func echo(ctx context.Context, h *testbed.Host, address string, payload []byte) error {
	c, err := h.Dial(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	defer c.Close() //nolint:errcheck // all has been read
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { _, _ = c.Write(payload) }) // what is lost is missed below
	got := make([]byte, len(payload))
	if _, err := io.ReadFull(c, got); err != nil {
		return fmt.Errorf("reading the echo: %w", err)
	}
	if !bytes.Equal(got, payload) {
		return fmt.Errorf("the echo is not what was sent")
	}
	return nil
}

// clients runs count echoes from each host at a time, over both families in turn; the channel gives an outcome
// for each.
func clients(ctx context.Context, count int, payload []byte, hosts ...*testbed.Host) <-chan error {
	outcome := make(chan error, count*len(hosts))
	for _, h := range hosts {
		for i := range count {
			go func() { outcome <- echo(ctx, h, echoAddresses[i%2], payload) }()
		}
	}
	return outcome
}

// allWell wants n outcomes without an error.
func allWell(t *testing.T, outcome <-chan error, n int) {
	t.Helper()
	for i := range n {
		if err := <-outcome; err != nil {
			t.Fatalf("client %d: %v", i, err)
		}
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return b
}

// waiting is the daemon's count over these pods.
func waiting(d *testbed.Daemon, pods ...*testbed.Pod) int {
	n := 0
	for _, p := range pods {
		n += d.Of(p).Waiting
	}
	return n
}
