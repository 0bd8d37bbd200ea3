package capture

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestCapturePortTakesOnlyRedirectedConnections, from any host, whether the daemon is there or not.
func TestCapturePortTakesOnlyRedirectedConnections(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
			n.World.ServeCaller(testbed.Web)
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "target", nil)
			nested := pod.Nested()
			other := n.AddBystander()
			knock := func() {
				var wg sync.WaitGroup
				for _, c := range []struct {
					from      *testbed.Host
					addresses []string
				}{
					{n.Host, []string{pod.IPv4, pod.IPv6}},
					{n.World, []string{pod.IPv4, pod.IPv6}},
					{other.Host, []string{pod.IPv4, pod.IPv6}},
					{pod.Host, []string{
						"127.0.0.1", "127.5.5.5", "::1", pod.IPv4, pod.IPv6, "172.30.0.1", "fd00:30::1",
					}},
					{nested, []string{"172.30.0.1", "fd00:30::1", pod.IPv4, pod.IPv6}},
				} {
					for _, a := range c.addresses {
						wg.Go(func() { testbed.WantDropped(t, c.from, net.JoinHostPort(a, "15001")) })
					}
				}
				wg.Wait()
			}
			// The gate is open, so the port would answer.
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
			knock()
			if r := proxy.Requests(); len(r) != 1 {
				t.Errorf("the proxy was asked %d times, want only for %s", len(r), testbed.Web)
			}
			d.Kill()
			knock()
		})
	}
}

// TestCapturePortOfAnotherPod: a captured pod that connects to the capture port of another gets as far as its own gate.
// The connection that the proxy makes for it is dropped.
func TestCapturePortOfAnotherPod(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	d := n.StartDaemon()
	target, other := n.AddPod("target"), n.AddPod("other")
	for _, ip := range []string{target.IPv4, target.IPv6} {
		address := net.JoinHostPort(ip, "15001")
		if got, err := other.Caller(testbed.Context(t), address); err == nil {
			t.Errorf("connecting to %s got %q and a clean end; want a reset", address, got)
		}
		if !proxy.Asked(address) {
			t.Errorf("the proxy was never asked for %s", address)
		}
	}
	if s := d.Of(target); s.Open != 0 || s.Waiting != 0 || s.Bytes != 0 {
		t.Errorf("the target has %d open and %d waiting connections, %d bytes; want none", s.Open, s.Waiting, s.Bytes)
	}
}

// TestDestinationsOfTheNodeItself: the proxy is never asked for the node's loopback or the cloud metadata service, by
// whichever rule the connection gets to the listener: it would answer with the rights of the node.
func TestDestinationsOfTheNodeItself(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.Config["capture"] = map[string]any{"source": "all", "excludeCIDRs": []string{}}
	proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	n.World.ServeCaller(testbed.Web)
	d := n.StartDaemon()
	for i, c := range []struct{ destination, rule string }{
		// Captured, since nothing is excluded.
		{"169.254.169.254:80", ""},
		{"169.254.170.2:80", ""},
		{"[fd00:ec2::254]:80", ""},
		{"[fd20:ce::254]:80", ""},
		// Never captured, except by the pod's own rules.
		{"127.0.0.1:9999", "iptables -d 127.0.0.1 --dport 9999"},
		{"127.8.8.8:9999", "iptables -d 127.8.8.8 --dport 9999"},
		{"[::1]:9999", "ip6tables -d ::1 --dport 9999"},
	} {
		t.Run(c.destination, func(t *testing.T) {
			pod := n.AddPod(fmt.Sprint("curious-", i)) // the daemon logs one refusal in ten seconds for each pod
			if c.rule != "" {
				redirect(pod, c.rule)
			}
			testbed.WantReset(t, pod.Host, c.destination)
			if proxy.Asked(c.destination) {
				t.Error("the proxy was asked for it")
			}
			want := "=" + c.destination // as an attribute
			testbed.Eventually(t, "the daemon logs that it refused a connection to "+c.destination, func() bool {
				return strings.Contains(strings.ReplaceAll(d.Log(), `"`, ""), want)
			})
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
		})
	}
}

// TestMetadataServiceByRulesOfThePod: the same with the addresses excluded, which is the default.
func TestMetadataServiceByRulesOfThePod(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	n.StartDaemon()
	pod := n.AddPod("clever")
	redirect(pod, "iptables -d 169.254.169.254")
	redirect(pod, "ip6tables -d fd00:ec2::254")
	for _, destination := range []string{"169.254.169.254:80", "[fd00:ec2::254]:80"} {
		testbed.WantReset(t, pod.Host, destination)
	}
	if r := proxy.Requests(); len(r) > 0 {
		t.Errorf("the proxy was asked for %s", r[0].Host)
	}
}

// redirect adds a rule of the pod's own that redirects to the capture port.
func redirect(pod *testbed.Pod, rule string) {
	w := strings.Fields(rule)
	args := append([]string{"-t", "nat", "-I", "OUTPUT", "-p", "tcp"}, w[1:]...)
	pod.Exec(w[0], append(args, "-j", "REDIRECT", "--to-ports", "15001")...)
}
