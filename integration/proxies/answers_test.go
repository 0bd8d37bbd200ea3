package proxies

import (
	"net"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestDeadDestinationIsAReset: a proxy that is well, and cannot reach a destination, ends the wait.
func TestDeadDestinationIsAReset(t *testing.T) {
	forEachProxy(t, proxies, func(t *testing.T, n *testbed.Node, p proxy) {
		testbed.ServeEcho(n)
		const dropped = "9"
		for _, iptables := range []string{"iptables", "ip6tables"} {
			n.World.Exec(iptables, "-A", "INPUT", "-p", "tcp", "--dport", dropped, "-j", "DROP")
		}
		n.Exec("sysctl", "-qw", "net.ipv4.tcp_syn_retries=1") // a proxy without a timeout of its own has the kernel's
		p.start(t, n)
		d := n.StartDaemon()
		pod := n.AddPod("unlucky")
		for _, address := range []string{
			net.JoinHostPort(testbed.WorldIPv4, "81"), // refused
			net.JoinHostPort(testbed.WorldIPv6, "81"),
			net.JoinHostPort(testbed.WorldIPv4, dropped),
			net.JoinHostPort(testbed.WorldIPv6, dropped),
			"203.0.113.1:7", // no route
		} {
			testbed.WantReset(t, pod.Host, address)
		}
		testbed.EchoAll(t, 4, 200, pod.Host)
		if s := d.Status().Upstream; !s.Ready || s.Reason != "" {
			t.Errorf("got %s, want an upstream that is well", testbed.JSON(s))
		}
		if got := n.SYNs(); got != 0 {
			t.Errorf("%d SYNs left the pod, want none", got)
		}
	})
}

// TestConnectionsWaitForTheProxy: none ends while the proxy is away.
func TestConnectionsWaitForTheProxy(t *testing.T) {
	forEachProxy(t, proxies, func(t *testing.T, n *testbed.Node, p proxy) {
		testbed.ServeEcho(n)
		d := n.StartDaemon()
		pod := n.AddPod("patient")
		outcome := testbed.Echoes(t, 10, 200, pod.Host)
		testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pod) == 10 })
		running := p.start(t, n)
		testbed.WantServed(t, outcome, 10)
		running.Stop()
		testbed.Eventually(t, "the upstream is late", func() bool { return !d.Status().Upstream.Ready })
		outcome = testbed.Echoes(t, 10, 200, pod.Host)
		testbed.Eventually(t, "all of them wait again", func() bool { return d.Waiting(pod) == 10 })
		testbed.WantPending(t, outcome)
		p.start(t, n)
		testbed.WantServed(t, outcome, 10)
	})
}

// TestProxyWithoutTheProxyBehindItIsLate: it answers 500, 502 or 503 for that, as others do for a dead destination.
func TestProxyWithoutTheProxyBehindItIsLate(t *testing.T) {
	forEachProxy(t, chained, func(t *testing.T, n *testbed.Node, p proxy) {
		testbed.ServeEcho(n)
		p.start(t, n)
		d := n.StartDaemon()
		pod := n.AddPod("patient")
		outcome := make(chan error, 1)
		go func() { // over IPv4: tinyproxy names IPv6 addresses to the proxy behind it without brackets
			outcome <- testbed.Echo(testbed.Context(t), pod.Host, testbed.EchoAddresses[0], testbed.RandomBytes(200))
		}()
		testbed.Eventually(t, "the connection waits", func() bool { return d.Waiting(pod) == 1 })
		testbed.WantPending(t, outcome)
		startSquidBehind(t, n)
		testbed.WantServed(t, outcome, 1)
		testbed.WantReset(t, pod.Host, net.JoinHostPort(testbed.WorldIPv4, "81"))
	})
}
