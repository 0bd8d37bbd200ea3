package cni

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// TestAddInTheNodesNetns is refused: the proxy's own connections would be captured.
func TestAddInTheNodesNetns(t *testing.T) {
	t.Parallel()
	for _, daemon := range []string{"up", "down"} {
		t.Run("with the daemon "+daemon, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.World.ServeCaller(testbed.Web)
			proxy := testbed.StartConnectProxy(n)
			if daemon == "up" {
				n.StartDaemon()
			}
			mount := filepath.Join(t.TempDir(), "netns")
			if err := os.WriteFile(mount, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			testbed.Run(t, "mount", "--bind", n.Path(), mount)
			t.Cleanup(func() { testbed.Run(t, "umount", mount) })
			before := n.Rules()
			for name, path := range map[string]string{
				"by a process": fmt.Sprintf("/proc/%d/ns/net", proxy.Pid()), "by its mount": n.Path(),
				"by another mount": mount,
			} {
				for _, override := range []string{"0", "1"} { // the CNI library refuses it after ADD, but not with 1
					c := callFor(n, n.NewPod("host")).with(func(c *call) {
						c.netns, c.env = path, []string{"CNI_NETNS_OVERRIDE=" + override}
					})
					_, err := c.run(t, "ADD")
					testbed.WantCNIError(t, err, 8, path, "the node's own network namespace")
					if after := n.Rules(); after != before {
						t.Fatalf("%s: rules before:\n%s\nafter:\n%s", name, before, after)
					}
					if override == "1" {
						c.must(t, "DEL")
					}
				}
			}
			testbed.WantNoTraces(t, n, n.Host)
			if r := n.Records(); len(r) > 0 {
				t.Errorf("recorded: %s", testbed.JSON(r))
			}
			testbed.WantCaller(t, n.Host, testbed.Web, testbed.NodeIPv4)
		})
	}
}

// TestNodesNetnsIsFreed from the capture that an older version may have recorded.
func TestNodesNetnsIsFreed(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.World.ServeCaller(testbed.Web)
			id, err := attach.IdentifyNetns(n.Path())
			if err != nil {
				t.Fatal(err)
			}
			at := attach.Attachment{ID: attach.ID{ContainerID: "old", IfName: "eth0"}, Network: "pods", Netns: n.Path()}
			installed, err := ruleset.Apply(t.Context(), n.Path(), ruleset.Provisional("eth0"), f.Name, nil)
			if err != nil {
				t.Fatal(err)
			}
			record := attach.Record{Attachment: at, NetnsID: id, State: attach.Captured, Installed: &installed}
			if err := attach.NewStore(n.StateDir()).Write(record); err != nil {
				t.Fatal(err)
			}
			d := n.StartDaemon()
			testbed.Eventually(t, "the record is dropped", func() bool { return len(n.Records()) == 0 })
			testbed.WantNoTraces(t, n, n.Host)
			if s := d.Status(); len(s.Attachments) > 0 {
				t.Errorf("the daemon has %s", testbed.JSON(s.Attachments))
			}
			testbed.WantCaller(t, n.Host, testbed.Web, testbed.NodeIPv4)
		})
	}
}
