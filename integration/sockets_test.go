package integration

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// addon is what makes mitmproxy accept in the netns of pods.
const addon = "../deploy/mitmproxy/sluice.py"

// newSocketsNode is a node whose proxies accept for themselves.
func newSocketsNode(t *testing.T) *testbed.Node {
	t.Helper()
	n := testbed.NewNode(t, bin)
	n.Config["upstream"] = map[string]any{"protocol": "sockets"}
	return n
}

// raw keeps mitmproxy from guessing: text may look like HTTP to it.
var raw = []string{"--tcp-hosts", ".*"}

// launchAddon starts mitmdump with the addon, and does not wait for it.
func launchAddon(n *testbed.Node, args ...string) *testbed.Program {
	return n.LaunchMitmdump(append([]string{
		"--showhost", "--set", "server=false", "--set", "sluice_socket=" + n.ProxySocket(), "-s", addon,
	}, args...)...)
}

// settled waits until all proxies that d knows have the sockets of that many pods, and count is how many they are.
func settled(t *testing.T, d *testbed.Daemon, count, pods int) {
	t.Helper()
	testbed.Eventually(t, fmt.Sprintf("%d proxies have the sockets of %d pods", count, pods), func() bool {
		up := d.Status().Upstream
		for _, p := range up.Proxies {
			if p.Pods != pods {
				return false
			}
		}
		return up.Ready && len(up.Proxies) == count
	})
}

// telling is an addon that prints what the flows know of who they are from.
func telling(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "telling.py")
	const program = `
def tell(kind, flow):
    m = flow.metadata
    print(kind, "from", flow.client_conn.peername[0], "of", m.get("sluice.pod"), m.get("sluice.uid"), m.get("sluice.direction"),
          "comment", flow.comment, flush=True)

def response(flow): tell("http", flow)
def tcp_end(flow): tell("tcp", flow)
`
	if err := os.WriteFile(path, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestProxyAcceptsInThePod: every kind of traffic, as through a relay, and the proxy sees the pod itself.
func TestProxyAcceptsInThePod(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := newSocketsNode(t)
			ca := serveWorld(t, n)
			proxy := launchAddon(n, "--set", "ssl_verify_upstream_trusted_ca="+ca, "-s", telling(t))
			d := n.StartDaemon()
			pod := f.addPod(t, n, "web", nil)
			settled(t, d, 1, 1)
			for _, family := range []struct{ name, world, node, pod string }{
				{"IPv4", testbed.WorldIPv4, nodeIPv4, pod.IPv4}, {"IPv6", testbed.WorldIPv6, nodeIPv6, pod.IPv6},
			} {
				m := mitmCase{node: n, proxy: proxy, from: pod.Host, world: family.world, seenAs: family.node}
				t.Run("HTTP over "+family.name, m.http)
				t.Run("HTTPS over "+family.name, m.https)
				t.Run("client speaks first over "+family.name, m.clientFirst)
				t.Run("server speaks first over "+family.name, m.serverFirst)
				for _, kind := range []string{"http", "tcp"} {
					m.wantLogged(t, fmt.Sprintf("%s from %s of default/web uid-web outbound", kind, family.pod))
				}
			}
			before := strings.Count(proxy.Log(), "http from "+pod.IPv4+" of")
			m := mitmCase{node: n, proxy: proxy, from: pod.Nested(), world: testbed.WorldIPv4, seenAs: nodeIPv4}
			t.Run("from a nested container", m.http)
			testbed.Eventually(t, "it is seen as the pod", func() bool { return strings.Count(proxy.Log(), "http from "+pod.IPv4+" of") > before })
		})
	}
}

// TestConnectionsWaitForAProxyThatComes, in the kernel: before it is there, while it is stopped, after it was killed, with
// accept queues that are full, and while another takes its place.
func TestConnectionsWaitForAProxyThatComes(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := newSocketsNode(t)
			echoWorld(n)
			d := n.StartDaemon()
			const queue = 8
			narrow := func(p *testbed.Pod) { p.Exec("sysctl", "-qw", "net.core.somaxconn="+strconv.Itoa(queue)) }
			pods := []*testbed.Pod{f.addPod(t, n, "one", narrow), f.addPod(t, n, "two", narrow)}
			hosts := []*testbed.Host{pods[0].Host, pods[1].Host}
			// The kernel lets one more in than the queue is long.
			full := func() bool { return waiting(d, pods...) == 2*2*(queue+1) }
			outcome := clients(patience(t), 40, random(200), hosts...)
			testbed.Eventually(t, "the queues of both families are full", full)
			proxy := launchAddon(n, raw...)
			allWell(t, outcome, 80)

			proxy.Freeze()
			outcome = clients(patience(t), 40, random(200), hosts...)
			testbed.Eventually(t, "the queues are full while the proxy is stopped", full)
			testbed.Eventually(t, "the status says that it hangs", func() bool {
				up := d.Status().Upstream
				return !up.Ready && len(up.Proxies) == 1 && up.Proxies[0].Hangs
			})
			other := launchAddon(n, raw...)
			allWell(t, outcome, 80) // one that answers is enough
			other.Freeze()
			outcome = clients(patience(t), 40, random(200), hosts...)
			testbed.Eventually(t, "the queues are full again", full)
			proxy.Kill()
			other.Kill()
			testbed.Eventually(t, "no proxy is there", func() bool { return len(d.Status().Upstream.Proxies) == 0 })
			if !full() {
				t.Error("what waited is gone with the proxies")
			}
			launchAddon(n, raw...)
			allWell(t, outcome, 80)
		})
	}
}

// TestProxiesShare the accept queues: both serve, and either serves all while the other is stopped.
func TestProxiesShare(t *testing.T) {
	t.Parallel()
	n := newSocketsNode(t)
	echoWorld(n)
	proxies := []*testbed.Program{launchAddon(n, raw...), launchAddon(n, append(raw, "--listen-port", "18081")...)}
	d := n.StartDaemon()
	pod := n.AddPod("web")
	settled(t, d, 2, 1)
	served := func(i int) int { return strings.Count(proxies[i].Log(), "client connect") }
	testbed.Eventually(t, "both have served", func() bool {
		allWell(t, clients(patience(t), 50, random(200), pod.Host), 50)
		return served(0) > 0 && served(1) > 0
	})
	for stopped, p := range proxies {
		p.Freeze()
		allWell(t, clients(patience(t), 20, random(200), pod.Host), 20)
		p.Signal(syscall.SIGCONT)
		testbed.Eventually(t, "all was served by the other", func() bool { return served(1-stopped) >= 20 })
	}
}

// TestDaemonIsNotInTheWay of what a proxy has accepted, nor of what it accepts, however the daemon ends.
func TestDaemonIsNotInTheWay(t *testing.T) {
	t.Parallel()
	n := newSocketsNode(t)
	echoWorld(n)
	launchAddon(n, raw...)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	settled(t, d, 1, 1)
	open, err := pod.Dial(patience(t), "tcp", echoAddresses[0])
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // what was said on it was heard
	say(t, open, "before")

	d = succeed(t, n, d)
	say(t, open, "after a hand-over")
	settled(t, d, 1, 1)
	allWell(t, clients(patience(t), 5, random(200), pod.Host), 5)

	d.Kill()
	say(t, open, "without a daemon")
	allWell(t, clients(patience(t), 5, random(200), pod.Host), 5)
	d = n.StartDaemon()
	testbed.Eventually(t, "the next daemon has the listeners back", func() bool { return len(d.Of(pod).Notes) == 0 })
	settled(t, d, 1, 1)
	say(t, open, "after a kill")
	allWell(t, clients(patience(t), 5, random(200), pod.Host), 5)

	d.Stop()
	allWell(t, clients(patience(t), 5, random(200), pod.Host), 5)
	d = n.StartDaemon()
	settled(t, d, 1, 1)
	say(t, open, "after a stop")
	if err := pod.Del(); err != nil {
		t.Fatal(err)
	}
	settled(t, d, 1, 0)
	if log := d.Log(); strings.Contains(log, "did not let go") {
		t.Error("the proxy did not let go of the pod")
	}
}

// TestFromRelayToSocketsAndBack: the configuration changes with a hand-over, and who accepts with it. What is open and what
// waits is none the worse for it.
func TestFromRelayToSocketsAndBack(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	outcome := clients(patience(t), 20, random(200), pod.Host)
	testbed.Eventually(t, "all of them wait for the relay's upstream", func() bool { return waiting(d, pod) == 20 })
	relayed := n.Config["upstream"]
	n.Config["upstream"] = map[string]any{"protocol": "sockets"}
	d = succeed(t, n, d)
	proxy := launchAddon(n, raw...)
	allWell(t, outcome, 20)

	open, err := pod.Dial(patience(t), "tcp", echoAddresses[0])
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // what was said on it was heard
	say(t, open, "to the proxy that accepted it")
	n.Config["upstream"] = relayed
	d = succeed(t, n, d)
	testbed.Eventually(t, "the proxy has been told to let go", func() bool { return strings.Count(proxy.Log(), "connected to sluiced") == 2 })
	startConnectProxy(n)
	testbed.Eventually(t, "the relay accepts", func() bool {
		return echo(patience(t), pod.Host, echoAddresses[1], []byte{1, 2, 3}) == nil && d.Of(pod).Bytes > 0
	})
	say(t, open, "and still")
}

// TestPodEndsWhileTheProxyIsStopped: the proxy is given up, and nothing of the pod stays once it is gone.
func TestPodEndsWhileTheProxyIsStopped(t *testing.T) {
	t.Parallel()
	n := newSocketsNode(t)
	echoWorld(n)
	proxy := launchAddon(n, raw...)
	d := n.StartDaemon()
	pod, other := n.AddPod("web"), n.AddPod("other")
	settled(t, d, 1, 2)
	proxy.Freeze()
	if err := pod.Del(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the proxy is given up", func() bool {
		return strings.Contains(d.Log(), "did not let go") && len(d.Status().Upstream.Proxies) == 0
	})
	proxy.Signal(syscall.SIGCONT)
	settled(t, d, 1, 1) // it comes again, and lets go
	allWell(t, clients(patience(t), 5, random(200), other.Host), 5)
}

// TestAddonWithNewerMitmproxy runs the addon's code for versions that are not here against stand-ins for what it uses of
// them.
func TestAddonWithNewerMitmproxy(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"9", "12"} {
		out, err := exec.CommandContext(t.Context(), "/usr/bin/python3", "-B", "testdata/newer_mitmproxy.py", addon, version).CombinedOutput()
		if err != nil || string(out) != "ok\n" {
			t.Errorf("%s: %v\n%s", version, err, out)
		}
	}
}

// TestNothingIsLeftOfWhatHasEnded, in the proxy.
func TestNothingIsLeftOfWhatHasEnded(t *testing.T) {
	t.Parallel()
	n := newSocketsNode(t)
	echoWorld(n)
	proxy := launchAddon(n, raw...)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	settled(t, d, 1, 1)
	descriptors := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", proxy.Pid()))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := descriptors()
	allWell(t, clients(patience(t), 50, random(200), pod.Host), 50)
	testbed.Eventually(t, "its descriptors are about as many as before", func() bool { return descriptors() <= before+5 })
}

// TestProxyWithFewDescriptors leaves in the kernel what it could accept and not pass on.
func TestProxyWithFewDescriptors(t *testing.T) {
	t.Parallel()
	n := newSocketsNode(t)
	echoWorld(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	outcome := clients(patience(t), 200, random(200), pod.Host)
	testbed.Eventually(t, "all of them wait", func() bool { return waiting(d, pod) == 200 })
	proxy := launchAddon(n, raw...)
	few := unix.Rlimit{Cur: 128, Max: 128}
	if err := unix.Prlimit(proxy.Pid(), unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	allWell(t, outcome, 200)
}

// TestAddonBesideARelay: the flows of a mitmproxy that is asked by CONNECT show the pod too, if it is sluiced that says so.
func TestAddonBesideARelay(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	serveWorld(t, n)
	proxy := n.StartMitmdump("--showhost", "-s", addon, "--set", "sluice_socket=", "-s", telling(t))
	n.StartDaemon()
	pod := n.AddPod("web")
	m := mitmCase{node: n, proxy: proxy, from: pod.Host, world: testbed.WorldIPv4, seenAs: nodeIPv4}
	m.http(t)
	m.wantLogged(t, "of default/web uid-web outbound comment default/web")
	m.clientFirst(t)
	testbed.Eventually(t, "raw TCP shows it too", func() bool { return strings.Contains(proxy.Log(), "tcp from 127.0.0.1 of default/web") })

	// Somebody else who asks the proxy says that it is that pod.
	forged := n.LaunchMitmdump("--listen-host", "198.51.100.1", "--listen-port", "18081", "-s", addon, "--set", "sluice_socket=", "-s", telling(t), "--tcp-hosts", ".*")
	n.WaitListening(forged, "198.51.100.1:18081")
	c, err := n.World.Dial(patience(t), "tcp", "198.51.100.1:18081")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // read as far as it matters
	destination := net.JoinHostPort(testbed.WorldIPv4, portClientFirst)
	resp, err := askRaw(patience(t), c, "CONNECT "+destination+" HTTP/1.1\r\nHost: "+destination+"\r\nSluice-Pod-Namespace: default\r\nSluice-Pod-Name: web\r\nSluice-Pod-UID: x\r\n\r\n")
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("CONNECT: %v, %v", resp, err)
	}
	defer resp.Body.Close() //nolint:errcheck // it has none
	if _, err := c.Write([]byte("\x01 hello")); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the flow is there", func() bool { return strings.Contains(forged.Log(), "tcp from 198.51.100.10 of") })
	if strings.Contains(forged.Log(), "default/web") {
		t.Error("it is believed")
	}
}
