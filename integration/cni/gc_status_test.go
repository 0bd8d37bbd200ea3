package cni

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestGC drops the attachments of its network that are not valid any more, and none of another network.
func TestGC(t *testing.T) {
	t.Parallel()
	for _, daemon := range []string{"up", "down"} {
		t.Run("with the daemon "+daemon, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			d := n.StartDaemon()
			valid, stale := n.NewPod("valid"), n.NewPod("stale")
			gone, other := n.NewPod("gone"), n.NewPod("other")
			for _, pod := range []*testbed.Pod{valid, stale, gone} {
				callFor(n, pod).must(t, "ADD")
			}
			secondary := callFor(n, other).with(func(c *call) { c.conf = map[string]any{"name": "secondary"} })
			secondary.must(t, "ADD")
			gone.Delete()
			if daemon == "down" {
				d.Kill()
			}
			gc := callFor(n, valid).with(func(c *call) {
				c.containerID, c.netns, c.ifName, c.args, c.prevResult = "", "", "", "", nil
				c.conf = map[string]any{"cniVersion": "1.1.0", "cni.dev/valid-attachments": []map[string]string{
					{"containerID": valid.ID, "ifname": "eth0"}, {"containerID": stale.ID, "ifname": "net1"},
				}}
			})
			gc.must(t, "GC")
			gc.must(t, "GC")
			var left []string
			for _, r := range n.Records() {
				left = append(left, r.ContainerID)
			}
			want := []string{valid.ID, other.ID}
			slices.Sort(left)
			slices.Sort(want)
			if !slices.Equal(left, want) {
				t.Errorf("the records of %s are left, want those of %s", left, want)
			}
			testbed.WantNoTraces(t, n, stale.Host)
			if daemon == "down" {
				n.StartDaemon()
			}
			callFor(n, valid).must(t, "CHECK")
			secondary.must(t, "CHECK")
		})
	}
}

// TestGCThroughTheChain is the same by libcni.
func TestGCThroughTheChain(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	d := n.StartDaemon()
	valid, stale := n.AddPod("valid"), n.AddPod("stale")
	if err := n.GC(valid); err != nil {
		t.Fatal(testbed.Describe(err))
	}
	if r := n.Records(); len(r) != 1 || r[0].ContainerID != valid.ID {
		t.Errorf("left on disk: %s", testbed.JSON(r))
	}
	if s := d.Status(); len(s.Attachments) != 1 {
		t.Errorf("the daemon has %s", testbed.JSON(s.Attachments))
	}
	testbed.WantNoTraces(t, n, stale.Host)
	if err := valid.Check(); err != nil {
		t.Errorf("CHECK: %s", testbed.Describe(err))
	}
}

// TestStatus: STATUS fails when the ADD of every pod would, and only then.
func TestStatus(t *testing.T) {
	t.Parallel()
	noBinaries := `mount -t tmpfs none /usr/sbin
if command -v iptables-restore; then exit 1; fi`
	for _, c := range []struct {
		name   string
		plugin map[string]any
		setup  func(t *testing.T, n *testbed.Node) string
		daemon bool
		code   uint // 0 for none
		names  string
	}{
		{name: "the daemon is up", daemon: true},
		{name: "the daemon is down, and connections can wait"},
		{
			name: "the daemon is up, and ADD would fail without", plugin: map[string]any{"onDaemonDown": "fail"},
			daemon: true,
		},
		{
			name: "the daemon is down, and ADD fails without", plugin: map[string]any{"onDaemonDown": "fail"},
			code: 51, names: "onDaemonDown.*sluiced does not answer",
		},
		{
			name: "the upstream is late, and is needed", plugin: map[string]any{"statusNeedsUpstream": true},
			daemon: true,
			code:   51, names: "statusNeedsUpstream.*upstream 127.0.0.1:18080 is late",
		},
		{
			name: "the daemon is down, and the upstream is needed", plugin: map[string]any{"statusNeedsUpstream": true},
			code: 51, names: "statusNeedsUpstream.*sluiced does not answer",
		},
		{
			name: "the upstream is needed, and there", plugin: map[string]any{"statusNeedsUpstream": true},
			setup: func(t *testing.T, n *testbed.Node) string {
				testbed.StartConnectProxy(n)
				d := n.StartDaemon()
				testbed.Eventually(t, "the upstream is there", func() bool { return d.Status().Upstream.Ready })
				return ""
			},
		},
		{
			name: "records cannot be made", code: 50, names: "recorded.*not a directory",
			setup: func(t *testing.T, n *testbed.Node) string {
				if err := os.WriteFile(n.StateDir(), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				return ""
			},
		},
		{
			name: "records are on a read-only file system", code: 50, names: "recorded.*read-only",
			setup: func(t *testing.T, n *testbed.Node) string {
				if err := os.MkdirAll(filepath.Join(n.StateDir(), "attachments"), 0o700); err != nil {
					t.Fatal(err)
				}
				return fmt.Sprintf("mount --bind %[1]s %[1]s; mount -o remount,ro,bind %[1]s", n.StateDir())
			},
		},
		{name: "records are on a full file system", code: 50, names: "recorded.*no space left", setup: fullDisk},
		{
			name: "no iptables, and nothing else will do", plugin: map[string]any{"backend": "iptables"},
			code: 50, names: "backend.*install iptables",
			setup: func(*testing.T, *testbed.Node) string { return noBinaries },
		},
		{
			name:   "records are on a full file system, and pods that did not opt in need none",
			plugin: map[string]any{"optIn": "annotation"}, setup: fullDisk,
		},
		{
			name:   "no backend, and pods that did not opt in need none",
			plugin: map[string]any{"optIn": "annotation", "backend": "iptables"},
			setup:  func(*testing.T, *testbed.Node) string { return noBinaries },
		},
		{
			name:   "the daemon is down, and ADD fails for pods that opted in alone",
			plugin: map[string]any{"optIn": "annotation", "onDaemonDown": "fail"},
		},
		{
			name:   "the upstream is needed, whoever opted in",
			plugin: map[string]any{"optIn": "annotation", "statusNeedsUpstream": true},
			code:   51, names: "statusNeedsUpstream.*sluiced does not answer",
		},
		{name: "no iptables, but nftables", setup: func(*testing.T, *testbed.Node) string { return noBinaries }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			maps.Copy(n.Plugin, c.plugin)
			if c.daemon {
				n.StartDaemon()
			}
			status := &call{node: n, conf: map[string]any{"cniVersion": "1.1.0"}}
			if c.setup != nil {
				status.setup = c.setup(t, n)
			} else if err := n.Status(); (err != nil) != (c.code != 0) {
				t.Errorf("through the chain: %s", testbed.Describe(err))
			}
			_, err := status.run(t, "STATUS")
			if c.code == 0 {
				if err != nil {
					t.Error(testbed.Describe(err))
				}
				return
			}
			testbed.WantCNIError(t, err, c.code)
			testbed.WantErrorLike(t, err, c.names)
		})
	}
}
