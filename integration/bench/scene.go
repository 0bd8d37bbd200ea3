package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-cni/sluice/integration/testbed"
)

const (
	serverAddress = testbed.WorldIPv4 + ":7"
	webAddress    = testbed.WorldIPv4 + ":80"
	bridgeAddress = "10.88.0.1"
	notCaptured   = "kube-system"
)

var (
	server = netip.MustParseAddrPort(serverAddress)
	web    = netip.MustParseAddrPort(webAddress)
	// proxyOnBridge is the address of the node's proxy for pods that use it explicitly.
	proxyOnBridge = netip.AddrPortFrom(netip.MustParseAddr(bridgeAddress), 18080)
)

// newNode creates a node with a server in the world outside. Its daemon will log at the default level.
func (b *bench) newNode() *testbed.Node {
	n := testbed.NewNode(b.tb, b.bin)
	n.LogLevel = "INFO"
	n.World.Serve(serverAddress, serve)
	n.World.Serve(webAddress, serveWeb)
	return n
}

// startConnectproxy starts connectproxy, the fast proxy, for the daemon and for pods that use it explicitly.
func (b *bench) startConnectproxy(n *testbed.Node) *testbed.Program {
	p := testbed.Launch(n.Host, filepath.Join(b.bin, "connectproxy"), "-listen", "0.0.0.0:18080", "-quiet")
	n.WaitListening(p, testbed.ProxyAddress)
	return p
}

// side is one way to reach a server.
type side struct {
	name  string
	from  *testbed.Host // the netns of the client
	to    netip.AddrPort
	proxy netip.AddrPort // the proxy that the client uses explicitly, if valid
	ready func()         // if it is not nil, it is called before each measurement
	// announces says that the client asks the proxy by a header of the PROXY protocol instead of CONNECT.
	announces bool
}

// dial connects in the way of the side, from the thread's netns.
func (s side) dial() (conn, error) {
	if s.announces {
		return dialBy(conn.announce, s.proxy, s.to)
	}
	return dial(s.proxy, s.to)
}

// The indices of the sides of a comparison.
const (
	sluice = iota
	explicit
	redsocks
)

// newSides creates the pods of a comparison: a captured one, one that uses the proxy explicitly and, on request, one
// behind redsocks.
func (b *bench) newSides(n *testbed.Node, withRedsocks bool) []side {
	n.StartDaemon()
	sides := b.sidesOf(n)
	if withRedsocks {
		pod := b.addUncaptured(n, "redsocks")
		b.startRedsocks(n, pod)
		sides = append(sides, side{name: "redsocks", from: pod.Host, to: server})
	}
	for _, s := range sides {
		b.tb.must(s.do(echo), "first connection of "+s.name)
	}
	return sides
}

// sidesOf creates the captured pod and the pod that uses the proxy explicitly.
func (b *bench) sidesOf(n *testbed.Node) []side {
	return []side{
		{name: "sluice", from: n.AddPod("captured").Host, to: server},
		{name: "explicit", from: b.addUncaptured(n, "explicit").Host, to: server, proxy: proxyOnBridge},
	}
}

func (b *bench) addUncaptured(n *testbed.Node, name string) *testbed.Pod {
	p := n.NewPod(name).InNamespace(notCaptured)
	b.tb.must(p.Add(), "ADD "+name)
	b.tb.Cleanup(func() { _ = p.Del() })
	return p
}

// startRedsocks runs redsocks in a pod's netns, with the iptables rules from its manual.
func (b *bench) startRedsocks(n *testbed.Node, p *testbed.Pod) {
	const port = "12345"
	conf := filepath.Join(n.Dir, "redsocks.conf")
	text := fmt.Sprintf(`base { log_debug = off; log_info = off; daemon = off; redirector = iptables; }
redsocks { local_ip = 127.0.0.1; local_port = %s; ip = %s; port = %d; type = http-connect; }
`, port, proxyOnBridge.Addr(), proxyOnBridge.Port())
	b.tb.must(os.WriteFile(conf, []byte(text), 0o600), "configuration of redsocks")
	for _, rule := range []string{
		"-o lo -j RETURN",
		"-d " + bridgeAddress + " -j RETURN",
		"-p tcp -j REDIRECT --to-ports " + port,
	} {
		p.Exec("iptables", append([]string{"-t", "nat", "-A", "OUTPUT"}, strings.Fields(rule)...)...)
	}
	r := testbed.Launch(p.Host, "redsocks", "-c", conf)
	testbed.Eventually(b.tb, "redsocks listens", func() bool {
		if r.Ended() {
			b.tb.Fatalf("redsocks ended: %s", r.Log())
		}
		return p.Exec("ss", "-Hlnt", "sport = :"+port) != ""
	})
}

// do runs f in the client's netns with a new connection to the server.
func (s side) do(f func(conn) error) error {
	return s.from.Do(func() error {
		c, err := s.dial()
		if err != nil {
			return err
		}
		defer c.close()
		return f(c)
	})
}

// echo sends a message and waits for the server to send it back.
func echo(c conn) error {
	if _, err := c.Write(message(opEcho, 0)); err != nil {
		return err
	}
	return take(c, messageSize)
}
