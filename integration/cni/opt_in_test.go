package cni

import (
	"testing"

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
