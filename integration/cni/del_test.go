package cni

import (
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestDelLeavesNothing, also where parts of the things that ADD made are gone already.
func TestDelLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		del  func(t *testing.T, n *testbed.Node, d *testbed.Daemon, pod *testbed.Pod)
	}{
		{"with everything there", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			callFor(n, pod).must(t, "DEL")
			testbed.WantNoTraces(t, n, pod.Host)
		}},
		{"twice", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			callFor(n, pod).must(t, "DEL")
			callFor(n, pod).must(t, "DEL")
			testbed.WantNoTraces(t, n, pod.Host)
		}},
		{"with the daemon down", func(t *testing.T, n *testbed.Node, d *testbed.Daemon, pod *testbed.Pod) {
			d.Kill()
			callFor(n, pod).must(t, "DEL")
			testbed.WantNoTraces(t, n, pod.Host)
		}},
		{"with the netns gone", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			pod.Delete()
			callFor(n, pod).must(t, "DEL")
		}},
		{"with the netns gone and the daemon down", func(
			t *testing.T, n *testbed.Node, d *testbed.Daemon, pod *testbed.Pod,
		) {
			d.Kill()
			pod.Delete()
			callFor(n, pod).must(t, "DEL")
		}},
		{"with no netns named", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			callFor(n, pod).with(func(c *call) { c.netns = "" }).must(t, "DEL")
			testbed.WantNoTraces(t, n, pod.Host)
		}},
		{"with no prevResult", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			callFor(n, pod).with(func(c *call) { c.prevResult = nil }).must(t, "DEL")
			testbed.WantNoTraces(t, n, pod.Host)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			d := n.StartDaemon()
			pod := n.AddPod("leaving")
			veth := nodeVeth(t, n)
			c.del(t, n, d, pod)
			if r := n.Records(); len(r) > 0 {
				t.Errorf("left on disk: %s", testbed.JSON(r))
			}
			pod.Delete()
			testbed.Eventually(t, "the netns is gone, and with it the node's veth", func() bool {
				_, err := n.TryExec("ip", "link", "show", veth)
				return err != nil
			})
			if !d.Ended() && len(d.Status().Attachments) > 0 {
				t.Errorf("the daemon still has %s", testbed.JSON(d.Status().Attachments))
			}
			if strings.Contains(d.Log(), "level=ERROR") {
				t.Errorf("a DEL is no error, but the daemon logs one:\n%s", d.Log())
			}
		})
	}
}

// nodeVeth is the node's end of the only pod's link.
func nodeVeth(t *testing.T, n *testbed.Node) string {
	t.Helper()
	for line := range strings.Lines(n.Exec("ip", "-oneline", "link", "show", "master", "cni0")) {
		name, _, _ := strings.Cut(strings.Fields(line)[1], "@")
		return name
	}
	t.Fatal("the node has no veth")
	return ""
}

func TestDelWithoutAdd(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	pod := n.NewPod("never")
	callFor(n, pod).must(t, "DEL")
	n.StartDaemon()
	callFor(n, pod).must(t, "DEL")
	// ADD would have refused the name.
	callFor(n, pod).with(func(c *call) { c.ifName = "no+interface" }).must(t, "DEL")
	testbed.WantNoTraces(t, n, pod.Host)
}

// TestNetnsDeletedWithoutDEL: no descriptor of sluice's keeps the netns, and daemon and disk forget it.
func TestNetnsDeletedWithoutDEL(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	d := n.StartDaemon()
	pod := n.AddPod("lost")
	veth := nodeVeth(t, n)
	pod.Delete()
	testbed.Eventually(t, "the netns is gone, and with it the node's veth", func() bool {
		_, err := n.TryExec("ip", "link", "show", veth)
		return err != nil
	})
	testbed.Eventually(t, "daemon and disk forget it", func() bool {
		return len(d.Status().Attachments)+len(n.Records()) == 0
	})
}

// TestRecordOfADeletedNetnsIsDropped without DEL, and no descriptor of sluice's keeps the netns.
func TestRecordOfADeletedNetnsIsDropped(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.StartDaemon()
	pod := n.AddPod("gone")
	pod.Delete()
	testbed.Eventually(t, "the record is dropped", func() bool { return len(n.Records()) == 0 })
	testbed.Eventually(t, "the netns is gone, and with it the node's veth", func() bool {
		return n.Exec("ip", "-br", "link", "show", "type", "veth", "master", "cni0") == ""
	})
}

// TestDelOfNetnsThatLivesOn: the netns is then as it was before ADD.
func TestDelOfNetnsThatLivesOn(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		for _, daemon := range []string{"up", "down"} {
			t.Run(f.Name+" with the daemon "+daemon, func(t *testing.T) {
				t.Parallel()
				n := testbed.New(t)
				serveWeb(n)
				d := n.StartDaemon()
				pod := f.AddPod(t, n, "free", nil)
				testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
				if daemon == "down" {
					d.Kill()
				}
				callFor(n, pod).must(t, "DEL")
				testbed.WantNoTraces(t, n, pod.Host)
				if got := pod.Exec("sysctl", "-n", "net.ipv4.tcp_orphan_retries"); got != "0\n" {
					t.Errorf("got tcp_orphan_retries %q, want the kernel's: closed sockets keep the netns", got)
				}
				testbed.WantCaller(t, pod.Host, testbed.Web, pod.IPv4)
			})
		}
	}
}

// TestNetnsRecreatedAtTheSamePath is another one: the daemon does not take it for the pod's.
func TestNetnsRecreatedAtTheSamePath(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
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
