package cni

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestFailedAddLeavesNothing: the record that announces the rules cannot be written, so none are installed.
func TestFailedAddLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		for _, daemon := range []string{"up", "down"} {
			t.Run(f.Name+" with the daemon "+daemon, func(t *testing.T) {
				t.Parallel()
				n := testbed.New(t)
				n.Plugin["backend"] = f.Backend
				pod := n.NewPod("unlucky")
				f.Prepare(pod)
				before := pod.Rules()
				var d *testbed.Daemon
				if daemon == "up" {
					d = n.StartDaemon()
				}
				_, err := callFor(n, pod).with(func(c *call) { c.setup = fullDisk(t, n) }).run(t, "ADD")
				testbed.WantCNIError(t, err, 0, "recording", "no space left")
				testbed.WantNoTraces(t, n, pod.Host)
				if after := pod.Rules(); withoutEmpty(after) != withoutEmpty(before) {
					t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
				}
				if d != nil && len(d.Status().Attachments) > 0 {
					t.Errorf("the daemon still has %s", testbed.JSON(d.Status().Attachments))
				}
			})
		}
	}
}

// TestDiskFullDuringAdd: the record cannot be written after the rules are in, so ADD takes the rules out again.
func TestDiskFullDuringAdd(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours[:2] { // nftables has no tool that could fill the disk
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.Plugin["backend"] = f.Backend
			d := n.StartDaemon()
			pod := n.NewPod("unlucky")
			f.Prepare(pod)
			tools := t.TempDir()
			tool, err := exec.LookPath("ip6" + strings.TrimPrefix(f.Name, "ip") + "-restore")
			if err != nil {
				t.Fatal(err)
			}
			// The log of the calls is on another disk.
			script := fmt.Sprintf(`#!/bin/sh
%[1]s "$@" || exit
ls %[2]s/attachments/*.json >>%[3]s/calls
cat /dev/zero >%[2]s/attachments/fill 2>/dev/null
exit 0
`, tool, n.StateDir(), tools)
			if err := os.WriteFile(filepath.Join(tools, filepath.Base(tool)), []byte(script), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(n.StateDir(), 0o700); err != nil {
				t.Fatal(err)
			}
			add := callFor(n, pod).with(func(c *call) {
				c.path, c.setup = tools, "mount -t tmpfs -o size=32k none "+n.StateDir()
			})
			_, err = add.run(t, "ADD")
			testbed.WantCNIError(t, err, 0, "recording", "no space left")
			calls, err := os.ReadFile(filepath.Join(tools, "calls"))
			if err != nil || !strings.Contains(string(calls), pod.ID) {
				t.Errorf("while rules were installed the records were %q, %v; want one of the pod", calls, err)
			}
			wantNothing(t, d, pod, n)
		})
	}
}

// TestFailedSecondAddChangesNothing: the pod stays captured as after the first ADD.
func TestFailedSecondAddChangesNothing(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			serveWeb(n)
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "lucky", nil)
			before := pod.Rules()
			// The state directory keeps its records and takes no more.
			readOnly := fmt.Sprintf("mount --bind %[1]s %[1]s; mount -o remount,ro,bind %[1]s", n.StateDir())
			_, err := callFor(n, pod).with(func(c *call) { c.setup = readOnly }).run(t, "ADD")
			testbed.WantCNIError(t, err, 0, "recording")
			if after := pod.Rules(); after != before {
				t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
			}
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
			if d.Of(pod).State != "captured" || len(n.Records()) != 1 {
				t.Errorf("the daemon says %s, the disk %s", testbed.JSON(d.Of(pod)), testbed.JSON(n.Records()))
			}
		})
	}
}

// fullDisk is a script that mounts a full file system on the state directory.
func fullDisk(t *testing.T, n *testbed.Node) string {
	t.Helper()
	if err := os.MkdirAll(n.StateDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`mount -t tmpfs -o size=32k none %[1]s
mkdir %[1]s/attachments
! cat /dev/zero >%[1]s/attachments/fill 2>/dev/null`, n.StateDir())
}

// withoutEmpty leaves out the built-in chains without a rule: iptables-nft and iptables-legacy leave them in a table
// that they have touched.
func withoutEmpty(rules string) string {
	var left []string
	for line := range strings.Lines(rules) {
		switch w := strings.Fields(line); {
		case len(w) == 0, w[0] == "table", w[0] == "chain", w[0] == "}", w[0] == "type",
			w[0] == "COMMIT", strings.HasPrefix(w[0], "*"), strings.HasPrefix(w[0], ":"):
		default:
			left = append(left, line)
		}
	}
	return strings.Join(left, "")
}

// TestIPv6ThatCannotBeCaptured: ADD fails for a pod that could bypass the proxy by IPv6.
func TestIPv6ThatCannotBeCaptured(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	broken := t.TempDir()
	const script = "#!/bin/sh\necho IPv6 is broken here >&2\nexit 1\n"
	for _, tool := range []string{"ip6tables-restore", "ip6tables-nft-restore", "ip6tables-legacy-restore"} {
		if err := os.WriteFile(filepath.Join(broken, tool), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	serveWeb(n)
	d := n.StartDaemon()
	add := func(t *testing.T, backend, ipv6 string) (*testbed.Pod, error) {
		n.Plugin["backend"] = backend
		pod := n.NewPod("dual")
		pod.IP("link", "add", "eth0", "type", "veth", "peer", "name", "nowhere")
		pod.IP("link", "set", "eth0", "up")
		pod.IP("link", "set", "nowhere", "up")
		pod.IP("addr", "add", "10.88.0.200/16", "dev", "eth0")
		if ipv6 != "" {
			pod.IP("addr", "add", ipv6, "dev", "eth0", "nodad")
		}
		call := callFor(n, pod).with(func(c *call) { c.path = broken })
		t.Cleanup(func() { call.must(t, "DEL") })
		_, err := call.run(t, "ADD")
		return pod, err
	}
	t.Run("it has an address", func(t *testing.T) {
		pod, err := add(t, "iptables", "fd00:88::200/64")
		testbed.WantCNIError(t, err, 0, "IPv6 address", "IPv6 is broken here")
		testbed.WantNoTraces(t, n, pod.Host)
		if s := d.Status(); len(s.Attachments) > 0 {
			t.Errorf("the daemon still has %s", testbed.JSON(s.Attachments))
		}
	})
	t.Run("it has none", func(t *testing.T) {
		pod, err := add(t, "iptables", "")
		if err != nil {
			t.Fatal(testbed.Describe(err))
		}
		if r := n.Records(); len(r) != 1 || r[0].Installed.IPv6 {
			t.Errorf("recorded: %s; want IPv4 only", testbed.JSON(r))
		}
		callFor(n, pod).must(t, "CHECK")
	})
	t.Run("another backend can do it", func(t *testing.T) {
		pod, err := add(t, "auto", "fd00:88::200/64")
		if err != nil {
			t.Fatal(testbed.Describe(err))
		}
		for _, r := range n.Records() {
			if r.ContainerID == pod.ID && (r.Installed.Backend != "nftables" || !r.Installed.IPv6) {
				t.Errorf("installed: %s; want both families by nftables", testbed.JSON(r.Installed))
			}
		}
	})
}
