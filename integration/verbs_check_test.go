package integration

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// drifts are ways in which a captured pod's rules can come to differ from what ADD installed.
var drifts = []struct {
	name string
	// By iptables and ip6tables of either flavour, or by nft.
	iptables, nft []string
	names         string // what CHECK says of it
}{
	{
		"no redirect", []string{"iptables -t nat -D SLUICE_CAPTURE 1"},
		[]string{"flush chain ip sluice-nat SLUICE_CAPTURE"}, "IPv4.*-A SLUICE_CAPTURE -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j REDIRECT --to-ports 15001",
	},
	{
		"no redirect of IPv6", []string{"ip6tables -t nat -D SLUICE_CAPTURE 1"},
		[]string{"flush chain ip6 sluice-nat SLUICE_CAPTURE"}, "IPv6.*-A SLUICE_CAPTURE -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j REDIRECT --to-ports 15001",
	},
	{
		"no jump", []string{"iptables -t nat -D OUTPUT 1"},
		[]string{"flush chain ip sluice-nat OUTPUT"}, "IPv4.*-A OUTPUT -p tcp -j SLUICE_OUTPUT",
	},
	{
		"no SYN gate", []string{"iptables -t mangle -F SLUICE_INPUT"},
		[]string{"flush chain ip sluice-mangle SLUICE_INPUT"}, "IPv4.*-A SLUICE_INPUT -p tcp -m tcp --dport 15001 -m conntrack --ctstate DNAT -m socket --nowildcard -j RETURN",
	},
	{
		"no nested containers", []string{"ip6tables -t nat -F SLUICE_PREROUTING"},
		[]string{"flush chain ip6 sluice-nat SLUICE_PREROUTING"}, "IPv6.*-A SLUICE_PREROUTING -j SLUICE_OUTBOUND",
	},
	{
		"another port", []string{"iptables -t nat -R SLUICE_CAPTURE 1 -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j REDIRECT --to-ports 15002"},
		[]string{"flush chain ip sluice-nat SLUICE_CAPTURE", "add rule ip sluice-nat SLUICE_CAPTURE meta l4proto tcp redirect to :15002"},
		"IPv4.*-A SLUICE_CAPTURE -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j REDIRECT --to-ports 15001",
	},
	{
		"a foreign rule before ours", []string{"iptables -t nat -I OUTPUT -d 198.51.100.10 -j ACCEPT"},
		[]string{"insert rule ip sluice-nat OUTPUT ip daddr 198.51.100.10 accept"}, "IPv4.*(before ours: -A OUTPUT -d 198.51.100.10/32 -j ACCEPT|not ours)",
	},
	{
		"a foreign rule among ours", []string{"iptables -t nat -I SLUICE_OUTPUT -d 198.51.100.10 -j ACCEPT"},
		[]string{"insert rule ip sluice-nat SLUICE_OUTPUT ip daddr 198.51.100.10 accept"},
		"IPv4.*(unexpected: -A SLUICE_OUTPUT -d 198.51.100.10/32 -j ACCEPT|not ours)",
	},
	{
		"no chain", []string{"ip6tables -t nat -F SLUICE_OUTPUT", "ip6tables -t nat -D OUTPUT 1", "ip6tables -t nat -X SLUICE_OUTPUT"},
		[]string{"delete table ip6 sluice-nat"}, "IPv6.*SLUICE_OUTPUT: .*missing",
	},
}

func TestCheckNamesDrift(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			serveWeb(n)
			n.StartDaemon()
			pod := f.addPod(t, n, "drifting", nil)
			for _, d := range drifts {
				t.Run(d.name, func(t *testing.T) {
					if err := pod.Check(); err != nil {
						t.Fatalf("CHECK before: %s", describe(err))
					}
					tamper(pod, f, d.iptables, d.nft)
					wantErrorLike(t, pod.Check(), d.names)
					callFor(n, pod).must(t, "ADD") // which mends it
				})
			}
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK after: %s", describe(err))
			}
			wantCaller(t, pod.Host, web, nodeIPv4)
		})
	}
}

// tamper changes the pod's rules with the tools of the flavour.
func tamper(pod *testbed.Pod, f flavour, iptables, nft []string) {
	if f.backend == "nftables" {
		for _, command := range nft {
			pod.Exec("nft", command)
		}
		return
	}
	for _, command := range iptables {
		w := strings.Fields(command) // iptables becomes iptables-nft or iptables-legacy
		pod.Exec(w[0]+strings.TrimPrefix(f.name, "iptables"), w[1:]...)
	}
}

func TestCheckNamesWhatIsNotThere(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			d := n.StartDaemon()
			pod := f.addPod(t, n, "checked", nil)
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK after ADD: %s", describe(err))
			}
			d.Kill()
			wantErrorLike(t, pod.Check(), "nothing listens on tcp port 15001.*nothing listens on tcp6 port 15001")
			n.StartDaemon()
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK with the daemon back: %s", describe(err))
			}
			other := n.NewPod("other")
			_, err := callFor(n, other).run(t, "CHECK")
			wantErrorLike(t, err, "never recorded")
			_, err = callFor(n, pod).with(func(c *call) { c.netns = other.Path() }).run(t, "CHECK")
			wantErrorLike(t, err, "not the one")
			callFor(n, pod).must(t, "DEL")
			_, err = callFor(n, pod).run(t, "CHECK")
			wantErrorLike(t, err, "never recorded")
		})
	}
}

// TestGC drops what is not valid any more, of the network that it is called for and no other.
func TestGC(t *testing.T) {
	t.Parallel()
	for _, daemon := range []string{"up", "down"} {
		t.Run("with the daemon "+daemon, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
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
				t.Errorf("left are %s, want %s", left, want)
			}
			wantNoTraces(t, n, stale.Host)
			if daemon == "down" {
				n.StartDaemon()
			}
			callFor(n, valid).must(t, "CHECK")
			secondary.must(t, "CHECK")
		})
	}
}

// TestGCThroughTheChain is the same as a runtime does it.
func TestGCThroughTheChain(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	d := n.StartDaemon()
	valid, stale := n.AddPod("valid"), n.AddPod("stale")
	if err := n.GC(valid); err != nil {
		t.Fatal(describe(err))
	}
	if r := n.Records(); len(r) != 1 || r[0].ContainerID != valid.ID {
		t.Errorf("left on disk: %s", testbed.JSON(r))
	}
	if s := d.Status(); len(s.Attachments) != 1 {
		t.Errorf("the daemon has %s", testbed.JSON(s.Attachments))
	}
	wantNoTraces(t, n, stale.Host)
	if err := valid.Check(); err != nil {
		t.Errorf("CHECK: %s", describe(err))
	}
}

// TestStatus: it says when ADD could not be served, and only then.
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
		{name: "the daemon is up, and ADD would fail without", plugin: map[string]any{"onDaemonDown": "fail"}, daemon: true},
		{name: "the daemon is down, and ADD fails without", plugin: map[string]any{"onDaemonDown": "fail"}, code: 51, names: "onDaemonDown.*sluiced does not answer"},
		{
			name: "the upstream is late, and is needed", plugin: map[string]any{"statusNeedsUpstream": true}, daemon: true,
			code: 51, names: "statusNeedsUpstream.*upstream 127.0.0.1:18080 is late",
		},
		{
			name: "the daemon is down, and the upstream is needed", plugin: map[string]any{"statusNeedsUpstream": true},
			code: 51, names: "statusNeedsUpstream.*sluiced does not answer",
		},
		{
			name: "the upstream is needed, and there", plugin: map[string]any{"statusNeedsUpstream": true},
			setup: func(t *testing.T, n *testbed.Node) string {
				startConnectProxy(n)
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
			name: "no iptables, and nothing else will do", plugin: map[string]any{"backend": "iptables"}, code: 50, names: "backend.*install iptables",
			setup: func(*testing.T, *testbed.Node) string { return noBinaries },
		},
		{name: "no iptables, but nftables", setup: func(*testing.T, *testbed.Node) string { return noBinaries }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			maps.Copy(n.Plugin, c.plugin)
			if c.daemon {
				n.StartDaemon()
			}
			status := &call{node: n, conf: map[string]any{"cniVersion": "1.1.0"}}
			if c.setup != nil {
				status.setup = c.setup(t, n)
			} else if err := n.Status(); (err != nil) != (c.code != 0) {
				t.Errorf("through the chain: %s", describe(err))
			}
			_, err := status.run(t, "STATUS")
			if c.code == 0 {
				if err != nil {
					t.Error(describe(err))
				}
				return
			}
			wantError(t, err, c.code)
			wantErrorLike(t, err, c.names)
		})
	}
}

// TestWithoutIPTables: nftables needs no program on the node.
func TestWithoutIPTables(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	n.StartDaemon()
	pod := n.NewPod("bare")
	add := callFor(n, pod).with(func(c *call) { c.setup = "mount -t tmpfs none /usr/sbin" })
	add.must(t, "ADD")
	if r := n.Records(); len(r) != 1 || r[0].State != attach.Captured || r[0].Installed.Backend != "nftables" {
		t.Errorf("recorded: %s", testbed.JSON(r))
	}
	add.must(t, "CHECK")
	add.must(t, "DEL")
	wantNoTraces(t, n, pod.Host)
}
