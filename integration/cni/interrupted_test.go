package cni

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// blockedTools are tools that run one command each time, and then wait until they are killed.
type blockedTools struct{ dir string }

// blockTools makes iptables-restore, or ip6tables-restore, wait before its rules are in place or after that.
func blockTools(t *testing.T, tool string, after bool) blockedTools {
	t.Helper()
	b := blockedTools{t.TempDir()}
	for _, flavour := range []string{"nft", "legacy"} {
		name := tool + "-" + flavour + "-restore"
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		first := ":"
		if after {
			first = path + ` "$@"`
		}
		const script = "#!/bin/sh\n%s\necho $$ >%[2]s/new\nmv %[2]s/new %[2]s/pid\nexec sleep infinity\n"
		if err := os.WriteFile(filepath.Join(b.dir, name), fmt.Appendf(nil, script, first, b.dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// killAdd starts ADD and kills it, with the tool, while the tool waits.
func (b blockedTools) killAdd(t *testing.T, c *call) {
	t.Helper()
	cmd := c.with(func(c *call) { c.path = b.dir }).command(t, "ADD")
	if err := c.node.Start(cmd); err != nil {
		t.Fatal(err)
	}
	var pid int
	testbed.Eventually(t, "the tool waits", func() bool {
		data, err := os.ReadFile(filepath.Join(b.dir, "pid"))
		if err != nil {
			return false
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(data)))
		return err == nil
	})
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // it was killed
	// The kernel kills the tool with the plugin, and then init may have reaped it already.
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Errorf("killing the tool: %v", err)
	}
	if err := os.Remove(filepath.Join(b.dir, "pid")); err != nil {
		t.Fatal(err)
	}
}

// wantUnfinished fails the test unless the pod's ADD counts as unfinished, on disk and for CHECK.
func wantUnfinished(t *testing.T, c *call) {
	t.Helper()
	if r := c.node.Records(); len(r) != 1 || r[0].State != attach.Adding || r[0].Installed != nil {
		t.Errorf("recorded: %s, want an unfinished ADD", testbed.JSON(r))
	}
	_, err := c.run(t, "CHECK")
	testbed.WantErrorLike(t, err, "its ADD has not finished")
}

// TestKilledAdd at several points: DEL leaves nothing of it, and the next ADD succeeds, with another backend too.
func TestKilledAdd(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours[:2] { // nftables has no tool that could wait
		for _, daemon := range []string{"up", "down"} {
			t.Run(f.Name+" with the daemon "+daemon, func(t *testing.T) {
				t.Parallel()
				n := testbed.New(t)
				n.Plugin["backend"] = f.Backend
				serveWeb(n)
				d := n.StartDaemon()
				if daemon == "down" {
					d.Kill()
				}
				for _, point := range []struct {
					name, tool string
					after      bool
				}{
					{"after the wall", "iptables", false},
					{"between the families", "ip6tables", false},
					{"before the record", "ip6tables", true},
				} {
					t.Run(point.name, func(t *testing.T) {
						tools := blockTools(t, point.tool, point.after)
						pod := n.AddBystander() // with routes and addresses, and not captured
						f.Prepare(pod)
						add := callFor(n, pod)

						tools.killAdd(t, add)
						if !strings.Contains(pod.Traces(), "SLUICE") {
							t.Error("no rules are there")
						}
						wantUnfinished(t, add)
						add.must(t, "DEL")
						wantNothing(t, d, pod, n)

						for _, backend := range []string{f.Backend, "nftables"} {
							tools.killAdd(t, add)
							next := add.with(func(c *call) { c.conf = map[string]any{"backend": backend} })
							next.must(t, "ADD")
							if daemon == "up" {
								next.must(t, "CHECK")
								testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
							}
							next.must(t, "DEL")
							wantNothing(t, d, pod, n)
						}
						testbed.WantCaller(t, pod.Host, testbed.Web, pod.IPv4)
					})
				}
			})
		}
	}
}

// wantNothing fails the test unless nothing of sluice is left.
func wantNothing(t *testing.T, d *testbed.Daemon, pod *testbed.Pod, n *testbed.Node) {
	t.Helper()
	testbed.WantNoTraces(t, n, pod.Host)
	if r := n.Records(); len(r) > 0 {
		t.Errorf("left on disk: %s", testbed.JSON(r))
	}
	if !d.Ended() && len(d.Status().Attachments) > 0 {
		t.Errorf("the daemon still has %s", testbed.JSON(d.Status().Attachments))
	}
}

// TestUnfinishedAdd, as one is left that was killed before its last record: DEL, GC and ADD know what to do, with
// every backend.
func TestUnfinishedAdd(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			serveWeb(n)
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "unfinished", nil)
			add := callFor(n, pod)
			interrupt := func(restart bool) {
				r := n.Records()
				if len(r) != 1 {
					t.Fatalf("recorded: %s", testbed.JSON(r))
				}
				if restart {
					d.Kill()
				}
				r[0].State, r[0].Installed = attach.Adding, nil
				if err := attach.NewStore(n.StateDir()).Write(r[0]); err != nil {
					t.Fatal(err)
				}
				if restart {
					d = n.StartDaemon()
					if got := d.Of(pod).State; got != attach.Adding {
						t.Errorf("the next daemon says %s, want %s", got, attach.Adding)
					}
				}
				wantUnfinished(t, add)
			}
			for _, restart := range []bool{false, true} {
				interrupt(restart)
				add.must(t, "ADD")
				add.must(t, "CHECK")
				testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
				interrupt(restart)
				add.must(t, "DEL")
				wantNothing(t, d, pod, n)
				add.must(t, "ADD")
				interrupt(restart)
				if err := n.GC(); err != nil {
					t.Errorf("GC: %s", testbed.Describe(err))
				}
				wantNothing(t, d, pod, n)
				add.must(t, "ADD")
			}
		})
	}
}

// TestDelWithoutRecord removes the rules by their names, unless another attachment in the netns has them.
func TestDelWithoutRecord(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			serveWeb(n)
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "forgotten", nil)
			eth0 := callFor(n, pod)
			net1 := eth0.with(func(c *call) { c.ifName = "net1" })
			file := func(ifName string) string {
				return filepath.Join(n.StateDir(), "attachments", pod.ID+":"+ifName+".json")
			}
			net1.must(t, "ADD")
			if err := os.Remove(file("net1")); err != nil {
				t.Fatal(err)
			}
			net1.must(t, "DEL")
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
			if err := os.Remove(file("eth0")); err != nil {
				t.Fatal(err)
			}
			eth0.must(t, "DEL")
			wantNothing(t, d, pod, n)

			eth0.must(t, "ADD")
			if err := os.WriteFile(file("eth0"), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
			eth0.must(t, "DEL")
			wantNothing(t, d, pod, n)
			testbed.WantCaller(t, pod.Host, testbed.Web, pod.IPv4)
		})
	}
}

// TestDelWithoutTools: without the tools that installed the rules, DEL removes those of nf_tables. It keeps the record
// of the others, and all stays as it is until a DEL or GC can remove them.
func TestDelWithoutTools(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			serveWeb(n)
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "stuck", nil)
			del := callFor(n, pod)
			without := del.with(func(c *call) { c.setup = "mount -t tmpfs none /usr/sbin" })
			if f.Name != "iptables-legacy" {
				without.must(t, "DEL")
				wantNothing(t, d, pod, n)
				return
			}
			for range 2 {
				_, err := without.run(t, "DEL")
				testbed.WantCNIError(t, err, 0, "detaching "+pod.ID, "iptables-legacy", "not found")
				if d.Of(pod).State != attach.Captured || len(n.Records()) != 1 {
					t.Errorf("the daemon says %s, the disk %s", testbed.JSON(d.Of(pod)), testbed.JSON(n.Records()))
				}
				testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
			}
			del.must(t, "DEL")
			wantNothing(t, d, pod, n)
			del.must(t, "ADD")
			if _, err := without.run(t, "DEL"); err == nil {
				t.Error("DEL without the tools succeeded")
			}
			if err := n.GC(); err != nil {
				t.Errorf("GC: %s", testbed.Describe(err))
			}
			wantNothing(t, d, pod, n)
		})
	}
}
