package cni

import (
	"os"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestOptInByAnnotation: a pod that the admission policy says did not opt in starts and connects, whatever is down.
func TestOptInByAnnotation(t *testing.T) {
	t.Parallel()
	down := func(*testing.T, *testbed.Node) {}
	hangs := func(_ *testing.T, n *testbed.Node) { n.StartDaemon().Freeze() }
	for _, tc := range []struct {
		name       string
		optIn      string // of the entry
		annotation string // "" for none
		daemon     func(*testing.T, *testbed.Node)
		want       attach.State
	}{
		{"no, and the daemon is down", "annotation", "false", down, attach.Passed},
		{"no, and the daemon hangs", "annotation", "false", hangs, attach.Passed},
		{"yes, and the daemon is down", "annotation", "true", down, attach.Provisional},
		{"an unknown value, and the daemon is down", "annotation", "no", down, attach.Provisional},
		{"an older pod without it, and the daemon is down", "annotation", "", down, attach.Provisional},
		{"the pod's own value, without a policy", "daemon", "false", down, attach.Provisional},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.World.ServeCaller(testbed.Web)
			tc.daemon(t, n)
			n.Plugin["optIn"] = tc.optIn
			pod := n.NewPod("web")
			if tc.annotation != "" {
				n.Annotated(map[string]string{attach.OptInAnnotation: tc.annotation})(pod)
			}
			before := pod.Rules()
			if err := pod.Add(); err != nil {
				t.Fatal(testbed.Describe(err))
			}
			if r := n.Records(); len(r) != 1 || r[0].State != tc.want {
				t.Errorf("recorded: %s; want it %s", testbed.JSON(r), tc.want)
			}
			if tc.want == attach.Passed {
				testbed.WantCaller(t, pod.Host, testbed.Web, pod.IPv4)
				if after := pod.Rules(); after != before {
					t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
				}
			}
			if err := pod.Del(); err != nil {
				t.Errorf("DEL: %s", testbed.Describe(err))
			}
			testbed.WantNoTraces(t, n, pod.Host)
		})
	}
}

// TestOptedOutPodNeedsNoDisk: it is not recorded then.
func TestOptedOutPodNeedsNoDisk(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.World.ServeCaller(testbed.Web)
	n.Plugin["optIn"] = "annotation"
	pod := n.NewPod("web")
	n.Annotated(map[string]string{attach.OptInAnnotation: "false"})(pod)
	if err := pod.Add(); err != nil { // for its network
		t.Fatal(testbed.Describe(err))
	}
	call := callFor(n, pod).with(func(c *call) {
		c.setup = "mount -t tmpfs -o ro none " + n.StateDir()
		c.conf = map[string]any{"runtimeConfig": pod.RuntimeConfig}
	})
	if _, err := call.run(t, "ADD"); err != nil {
		t.Errorf("ADD: %s", testbed.Describe(err))
	}
	testbed.WantCaller(t, pod.Host, testbed.Web, pod.IPv4)
	if err := pod.Del(); err != nil {
		t.Errorf("DEL: %s", testbed.Describe(err))
	}
}

// TestOptedOutPodIsCapturedLater: the daemon decides about a running pod by its labels as they are then. This daemon
// captures every pod.
func TestOptedOutPodIsCapturedLater(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			serveWeb(n)
			n.Plugin["optIn"] = "annotation"
			pod := f.AddPod(t, n, "web", n.Annotated(map[string]string{attach.OptInAnnotation: "false"}))
			testbed.WantCaller(t, pod.Host, testbed.Web, pod.IPv4)
			d := n.StartDaemon()
			testbed.Eventually(t, "the pod is captured", func() bool { return d.Of(pod).State == attach.Captured })
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
			// ADD again must not end the capture.
			callFor(n, pod).with(func(c *call) {
				c.conf = map[string]any{"runtimeConfig": pod.RuntimeConfig}
			}).must(t, "ADD")
			if got := d.Of(pod).State; got != attach.Captured {
				t.Errorf("after another ADD: got %q, want it captured", got)
			}
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
		})
	}
}

// TestLimitOfAHold: a pod with unknown labels is held for provisionalFor, unless something says that it may have opted
// in. The daemon is down.
func TestLimitOfAHold(t *testing.T) {
	t.Parallel()
	const limit = 90 * time.Second
	list := func(namespaces ...string) func(*testing.T, *testbed.Node) {
		return func(t *testing.T, n *testbed.Node) {
			err := attach.NewOptedInFile(n.DataDir()).Write(attach.OptedIn{AsOf: time.Now(), Namespaces: namespaces})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	damaged := func(t *testing.T, n *testbed.Node) {
		list()(t, n)
		file := string(attach.NewOptedInFile(n.DataDir()))
		if err := os.WriteFile(file, []byte(`{"namespaces":[]}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name       string
		list       func(*testing.T, *testbed.Node)
		limit      string
		annotation string
		want       time.Duration
	}{
		{"no namespace has opted in", list(), "90s", "", limit},
		{"another namespace has opted in", list("ci"), "90s", "", limit},
		{"its namespace has opted in", list("ci", "default"), "90s", "", 0},
		{"the policy says that the pod has opted in", list(), "90s", "true", 0},
		{"without a limit", list(), "0s", "", 0},
		{"without a list", func(*testing.T, *testbed.Node) {}, "90s", "", 0},
		{"with a damaged list", damaged, "90s", "", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			tc.list(t, n)
			n.Plugin["provisionalFor"], n.Plugin["optIn"] = tc.limit, "annotation"
			pod := n.NewPod("early")
			if tc.annotation != "" {
				n.Annotated(map[string]string{attach.OptInAnnotation: tc.annotation})(pod)
			}
			if err := pod.Add(); err != nil {
				t.Fatal(testbed.Describe(err))
			}
			records := n.Records()
			if len(records) != 1 || records[0].State != attach.Provisional {
				t.Fatalf("recorded: %s; want it provisional", testbed.JSON(records))
			}
			in := records[0].Installed
			if in.Ruleset.ExpiresAfter != tc.want || in.Expires.IsZero() != (tc.want == 0) {
				t.Errorf("installed: %s; want that it expires after %s", testbed.JSON(in), tc.want)
			}
			if err := pod.Del(); err != nil {
				t.Errorf("DEL: %s", testbed.Describe(err))
			}
			testbed.WantNoTraces(t, n, pod.Host)
		})
	}
}

// TestSecondAddDoesNotHoldLonger: a runtime may call ADD again.
func TestSecondAddDoesNotHoldLonger(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	err := attach.NewOptedInFile(n.DataDir()).Write(attach.OptedIn{AsOf: time.Now(), Namespaces: []string{}})
	if err != nil {
		t.Fatal(err)
	}
	n.Plugin["provisionalFor"] = "1h"
	pod := n.AddPod("early")
	before := n.Records()
	callFor(n, pod).must(t, "ADD")
	after := n.Records()
	if len(before) != 1 || len(after) != 1 || !after[0].Installed.Expires.Equal(before[0].Installed.Expires) {
		t.Errorf("recorded: %s; want the time of the first ADD: %s", testbed.JSON(after), testbed.JSON(before))
	}
}

// TestAddAfterUninstallation: a runtime that has read the network configuration before the uninstallation, or a program
// that brings the entry back, still calls the plugin. No daemon will come to release the pod.
func TestAddAfterUninstallation(t *testing.T) {
	t.Parallel()
	for _, onDaemonDown := range []string{"hold", "fail"} {
		n := testbed.New(t)
		n.Plugin["onDaemonDown"] = onDaemonDown
		serveWeb(n)
		d := n.StartDaemon()
		captured := n.AddPod("captured-" + onDaemonDown)
		testbed.WantCaller(t, captured.Host, testbed.Web, testbed.NodeIPv4)
		mark := attach.UninstalledMark(n.StateDir())
		if err := os.WriteFile(mark, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		pod := n.AddPod("asked-" + onDaemonDown)
		testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4) // the daemon that runs decides
		d.Stop()
		late := n.AddPod("late-" + onDaemonDown)
		testbed.WantCaller(t, late.Host, testbed.Web, late.IPv4)
		if err := late.Del(); err != nil {
			t.Errorf("DEL: %s", testbed.Describe(err))
		}
		testbed.WantNoTraces(t, n, late.Host)
	}
}
