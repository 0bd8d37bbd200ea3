package integration

import (
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// notYet watches for a moment that nothing ends: what is late must make clients wait, not fail.
func notYet(t *testing.T, outcome <-chan error) {
	t.Helper()
	select {
	case err := <-outcome:
		t.Fatalf("a client has ended already: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
}

func TestConnectionsWaitForAKilledDaemon(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			n.Plugin["backend"] = backend
			echoWorld(n)
			startConnectProxy(n)
			d := n.StartDaemon()
			pod := n.AddPod("web")
			inner := pod.Nested()
			allWell(t, clients(patience(t), 2, random(200), pod.Host, inner), 4)

			d.Kill()
			outcome := clients(patience(t), 20, random(200), pod.Host, inner)
			notYet(t, outcome)
			n.StartDaemon()
			allWell(t, outcome, 40)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}

func TestUpstreamKilledWhileConnectionsWait(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	// Stopped, it has a backlog that takes connections, and answers none: they are dialled and not answered.
	proxy := startConnectProxy(n)
	testbed.Eventually(t, "the upstream is there", func() bool { return d.Status().Upstream.Ready })
	proxy.Freeze()
	outcome := clients(patience(t), 50, random(64<<10), pod.Host)
	testbed.Eventually(t, "all of them wait", func() bool { return d.Of(pod).Waiting == 50 })
	proxy.Kill()
	testbed.Eventually(t, "the upstream is gone", func() bool { return !d.Status().Upstream.Ready })
	notYet(t, outcome)
	startConnectProxy(n)
	allWell(t, outcome, 50)
}

func TestProvisionalPodIsTakenOnWhenTheDaemonComes(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			n.Plugin["backend"] = backend
			echoWorld(n)
			startConnectProxy(n)
			pod := n.AddPod("early")
			if r := n.Records(); len(r) != 1 || r[0].State != attach.Provisional {
				t.Fatalf("got records %s, want one that is provisional", testbed.JSON(r))
			}
			outcome := clients(patience(t), 20, random(200), pod.Host)
			notYet(t, outcome)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
			d := n.StartDaemon()
			allWell(t, outcome, 20)
			if got := d.Of(pod).State; got != attach.Captured {
				t.Errorf("got state %q, want captured", got)
			}
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK: %v", err)
			}
		})
	}
}

// The dropped SYN's conntrack entry keeps the redirect of the provisional rules; those connections must leave
// it when the rules that come with the daemon exclude them.
func TestProvisionalConnectionsToExcludedPortsGoStraight(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			n.Plugin["backend"] = backend
			n.Config["capture"] = map[string]any{"source": "all", "excludePorts": []string{echoPort}}
			echoWorld(n)
			pod := n.AddPod("early")
			outcome := clients(patience(t), 10, random(200), pod.Host)
			notYet(t, outcome)
			n.StartDaemon() // and no upstream: only what goes straight can end
			allWell(t, outcome, 10)
		})
	}
}

func TestMissedDELIsNoticed(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	n.StartDaemon()
	pod := n.AddPod("gone")
	pod.Delete()
	testbed.Eventually(t, "the record is dropped", func() bool { return len(n.Records()) == 0 })
	testbed.Eventually(t, "nothing pins the netns: its veth has gone", func() bool {
		return n.Exec("ip", "-br", "link", "show", "type", "veth", "master", "cni0") == ""
	})
}

func TestNetnsRecreatedAtTheSamePathIsAnother(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	d := n.StartDaemon()
	pod := n.AddPod("again")
	d.Kill()
	pod.Delete()
	testbed.Run(t, "ip", "netns", "add", pod.Host.Name)
	d = n.StartDaemon()
	testbed.Eventually(t, "the record is dropped", func() bool { return len(n.Records()) == 0 })
	if got := d.Status().Attachments; len(got) != 0 {
		t.Errorf("got %s, want nothing taken up", testbed.JSON(got))
	}
	if got := pod.Exec("ss", "-Hltn"); got != "" {
		t.Errorf("in the new netns something listens: %s", got)
	}
}
