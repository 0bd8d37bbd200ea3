package cni

import (
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// serveWeb serves the world's one page, and starts a proxy: the server sees a captured pod come from the node.
func serveWeb(n *testbed.Node) *testbed.RecordingProxy {
	n.World.ServeCaller(testbed.Web)
	return testbed.StartRecordingProxy(n, testbed.ProxyAddress)
}

// TestAddTwice changes nothing, also while a connection waits.
func TestAddTwice(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.World.ServeCaller(testbed.Web)
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "twice", nil)
			before := pod.Rules()
			conn, err := pod.Dial(testbed.Context(t), "tcp", testbed.Web)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close() //nolint:errcheck // read to its end
			testbed.Eventually(t, "the connection waits", func() bool { return d.Of(pod).Waiting == 1 })
			for range 2 {
				callFor(n, pod).must(t, "ADD")
			}
			if after := pod.Rules(); after != before {
				t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
			}
			if s := d.Status(); len(s.Attachments) != 1 || s.Attachments[0].Waiting != 1 {
				t.Errorf("the daemon has %s; want one attachment with one connection", testbed.JSON(s.Attachments))
			}
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK: %s", testbed.Describe(err))
			}
			testbed.StartRecordingProxy(n, testbed.ProxyAddress)
			if got, err := testbed.ReadAll(testbed.Context(t), conn); err != nil || got != testbed.NodeIPv4 {
				t.Errorf("the connection that waited ended with %q, %v", got, err)
			}
		})
	}
}

// TestAddTwiceWithoutDaemon: a second ADD of a pod that is captured provisionally, and a third one with the daemon.
func TestAddTwiceWithoutDaemon(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	pod := n.AddPod("twice")
	callFor(n, pod).must(t, "ADD")
	n.StartDaemon()
	callFor(n, pod).must(t, "ADD")
	serveWeb(n)
	testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
	if err := pod.Check(); err != nil {
		t.Errorf("CHECK: %s", testbed.Describe(err))
	}
}

// TestTwoAttachments: a container on two networks has one ruleset and one gate, until DEL of the last one.
func TestTwoAttachments(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"eth0", "net1"} {
		for _, daemon := range []string{"up", "down"} {
			t.Run("DEL of "+first+" first with the daemon "+daemon, func(t *testing.T) {
				t.Parallel()
				n := testbed.New(t)
				serveWeb(n)
				d := n.StartDaemon()
				pod := n.AddPod("twofold")
				eth0 := callFor(n, pod)
				net1 := eth0.with(func(c *call) {
					c.ifName, c.conf = "net1", map[string]any{"name": "other"}
					c.prevResult = resultOf("1.0.0", "10.99.0.9/24")
				})
				net1.must(t, "ADD")
				wantCheck(t, eth0, net1)
				if daemon == "down" {
					d.Kill()
				}
				order := []*call{eth0, net1}
				if first == "net1" {
					order = []*call{net1, eth0}
				}
				order[0].must(t, "DEL")
				if daemon == "down" {
					d = n.StartDaemon()
				}
				testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
				wantCheck(t, order[1])
				if rules := pod.Rules(); first == "net1" && strings.Contains(rules, "net1") {
					t.Error("rules still let packets from net1 pass, and another interface may get that name")
				}
				if s := d.Of(pod); !strings.HasSuffix(s.Attachment, "/"+order[1].ifName) {
					t.Errorf("the attachment that is left is %s, want %s", s.Attachment, order[1].ifName)
				}
				order[1].must(t, "DEL")
				testbed.WantNoTraces(t, n, pod.Host)
				testbed.WantCaller(t, pod.Host, testbed.Web, pod.IPv4)
			})
		}
	}
}

// TestCapturePortsOfOneNetns: while a pod is captured, no ADD in its netns changes the capture ports, whatever the
// daemon's configuration has by now, and whether or not the daemon is there.
func TestCapturePortsOfOneNetns(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	serveWeb(n)
	ports := func(outbound, inbound int) {
		n.Config["capture"] = map[string]any{
			"source": "all", "ports": map[string]any{"outbound": outbound, "inbound": inbound},
		}
	}
	ports(16001, 16006)
	d := n.StartDaemon()
	pod := n.AddPod("twofold")
	eth0 := callFor(n, pod)
	network := func(name string) *call {
		return eth0.with(func(c *call) {
			c.ifName, c.conf = name, map[string]any{"name": "other"}
			c.prevResult = resultOf("1.0.0", "10.99.0.9/24")
		})
	}
	works := func(calls ...*call) {
		t.Helper()
		testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
		wantCheck(t, calls...)
	}
	d.Kill()
	net1 := network("net1")
	net1.must(t, "ADD")
	ports(17001, 17006)
	d = n.StartDaemon()
	works(eth0, net1)
	eth0.must(t, "ADD")
	net2 := network("net2")
	net2.must(t, "ADD")
	works(eth0, net1, net2)
	n.HandOver(d)
	works(eth0, net1, net2)
	for _, r := range n.Records() {
		if got := r.Installed.Ruleset.CapturePorts(); got != (ruleset.Ports{Outbound: 16001, Inbound: 16006}) {
			t.Errorf("%s: recorded with capture ports %+v", r.Attachment, got)
		}
	}
}

func wantCheck(t *testing.T, calls ...*call) {
	t.Helper()
	for _, c := range calls {
		if _, err := c.run(t, "CHECK"); err != nil {
			t.Errorf("CHECK of %s: %s", c.ifName, testbed.Describe(err))
		}
	}
}

// TestAddFailsWithoutDaemon if onDaemonDown is fail; it succeeds later.
func TestAddFailsWithoutDaemon(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.Plugin["onDaemonDown"] = "fail"
	pod := n.NewPod("patient")
	before := pod.Rules()
	testbed.WantCNIError(t, pod.Add(), 11, "sluiced does not answer")
	if after := pod.Rules(); after != before {
		t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
	}
	testbed.WantNoTraces(t, n, pod.Host)
	if err := pod.Del(); err != nil {
		t.Errorf("DEL: %s", testbed.Describe(err))
	}
	n.StartDaemon()
	serveWeb(n)
	if err := pod.Add(); err != nil {
		t.Fatal(testbed.Describe(err))
	}
	t.Cleanup(func() { _ = pod.Del() })
	testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
}

// TestWithoutIPTables: nftables needs no program on the node.
func TestWithoutIPTables(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.StartDaemon()
	pod := n.NewPod("bare")
	add := callFor(n, pod).with(func(c *call) { c.setup = "mount -t tmpfs none /usr/sbin" })
	add.must(t, "ADD")
	if r := n.Records(); len(r) != 1 || r[0].State != attach.Captured || r[0].Installed.Backend != "nftables" {
		t.Errorf("recorded: %s", testbed.JSON(r))
	}
	add.must(t, "CHECK")
	add.must(t, "DEL")
	testbed.WantNoTraces(t, n, pod.Host)
}

// TestPatienceOfPods: SYNs of captured pods are sent for longer than by default. Other pods are not changed.
func TestPatienceOfPods(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	sysctls := func(h *testbed.Host) string {
		return h.Exec("sysctl", "-n", "net.ipv4.tcp_syn_retries", "net.ipv4.tcp_retries2")
	}
	untouched := sysctls(testbed.NewHost(t, "untouched"))
	early := n.AddPod("early") // before the decision
	if got, want := early.Exec("sysctl", "-n", "net.ipv4.tcp_syn_retries"), "127\n"; got != want {
		t.Errorf("provisional: got tcp_syn_retries %q, want %q", got, want)
	}
	n.StartDaemon()
	if got, want := n.AddPod("web").Exec("sysctl", "-n", "net.ipv4.tcp_syn_retries"), "127\n"; got != want {
		t.Errorf("captured: got tcp_syn_retries %q, want %q", got, want)
	}
	if got := sysctls(n.AddBystander().Host); got != untouched {
		t.Errorf("not captured: got %q, want %q", got, untouched)
	}
}
