package sockets

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestConnectionsWaitForAProxyThatComes, in the kernel: before it is there, while it is stopped, after it was killed, with
// accept queues that are full, and while another takes its place.
func TestConnectionsWaitForAProxyThatComes(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, "sockets")
			n.ServeEcho()
			d := n.StartDaemon()
			const queue = 8
			narrow := func(p *testbed.Pod) { p.Exec("sysctl", "-qw", "net.core.somaxconn="+strconv.Itoa(queue)) }
			pods := []*testbed.Pod{f.AddPod(t, n, "one", narrow), f.AddPod(t, n, "two", narrow)}
			hosts := []*testbed.Host{pods[0].Host, pods[1].Host}
			// The kernel lets one more in than the queue is long.
			full := func() bool { return d.Waiting(pods...) == 2*2*(queue+1) }
			outcome := testbed.Echoes(testbed.Context(t), 40, testbed.RandomBytes(200), hosts...)
			testbed.Eventually(t, "the queues of both families are full", full)
			proxy := n.LaunchAddon(testbed.RawTCP...)
			testbed.WantServed(t, outcome, 80)

			proxy.Freeze()
			outcome = testbed.Echoes(testbed.Context(t), 40, testbed.RandomBytes(200), hosts...)
			testbed.Eventually(t, "the queues are full while the proxy is stopped", full)
			testbed.Eventually(t, "the status says that it hangs", func() bool {
				up := d.Status().Upstream
				return !up.Ready && len(up.Proxies) == 1 && up.Proxies[0].Hangs
			})
			other := n.LaunchAddon(testbed.RawTCP...)
			testbed.WantServed(t, outcome, 80) // one that answers is enough
			other.Freeze()
			outcome = testbed.Echoes(testbed.Context(t), 40, testbed.RandomBytes(200), hosts...)
			testbed.Eventually(t, "the queues are full again", full)
			proxy.Kill()
			other.Kill()
			testbed.Eventually(t, "no proxy is there", func() bool { return len(d.Status().Upstream.Proxies) == 0 })
			if !full() {
				t.Error("what waited is gone with the proxies")
			}
			n.LaunchAddon(testbed.RawTCP...)
			testbed.WantServed(t, outcome, 80)
		})
	}
}

// TestProxiesShare the accept queues: both serve, and either serves all while the other is stopped.
func TestProxiesShare(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	n.ServeEcho()
	proxies := []*testbed.Program{n.LaunchAddon(testbed.RawTCP...), n.LaunchAddon(append(testbed.RawTCP, "--listen-port", "18081")...)}
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(2, 1)
	served := func(i int) int { return strings.Count(proxies[i].Log(), "client connect") }
	testbed.Eventually(t, "both have served", func() bool {
		testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 50, testbed.RandomBytes(200), pod.Host), 50)
		return served(0) > 0 && served(1) > 0
	})
	for stopped, p := range proxies {
		p.Freeze()
		testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 20, testbed.RandomBytes(200), pod.Host), 20)
		p.Signal(syscall.SIGCONT)
		testbed.Eventually(t, "all was served by the other", func() bool { return served(1-stopped) >= 20 })
	}
}

// TestDaemonIsNotInTheWay of what a proxy has accepted, nor of what it accepts, however the daemon ends.
func TestDaemonIsNotInTheWay(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	n.ServeEcho()
	n.LaunchAddon(testbed.RawTCP...)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(1, 1)
	open, err := pod.Dial(testbed.Context(t), "tcp", testbed.EchoAddresses[0])
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // what was said on it was heard
	testbed.WantEcho(t, open, "before")

	d = n.HandOver(d)
	testbed.WantEcho(t, open, "after a hand-over")
	d.WaitForProxies(1, 1)
	testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 5, testbed.RandomBytes(200), pod.Host), 5)

	d.Kill()
	testbed.WantEcho(t, open, "without a daemon")
	testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 5, testbed.RandomBytes(200), pod.Host), 5)
	d = n.StartDaemon()
	testbed.Eventually(t, "the next daemon has the listeners back", func() bool { return len(d.Of(pod).Notes) == 0 })
	d.WaitForProxies(1, 1)
	testbed.WantEcho(t, open, "after a kill")
	testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 5, testbed.RandomBytes(200), pod.Host), 5)

	d.Stop()
	testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 5, testbed.RandomBytes(200), pod.Host), 5)
	d = n.StartDaemon()
	d.WaitForProxies(1, 1)
	testbed.WantEcho(t, open, "after a stop")
	if err := pod.Del(); err != nil {
		t.Fatal(err)
	}
	d.WaitForProxies(1, 0)
	if log := d.Log(); strings.Contains(log, "did not let go") {
		t.Error("the proxy did not let go of the pod")
	}
}

// TestFromRelayToSocketsAndBack: the configuration changes with a hand-over, and who accepts with it. What is open and what
// waits is none the worse for it.
func TestFromRelayToSocketsAndBack(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.ServeEcho()
	d := n.StartDaemon()
	pod := n.AddPod("web")
	outcome := testbed.Echoes(testbed.Context(t), 20, testbed.RandomBytes(200), pod.Host)
	testbed.Eventually(t, "all of them wait for the relay's upstream", func() bool { return d.Waiting(pod) == 20 })
	relayed := n.Config["upstream"]
	n.Config["upstream"] = map[string]any{"protocol": "sockets"}
	d = n.HandOver(d)
	proxy := n.LaunchAddon(testbed.RawTCP...)
	testbed.WantServed(t, outcome, 20)

	open, err := pod.Dial(testbed.Context(t), "tcp", testbed.EchoAddresses[0])
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // what was said on it was heard
	testbed.WantEcho(t, open, "to the proxy that accepted it")
	n.Config["upstream"] = relayed
	d = n.HandOver(d)
	testbed.Eventually(t, "the proxy has been told to let go", func() bool { return strings.Count(proxy.Log(), "connected to sluiced") == 2 })
	n.StartConnectProxy()
	testbed.Eventually(t, "the relay accepts", func() bool {
		return testbed.Echo(testbed.Context(t), pod.Host, testbed.EchoAddresses[1], []byte{1, 2, 3}) == nil && d.Of(pod).Bytes > 0
	})
	testbed.WantEcho(t, open, "and still")
}

// TestPodEndsWhileTheProxyIsStopped: the proxy is given up, and nothing of the pod stays once it is gone.
func TestPodEndsWhileTheProxyIsStopped(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	n.ServeEcho()
	proxy := n.LaunchAddon(testbed.RawTCP...)
	d := n.StartDaemon()
	pod, other := n.AddPod("web"), n.AddPod("other")
	d.WaitForProxies(1, 2)
	proxy.Freeze()
	if err := pod.Del(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the proxy is given up", func() bool {
		return strings.Contains(d.Log(), "did not let go") && len(d.Status().Upstream.Proxies) == 0
	})
	proxy.Signal(syscall.SIGCONT)
	d.WaitForProxies(1, 1) // it comes again, and lets go
	testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 5, testbed.RandomBytes(200), other.Host), 5)
}

// TestNothingIsLeftOfWhatHasEnded, in the proxy.
func TestNothingIsLeftOfWhatHasEnded(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	n.ServeEcho()
	proxy := n.LaunchAddon(testbed.RawTCP...)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(1, 1)
	descriptors := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", proxy.Pid()))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := descriptors()
	testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 50, testbed.RandomBytes(200), pod.Host), 50)
	testbed.Eventually(t, "its descriptors are about as many as before", func() bool { return descriptors() <= before+5 })
}

// TestProxyWithFewDescriptors leaves in the kernel what it could accept and not pass on.
func TestProxyWithFewDescriptors(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	n.ServeEcho()
	d := n.StartDaemon()
	pod := n.AddPod("web")
	outcome := testbed.Echoes(testbed.Context(t), 200, testbed.RandomBytes(200), pod.Host)
	testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pod) == 200 })
	proxy := n.LaunchAddon(testbed.RawTCP...)
	few := unix.Rlimit{Cur: 128, Max: 128}
	if err := unix.Prlimit(proxy.Pid(), unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	testbed.WantServed(t, outcome, 200)
}
