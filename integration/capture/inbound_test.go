package capture

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// gatewayIPv4 and gatewayIPv6 are the addresses that a pod sees connections of the node and of its proxy come from.
const (
	gatewayIPv4 = "10.88.0.1"
	gatewayIPv6 = "fd00:88::1"
)

// inboundPort is captured, plainPort is not.
const (
	inboundPort = "8080"
	plainPort   = "9090"
)

// addServer adds a pod that serves at both ports. Its inbound port is captured.
func addServer(t *testing.T, n *testbed.Node, f testbed.Flavour) *testbed.Pod {
	t.Helper()
	pod := f.AddPod(t, n, "web", n.Annotated(map[string]string{"sluice.dev/capture-inbound-ports": "80, 8000-8999"}))
	for _, port := range []string{inboundPort, plainPort} {
		pod.ServeCaller(":" + port)
	}
	return pod
}

// callers connects to the inbound port of pod, count times, over IPv4 and IPv6 in turn. The channel gets an outcome for
// each: an error unless the server saw the connection come from one of the two addresses.
func callers(
	t *testing.T, h *testbed.Host, pod *testbed.Pod, count int, fromIPv4, fromIPv6 string,
) <-chan error {
	t.Helper()
	outcome := make(chan error, count)
	for i := range count {
		ip, want := pod.IPv4, fromIPv4
		if i%2 == 1 {
			ip, want = pod.IPv6, fromIPv6
		}
		go func() {
			seenAs, err := h.Caller(testbed.Context(t), net.JoinHostPort(ip, inboundPort))
			if err == nil && seenAs != want {
				err = fmt.Errorf("the server saw %q, want a connection from %s", seenAs, want)
			}
			outcome <- err
		}()
	}
	return outcome
}

// TestInbound: the ports that a pod names are captured for connections from outside. Other ports are not, and neither
// are connections of the node.
func TestInbound(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, "sockets")
			proxy := testbed.LaunchAddon(n, append(testbed.RawTCP, "-s", testbed.FlowPrinter(n))...)
			d := n.StartDaemon()
			pod, other := addServer(t, n, f), n.AddBystander()
			d.WaitForProxies(1, 1)
			for _, family := range []struct{ pod, gateway, world, other string }{
				{pod.IPv4, gatewayIPv4, testbed.WorldIPv4, other.IPv4},
				{pod.IPv6, gatewayIPv6, testbed.WorldIPv6, other.IPv6},
			} {
				for _, from := range []struct {
					host *testbed.Host
					ip   string
				}{{n.World, family.world}, {other.Host, family.other}} {
					testbed.WantCaller(t, from.host, net.JoinHostPort(family.pod, plainPort), from.ip)
					testbed.WantCaller(t, from.host, net.JoinHostPort(family.pod, inboundPort), family.gateway)
					flow := fmt.Sprintf("tcp from %s of default/web uid-web inbound comment default/web", from.ip)
					testbed.Eventually(t, "the flow is there", func() bool {
						return strings.Contains(proxy.Log(), flow)
					})
				}
				testbed.WantCaller(t, n.Host, net.JoinHostPort(family.pod, inboundPort), family.gateway)
				testbed.WantCaller(t, pod.Host, net.JoinHostPort(family.pod, inboundPort), family.pod)
			}
			if flows := strings.Count(proxy.Log(), "of default/web"); flows != 4 {
				t.Errorf("got %d flows, want 4: connections of the node and of the pod itself are not captured", flows)
			}
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK: %v", testbed.Describe(err))
			}
			knock := func() {
				var wg sync.WaitGroup
				for _, from := range []*testbed.Host{n.Host, n.World, other.Host, pod.Host} {
					for _, ip := range []string{pod.IPv4, pod.IPv6} {
						wg.Go(func() { testbed.WantDropped(t, from, net.JoinHostPort(ip, "15006")) })
					}
				}
				wg.Wait()
			}
			knock()
			d.Kill()
			knock()
		})
	}
}

// TestInboundWaits for the proxy and for the daemon, while connections of the node pass.
func TestInboundWaits(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			d := n.StartDaemon()
			pod := addServer(t, n, testbed.Flavours[0])
			addresses := []string{net.JoinHostPort(pod.IPv4, inboundPort), net.JoinHostPort(pod.IPv6, inboundPort)}
			const count = 20
			connect := func() <-chan error { return callers(t, n.World, pod, count, gatewayIPv4, gatewayIPv6) }
			outcome := connect()
			testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pod) == count })
			testbed.WantCaller(t, n.Host, addresses[0], gatewayIPv4)
			proxy := testbed.StartUpstream(n)
			testbed.WantServed(t, outcome, count)

			proxy.Kill()
			testbed.Eventually(t, "the daemon misses the proxy", func() bool { return !d.Status().Upstream.Ready })
			outcome = connect()
			testbed.Eventually(t, "all of them wait again", func() bool { return d.Waiting(pod) == count })
			d = n.HandOver(d)
			testbed.Eventually(t, "they wait at the next daemon", func() bool { return d.Waiting(pod) == count })
			proxy = testbed.StartUpstream(n)
			testbed.WantServed(t, outcome, count)

			proxy.Kill()
			d.Kill()
			outcome = connect()
			testbed.WantCaller(t, n.Host, addresses[1], gatewayIPv6)
			n.StartDaemon()
			testbed.StartUpstream(n)
			testbed.WantServed(t, outcome, count)
		})
	}
}

// TestInboundThroughAProxyInAPod: the connections of the proxy to pods come from its own address. The daemon knows the
// address before it hands over a listener, so a connection that waited for the proxy does not come back to it.
func TestInboundThroughAProxyInAPod(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	d := n.StartDaemon()
	pod := addServer(t, n, testbed.Flavours[0])
	home := n.AddBystander()
	const count = 20
	outcome := callers(t, n.World, pod, count, home.IPv4, home.IPv6)
	testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pod) == count })
	proxy := testbed.Launch(home.Host, n.Mitmproxy("mitmdump"), append(testbed.RawTCP,
		"--set", "confdir="+testbed.Confdir(n), "--set", "server=false",
		"--set", "sluice_socket="+n.ProxySocket(), "-s", testbed.Addon(t))...)
	testbed.WantServed(t, outcome, count)
	if ownConnection.MatchString(proxy.Log()) {
		t.Error("connections have come back to the proxy")
	}
}

// ownConnection is the reason in the log why a connection is refused that the proxy or the node has opened.
var ownConnection = regexp.MustCompile(`itself opened (it|the connection)`)

// TestInboundMakesNoLoop: connections of the node to the pod are not captured. If the pod's rules capture one all the
// same, it ends: the proxy's own connection would come back to it for ever.
func TestInboundMakesNoLoop(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			proxy := testbed.StartUpstream(n)
			d := n.StartDaemon()
			pod := addServer(t, n, testbed.Flavours[0])
			loops := func(want int) func() bool {
				return func() bool { return len(ownConnection.FindAllString(proxy.Log()+d.Log(), -1)) == want }
			}
			want := 0
			testbed.Eventually(t, "the upstream is there", func() bool { return d.Status().Upstream.Ready })
			for tool, family := range map[string]struct{ pod, gateway string }{
				"iptables":  {pod.IPv4, gatewayIPv4},
				"ip6tables": {pod.IPv6, gatewayIPv6},
			} {
				address := net.JoinHostPort(family.pod, inboundPort)
				testbed.WantCaller(t, n.Host, address, family.gateway)
				remove := []string{
					"-t", "nat", "-D", "SLUICE_PREROUTING", "-i", "eth0", "-s", family.gateway, "-j", "RETURN",
				}
				pod.Exec(tool, remove...)
				got, err := n.Caller(testbed.Context(t), address)
				if got != "" || errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("from the node: got %q, %v; want the connection to end", got, err)
				}
				_, _ = pod.TryExec(tool, remove...) // the daemon may have restored the rule
				c, err := n.World.Dial(testbed.Context(t), "tcp", address)
				if err == nil {
					defer c.Close() //nolint:errcheck // mitmproxy waits for its first bytes
				} else if !errors.Is(err, syscall.ECONNRESET) { // the reset may come before connect returns
					t.Fatal(err)
				}
				want += 2
				testbed.Eventually(t, "the daemon ends the connections of the node and of the proxy", loops(want))
			}
			testbed.WantCaller(t, pod.Host, net.JoinHostPort(pod.IPv4, inboundPort), pod.IPv4)
			if !loops(want)() {
				t.Error("a connection has come back more than once")
			}
		})
	}
}

// TestInboundThroughARelay: the request to the proxy names the direction and the source.
func TestInboundThroughARelay(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	n.StartDaemon()
	pod, other := addServer(t, n, testbed.Flavours[0]), n.AddBystander()
	for i, family := range []struct{ pod, gateway, other string }{
		{pod.IPv4, gatewayIPv4, other.IPv4}, {pod.IPv6, gatewayIPv6, other.IPv6},
	} {
		address := net.JoinHostPort(family.pod, inboundPort)
		testbed.WantCaller(t, other.Host, address, family.gateway)
		seen := proxy.Requests()
		if len(seen) != i+1 {
			t.Fatalf("the proxy was asked %d times, want %d", len(seen), i+1)
		}
		got := seen[i]
		source, err := netip.ParseAddrPort(got.Header.Get("Sluice-Source"))
		if err != nil || got.Host != address || source.Addr().String() != family.other ||
			got.Header.Get("Sluice-Direction") != "inbound" || got.Header.Get("Sluice-Pod-Name") != "web" {
			t.Errorf("asked for %s with %v", got.Host, got.Header)
		}
	}
	n.World.ServeCaller(testbed.Web)
	testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
	if got := proxy.Requests()[2].Header; got.Get("Sluice-Direction") != "" {
		t.Errorf("outbound: asked with %v", got)
	}
}

// TestInboundGoesDirect: the policy direct holds for inbound connections too.
func TestInboundGoesDirect(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	n.StartDaemon()
	annotations := map[string]string{
		"sluice.dev/when-late": "direct", "sluice.dev/late-timeout": "1s",
		"sluice.dev/capture-inbound-ports": inboundPort,
	}
	pod := testbed.Flavours[0].AddPod(t, n, "web", n.Annotated(annotations))
	pod.ServeCaller(":" + inboundPort)
	testbed.WantServed(t, callers(t, n.World, pod, 2, pod.IPv4, pod.IPv6), 2)
}
