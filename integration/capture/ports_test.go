package capture

import (
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// setPorts sets the capture ports in the daemon's configuration.
func setPorts(n *testbed.Node, outbound, inbound int) {
	n.Config["capture"] = map[string]any{
		"source": "all", "ports": map[string]any{"outbound": outbound, "inbound": inbound},
	}
}

// wantListeners fails the test unless the netns has listeners at these ports, and at none of the others that the tests
// use.
func wantListeners(t *testing.T, h *testbed.Host, want ...int) {
	t.Helper()
	has := map[string]bool{}
	for line := range strings.Lines(h.Exec("ss", "--no-header", "--listening", "--tcp", "--numeric")) {
		if w := strings.Fields(line); len(w) > 3 {
			_, port, _ := net.SplitHostPort(w[3])
			has[port] = true
		}
	}
	for _, port := range []int{15001, 15006, 16001, 16006, 17001, 17006} {
		wanted := false
		for _, w := range want {
			wanted = wanted || w == port
		}
		if has[strconv.Itoa(port)] != wanted {
			t.Errorf("%s: listens at port %d: %t, want %t", h.Name, port, !wanted, wanted)
		}
	}
}

// TestCapturePorts: with other capture ports everything works as with the default ones, which are the pod's own then.
func TestCapturePorts(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			testbed.StartRecordingProxy(n, testbed.ProxyAddress)
			n.World.ServeCaller(":80")
			setPorts(n, 16001, 16006)
			d := n.StartDaemon()
			pod := addServer(t, n, f)
			nested := pod.Nested()
			wantListeners(t, pod.Host, 16001, 16006)
			served := func() {
				t.Helper()
				for _, from := range []*testbed.Host{pod.Host, nested} {
					testbed.WantCaller(t, from, webAddresses[0], testbed.NodeIPv4)
					testbed.WantCaller(t, from, webAddresses[1], testbed.NodeIPv6)
				}
				testbed.WantServed(t, callers(t, n.World, pod, 4, gatewayIPv4, gatewayIPv6), 4)
			}
			served()
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK: %v", testbed.Describe(err))
			}
			for _, port := range []string{"15001", "15006"} {
				pod.ServeCaller(":" + port)
				testbed.WantCaller(t, pod.Host, "127.0.0.1:"+port, "127.0.0.1")
				testbed.WantCaller(t, n.World, net.JoinHostPort(pod.IPv4, port), testbed.WorldIPv4)
				testbed.WantCaller(t, n.World, net.JoinHostPort(pod.IPv6, port), testbed.WorldIPv6)
			}
			var wg sync.WaitGroup
			for _, from := range []*testbed.Host{pod.Host, nested, n.Host, n.World} {
				for _, ip := range []string{pod.IPv4, pod.IPv6} {
					for _, port := range []string{"16001", "16006"} {
						wg.Go(func() { testbed.WantDropped(t, from, net.JoinHostPort(ip, port)) })
					}
				}
			}
			wg.Wait()

			d.Kill()
			testbed.WantErrorLike(t, pod.Check(), "nothing listens on tcp port 16001")
			late := []journey{setOut(t, pod.Host, webAddresses[0]), setOut(t, pod.Host, webAddresses[1])}
			waitForSYNs(t, pod.Host, len(late))
			n.StartDaemon()
			late[0].wantFrom(t, testbed.NodeIPv4)
			late[1].wantFrom(t, testbed.NodeIPv6)
			served()
			if err := pod.Del(); err != nil {
				t.Fatalf("DEL: %v", testbed.Describe(err))
			}
			wantListeners(t, pod.Host, 15001, 15006) // the pod's own
			if rules := pod.Rules(); strings.Contains(strings.ToLower(rules), "sluice") {
				t.Errorf("left in the netns:\n%s", rules)
			}
		})
	}
}

// TestCapturePortsStayWithThePod: a pod keeps the ports with which it was captured, and new pods get those of the
// configuration, whether the daemon is replaced, killed, or not there when the pod comes.
func TestCapturePortsStayWithThePod(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			testbed.ServeEcho(n)
			f := testbed.Flavours[0]
			setPorts(n, 16001, 16006)
			d := n.StartDaemon()
			first := addServer(t, n, f)
			const count = 20
			outcome := testbed.Echoes(t, count, 200, first.Host)
			testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(first) == count })

			setPorts(n, 17001, 17006)
			d = n.HandOver(d)
			second := f.AddPod(t, n, "second", nil)
			wantListeners(t, first.Host, 16001, 16006)
			wantListeners(t, second.Host, 17001)
			if got := d.Waiting(first); got != count {
				t.Errorf("%d connections wait after the hand-over, want %d", got, count)
			}
			testbed.StartUpstream(n)
			testbed.WantServed(t, outcome, count)
			testbed.WantServed(t, callers(t, n.World, first, 2, gatewayIPv4, gatewayIPv6), 2)

			d.Kill()
			early := f.AddPod(t, n, "early", nil) // the plugin does not know the configuration
			outcome = testbed.Echoes(t, 2, 200, early.Host)
			n.Config["capture"] = map[string]any{"source": "all"}
			d = n.StartDaemon()
			testbed.WantServed(t, outcome, 2)
			testbed.Eventually(t, "every pod is captured, and its listeners are there", func() bool {
				for _, pod := range []*testbed.Pod{first, second, early} {
					if s := d.Of(pod); s.State != attach.Captured || len(s.Notes) > 0 {
						return false
					}
				}
				return true
			})
			third := f.AddPod(t, n, "third", nil)
			for pod, ports := range map[*testbed.Pod][]int{
				first: {16001, 16006}, second: {17001}, early: {15001}, third: {15001},
			} {
				wantListeners(t, pod.Host, ports...)
				testbed.EchoAll(t, 2, 200, pod.Host)
				if err := pod.Check(); err != nil {
					t.Errorf("CHECK of %s: %v", pod, testbed.Describe(err))
				}
			}
			testbed.WantServed(t, callers(t, n.World, first, 2, gatewayIPv4, gatewayIPv6), 2)
		})
	}
}
