package sockets

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// proxiedNode is a node with an echo service in its world, a mitmproxy with the addon, a daemon, and a captured pod
// with its sockets at the proxy.
func proxiedNode(t *testing.T) (*testbed.Node, *testbed.Program, *testbed.Daemon, *testbed.Pod) {
	t.Helper()
	n := testbed.NewWith(t, "sockets")
	testbed.ServeEcho(n)
	proxy := testbed.LaunchAddon(n, testbed.RawTCP...)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(1, 1)
	return n, proxy, d, pod
}

// TestConnectionsWaitInFullAcceptQueues: before a proxy is there, while it is stopped, after it was killed, and while
// another takes its place.
func TestConnectionsWaitInFullAcceptQueues(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, "sockets")
			testbed.ServeEcho(n)
			d := n.StartDaemon()
			const backlog = 8
			narrow := func(p *testbed.Pod) { p.Exec("sysctl", "-qw", "net.core.somaxconn="+strconv.Itoa(backlog)) }
			pods := []*testbed.Pod{f.AddPod(t, n, "one", narrow), f.AddPod(t, n, "two", narrow)}
			hosts := []*testbed.Host{pods[0].Host, pods[1].Host}
			const clients = 80
			// A queue is full when it is longer than the backlog (sk_acceptq_is_full in include/net/sock.h), so it has
			// at least one connection more. It may have several more: tcp_v4_syn_recv_sock checks the length without
			// the listener's lock, and handshakes that end on several processors at the same time all pass.
			full := func() bool {
				queued := 0
				for _, h := range hosts {
					lengths := h.Queues()
					if len(lengths) != 2 || slices.Min(lengths) <= backlog {
						return false
					}
					queued += lengths[0] + lengths[1]
				}
				return queued < clients && d.Waiting(pods...) == queued
			}
			connect := func() <-chan error {
				return testbed.Echoes(t, clients/len(hosts), 200, hosts...)
			}
			outcome := connect()
			testbed.Eventually(t, "the queues of both families are full", full)
			proxy := testbed.LaunchAddon(n, testbed.RawTCP...)
			testbed.WantServed(t, outcome, clients)

			proxy.Freeze()
			outcome = connect()
			testbed.Eventually(t, "the queues are full while the proxy is stopped", full)
			testbed.Eventually(t, "the status shows that the proxy hangs", func() bool {
				up := d.Status().Upstream
				return !up.Ready && len(up.Proxies) == 1 && up.Proxies[0].Hangs
			})
			other := testbed.LaunchAddon(n, testbed.RawTCP...)
			testbed.WantServed(t, outcome, clients) // one proxy that answers is enough
			other.Freeze()
			outcome = connect()
			testbed.Eventually(t, "the queues are full again", full)
			before := d.Waiting(pods...)
			proxy.Kill()
			other.Kill()
			testbed.Eventually(t, "no proxy is there", func() bool { return len(d.Status().Upstream.Proxies) == 0 })
			if after := d.Waiting(pods...); after != before || !full() {
				t.Errorf("%d connections waited before the proxies ended, %d wait now; want as many", before, after)
			}
			testbed.LaunchAddon(n, testbed.RawTCP...)
			testbed.WantServed(t, outcome, clients)
		})
	}
}

// TestProxiesShareTheAcceptQueues: both serve, and either serves all connections while the other is stopped.
func TestProxiesShareTheAcceptQueues(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	testbed.ServeEcho(n)
	second := append(slices.Clone(testbed.RawTCP), "--listen-port", "18081")
	proxies := []*testbed.Program{testbed.LaunchAddon(n, testbed.RawTCP...), testbed.LaunchAddon(n, second...)}
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(2, 1)
	served := func(i int) int { return strings.Count(proxies[i].Log(), "client connect") }
	testbed.Eventually(t, "both have served", func() bool {
		testbed.EchoAll(t, 50, 200, pod.Host)
		return served(0) > 0 && served(1) > 0
	})
	for stopped, p := range proxies {
		p.Freeze()
		testbed.EchoAll(t, 20, 200, pod.Host)
		p.Signal(syscall.SIGCONT)
		testbed.Eventually(t, "the other proxy has served all", func() bool { return served(1-stopped) >= 20 })
	}
}

// TestProxyServesWithoutTheDaemon, open connections and new ones, however the daemon ends.
func TestProxyServesWithoutTheDaemon(t *testing.T) {
	t.Parallel()
	n, _, d, pod := proxiedNode(t)
	open, err := pod.Dial(testbed.Context(t), "tcp", testbed.EchoAddresses[0])
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // its echoes were read
	testbed.WantEcho(t, open, "before")

	d = n.HandOver(d)
	testbed.WantEcho(t, open, "after a hand-over")
	d.WaitForProxies(1, 1)
	testbed.EchoAll(t, 5, 200, pod.Host)

	d.Kill()
	testbed.WantEcho(t, open, "without a daemon")
	testbed.EchoAll(t, 5, 200, pod.Host)
	d = n.StartDaemon()
	testbed.Eventually(t, "the next daemon has the listeners back", func() bool { return len(d.Of(pod).Notes) == 0 })
	d.WaitForProxies(1, 1)
	testbed.WantEcho(t, open, "after a kill")
	testbed.EchoAll(t, 5, 200, pod.Host)

	d.Stop()
	testbed.EchoAll(t, 5, 200, pod.Host)
	d = n.StartDaemon()
	d.WaitForProxies(1, 1)
	testbed.WantEcho(t, open, "after a stop")
	if err := pod.Del(); err != nil {
		t.Fatal(err)
	}
	d.WaitForProxies(1, 0)
	if log := d.Log(); strings.Contains(log, "did not close the listeners") {
		t.Error("the proxy did not let go of the pod")
	}
}

// TestFromRelayToSocketsAndBack: the configuration changes with a hand-over, so the proxy accepts and then the relay
// again. Connections that are open or wait are not disturbed.
func TestFromRelayToSocketsAndBack(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	outcome := testbed.Echoes(t, 20, 200, pod.Host)
	testbed.Eventually(t, "all of them wait for the relay's upstream", func() bool { return d.Waiting(pod) == 20 })
	relayed := n.Config["upstream"]
	n.Config["upstream"] = map[string]any{"protocol": "sockets"}
	d = n.HandOver(d)
	proxy := testbed.LaunchAddon(n, testbed.RawTCP...)
	testbed.WantServed(t, outcome, 20)

	open, err := pod.Dial(testbed.Context(t), "tcp", testbed.EchoAddresses[0])
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // its echoes were read
	testbed.WantEcho(t, open, "to the proxy that accepted it")
	n.Config["upstream"] = relayed
	d = n.HandOver(d)
	testbed.Eventually(t, "the proxy was told to let go", func() bool {
		return strings.Count(proxy.Log(), "connected to sluiced") == 2
	})
	testbed.StartConnectProxy(n)
	testbed.Eventually(t, "the relay accepts", func() bool {
		err := testbed.Echo(testbed.Context(t), pod.Host, testbed.EchoAddresses[1], []byte{1, 2, 3})
		return err == nil && d.Of(pod).Bytes > 0
	})
	testbed.WantEcho(t, open, "while the relay accepts")
}

// TestPodEndsWhileTheProxyIsStopped: the daemon gives up the proxy, which lets go of the pod when it returns.
func TestPodEndsWhileTheProxyIsStopped(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	testbed.ServeEcho(n)
	proxy := testbed.LaunchAddon(n, testbed.RawTCP...)
	d := n.StartDaemon()
	pod, other := n.AddPod("web"), n.AddPod("other")
	d.WaitForProxies(1, 2)
	proxy.Freeze()
	if err := pod.Del(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the daemon gives up the proxy", func() bool {
		return strings.Contains(d.Log(), "did not close the listeners") && len(d.Status().Upstream.Proxies) == 0
	})
	proxy.Signal(syscall.SIGCONT)
	d.WaitForProxies(1, 1) // it returns and lets go
	testbed.EchoAll(t, 5, 200, other.Host)
}

// TestProxyClosesDescriptorsOfEndedConnections: afterwards it has about as many as before.
func TestProxyClosesDescriptorsOfEndedConnections(t *testing.T) {
	t.Parallel()
	_, proxy, _, pod := proxiedNode(t)
	descriptors := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", proxy.Pid()))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := descriptors()
	testbed.EchoAll(t, 50, 200, pod.Host)
	testbed.Eventually(t, "the proxy has about as many descriptors as before", func() bool {
		return descriptors() <= before+5
	})
}

// TestProxyWithFewDescriptors: the proxy leaves connections in the kernel that it could accept but not pass on.
func TestProxyWithFewDescriptors(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	testbed.ServeEcho(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	outcome := testbed.Echoes(t, 200, 200, pod.Host)
	testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pod) == 200 })
	proxy := testbed.LaunchAddon(n, testbed.RawTCP...)
	few := unix.Rlimit{Cur: 128, Max: 128}
	if err := unix.Prlimit(proxy.Pid(), unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	testbed.WantServed(t, outcome, 200)
}
