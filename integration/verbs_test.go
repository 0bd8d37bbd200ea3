package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// serveWeb serves the world's one page, and a proxy on the way there: `seen` from there, the pod was captured.
func serveWeb(n *testbed.Node) *recordingProxy {
	serveCaller(n.World, web)
	return startRecordingProxy(n, testbed.ProxyAddress)
}

func TestVersionsThroughTheChain(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			n.CNIVersion = version
			serveWeb(n)
			d := n.StartDaemon()
			pod := n.AddPod("versioned")
			if got := pod.Result.Version(); got != version {
				t.Errorf("the chain's result has version %s", got)
			}
			wantCaller(t, pod.Host, web, nodeIPv4)
			if err := pod.Del(); err != nil {
				t.Errorf("DEL: %s", describe(err))
			}
			wantNoTraces(t, n, pod.Host)
			if s := d.Status(); len(s.Attachments) > 0 {
				t.Errorf("the daemon still has %s", testbed.JSON(s.Attachments))
			}
		})
	}
}

// TestResultComesOutAsItCameIn: in every version, with what no version knows.
func TestResultComesOutAsItCameIn(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	n.StartDaemon()
	for i, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			pod := n.NewPod(fmt.Sprint("pod", i))
			came := resultOf(version, "10.88.0.200/16", "fd00:88::200/64")
			came["interfaces"] = []map[string]any{{"name": "eth0", "sandbox": pod.Path(), "vendor/pciID": "0000:00:1f.6"}}
			came["x-vendor"] = map[string]any{"nested": []any{1, "two", nil, 1e21}}
			call := callFor(n, pod).with(func(c *call) {
				c.prevResult, c.conf = came, map[string]any{"cniVersion": version}
			})
			want, err := json.Marshal(came)
			if err != nil {
				t.Fatal(err)
			}
			if got := bytes.TrimSpace(call.must(t, "ADD")); !bytes.Equal(got, want) {
				t.Errorf("got  %s\nwant %s", got, want)
			}
			if version != "0.3.1" { // which has no CHECK
				call.must(t, "CHECK")
			}
			call.must(t, "DEL")
			wantNoTraces(t, n, pod.Host)
		})
	}
}

func TestVersionVerb(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	out := (&call{node: n, stdin: []byte(`{"cniVersion":"1.1.0"}`)}).must(t, "VERSION")
	var v struct{ SupportedVersions []string }
	if err := json.Unmarshal(out, &v); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	if got := strings.Join(v.SupportedVersions, " "); got != "0.3.1 0.4.0 1.0.0 1.1.0" {
		t.Errorf("supported versions: %s", got)
	}
}

// TestUnchained: alone there is nothing that sluice could do.
func TestUnchained(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	n.StartDaemon()
	pod := n.NewPod("alone")
	for _, verb := range []string{"ADD", "CHECK"} {
		call := callFor(n, pod).with(func(c *call) { c.prevResult = nil })
		_, err := call.run(t, verb)
		wantError(t, err, 7, "prevResult", "chained")
	}
	wantNoTraces(t, n, pod.Host)
}

// TestAddTwice: also while connections wait, which stay where they are.
func TestAddTwice(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			serveCaller(n.World, web)
			d := n.StartDaemon()
			pod := f.addPod(t, n, "twice", nil)
			before := rulesIn(pod.Host)
			conn, err := pod.Dial(patience(t), "tcp", web)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close() //nolint:errcheck // read to its end
			testbed.Eventually(t, "the connection waits", func() bool { return d.Of(pod).Waiting == 1 })
			for range 2 {
				callFor(n, pod).must(t, "ADD")
			}
			if after := rulesIn(pod.Host); after != before {
				t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
			}
			if s := d.Status(); len(s.Attachments) != 1 || s.Attachments[0].Waiting != 1 {
				t.Errorf("the daemon has %s; want one attachment with one connection", testbed.JSON(s.Attachments))
			}
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK: %s", describe(err))
			}
			startRecordingProxy(n, testbed.ProxyAddress)
			if got, err := readAll(patience(t), conn); err != nil || got != nodeIPv4 {
				t.Errorf("the connection that waited ended with %q, %v", got, err)
			}
		})
	}
}

// TestAddTwiceWithoutDaemon: the second ADD of a pod that is captured provisionally, and one after that.
func TestAddTwiceWithoutDaemon(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	pod := n.AddPod("twice")
	callFor(n, pod).must(t, "ADD")
	n.StartDaemon()
	callFor(n, pod).must(t, "ADD")
	serveWeb(n)
	wantCaller(t, pod.Host, web, nodeIPv4)
	if err := pod.Check(); err != nil {
		t.Errorf("CHECK: %s", describe(err))
	}
}

// TestDelLeavesNothing: whatever is there of what ADD made, and whatever is not there any more.
func TestDelLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		del  func(t *testing.T, n *testbed.Node, d *testbed.Daemon, pod *testbed.Pod)
	}{
		{"with everything there", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			callFor(n, pod).must(t, "DEL")
			wantNoTraces(t, n, pod.Host)
		}},
		{"twice", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			callFor(n, pod).must(t, "DEL")
			callFor(n, pod).must(t, "DEL")
			wantNoTraces(t, n, pod.Host)
		}},
		{"with the daemon down", func(t *testing.T, n *testbed.Node, d *testbed.Daemon, pod *testbed.Pod) {
			d.Kill()
			callFor(n, pod).must(t, "DEL")
			wantNoTraces(t, n, pod.Host)
		}},
		{"with the netns gone", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			pod.Delete()
			callFor(n, pod).must(t, "DEL")
		}},
		{"with the netns gone and the daemon down", func(t *testing.T, n *testbed.Node, d *testbed.Daemon, pod *testbed.Pod) {
			d.Kill()
			pod.Delete()
			callFor(n, pod).must(t, "DEL")
		}},
		{"with no netns named", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			callFor(n, pod).with(func(c *call) { c.netns = "" }).must(t, "DEL")
			wantNoTraces(t, n, pod.Host)
		}},
		{"with no prevResult", func(t *testing.T, n *testbed.Node, _ *testbed.Daemon, pod *testbed.Pod) {
			callFor(n, pod).with(func(c *call) { c.prevResult = nil }).must(t, "DEL")
			wantNoTraces(t, n, pod.Host)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			d := n.StartDaemon()
			pod := n.AddPod("leaving")
			veth := nodeVeth(t, n)
			c.del(t, n, d, pod)
			if r := n.Records(); len(r) > 0 {
				t.Errorf("left on disk: %s", testbed.JSON(r))
			}
			pod.Delete()
			testbed.Eventually(t, "the netns and with it the node's veth is gone", func() bool {
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
	n := testbed.NewNode(t, bin)
	pod := n.NewPod("never")
	callFor(n, pod).must(t, "DEL")
	n.StartDaemon()
	callFor(n, pod).must(t, "DEL")
	// What ADD would not have taken cannot be there.
	callFor(n, pod).with(func(c *call) { c.ifName = "no+interface" }).must(t, "DEL")
	wantNoTraces(t, n, pod.Host)
}

// TestMissedDel: the netns goes without a word; nothing of sluice's holds it.
func TestMissedDel(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	d := n.StartDaemon()
	pod := n.AddPod("lost")
	veth := nodeVeth(t, n)
	pod.Delete()
	testbed.Eventually(t, "the netns and with it the node's veth is gone", func() bool {
		_, err := n.TryExec("ip", "link", "show", veth)
		return err != nil
	})
	testbed.Eventually(t, "daemon and disk forget it", func() bool { return len(d.Status().Attachments)+len(n.Records()) == 0 })
}

// TestDelOfNetnsThatLivesOn: it is as it was before ADD.
func TestDelOfNetnsThatLivesOn(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		for _, daemon := range []string{"up", "down"} {
			t.Run(f.name+" with the daemon "+daemon, func(t *testing.T) {
				t.Parallel()
				n := testbed.NewNode(t, bin)
				serveWeb(n)
				d := n.StartDaemon()
				pod := f.addPod(t, n, "free", nil)
				wantCaller(t, pod.Host, web, nodeIPv4)
				if daemon == "down" {
					d.Kill()
				}
				callFor(n, pod).must(t, "DEL")
				wantNoTraces(t, n, pod.Host)
				wantCaller(t, pod.Host, web, pod.IPv4)
			})
		}
	}
}

// TestTwoAttachments: a container on two networks has one ruleset and one gate, until the last one goes.
func TestTwoAttachments(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"eth0", "net1"} {
		for _, daemon := range []string{"up", "down"} {
			t.Run("DEL of "+first+" first with the daemon "+daemon, func(t *testing.T) {
				t.Parallel()
				n := testbed.NewNode(t, bin)
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
				wantCaller(t, pod.Host, web, nodeIPv4)
				wantCheck(t, order[1])
				if rules := rulesIn(pod.Host); first == "net1" && strings.Contains(rules, "net1") {
					t.Error("rules still let pass what comes in by net1, whatever may be called so from now on")
				}
				if s := d.Of(pod); !strings.HasSuffix(s.Attachment, "/"+order[1].ifName) {
					t.Errorf("what is left is %s, want %s", s.Attachment, order[1].ifName)
				}
				order[1].must(t, "DEL")
				wantNoTraces(t, n, pod.Host)
				wantCaller(t, pod.Host, web, pod.IPv4)
			})
		}
	}
}

func wantCheck(t *testing.T, calls ...*call) {
	t.Helper()
	for _, c := range calls {
		if _, err := c.run(t, "CHECK"); err != nil {
			t.Errorf("CHECK of %s: %s", c.ifName, describe(err))
		}
	}
}
