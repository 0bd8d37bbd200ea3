package cni

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestVersionsThroughTheChain: ADD and DEL with conflists of each version that the other plugins know.
func TestVersionsThroughTheChain(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.CNIVersion = version
			serveWeb(n)
			d := n.StartDaemon()
			pod := n.AddPod("versioned")
			if got := pod.Result.Version(); got != version {
				t.Errorf("the chain's result has version %s", got)
			}
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
			if err := pod.Del(); err != nil {
				t.Errorf("DEL: %s", testbed.Describe(err))
			}
			testbed.WantNoTraces(t, n, pod.Host)
			if s := d.Status(); len(s.Attachments) > 0 {
				t.Errorf("the daemon still has %s", testbed.JSON(s.Attachments))
			}
		})
	}
}

// TestResultIsPrevResult, byte for byte, in every version and with keys that no version has.
func TestResultIsPrevResult(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.StartDaemon()
	for i, version := range []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			pod := n.NewPod(fmt.Sprint("pod", i))
			given := resultOf(version, "10.88.0.200/16", "fd00:88::200/64")
			given["interfaces"] = []map[string]any{
				{"name": "eth0", "sandbox": pod.Path(), "vendor/pciID": "0000:00:1f.6"},
			}
			given["x-vendor"] = map[string]any{"nested": []any{1, "two", nil, 1e21}}
			call := callFor(n, pod).with(func(c *call) {
				c.prevResult, c.conf = given, map[string]any{"cniVersion": version}
			})
			want, err := json.Marshal(given)
			if err != nil {
				t.Fatal(err)
			}
			if got := bytes.TrimSpace(call.must(t, "ADD")); !bytes.Equal(got, want) {
				t.Errorf("got  %s\nwant %s", got, want)
			}
			if !strings.HasPrefix(version, "0.3.") { // these have no CHECK
				call.must(t, "CHECK")
			}
			call.must(t, "DEL")
			testbed.WantNoTraces(t, n, pod.Host)
		})
	}
}

func TestVersionVerb(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	out := (&call{node: n, stdin: []byte(`{"cniVersion":"1.1.0"}`)}).must(t, "VERSION")
	var v struct{ SupportedVersions []string }
	if err := json.Unmarshal(out, &v); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	if got := strings.Join(v.SupportedVersions, " "); got != "0.3.0 0.3.1 0.4.0 1.0.0 1.1.0" {
		t.Errorf("supported versions: %s", got)
	}
}

// TestUnchained: sluice needs a plugin before it in the chain.
func TestUnchained(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.StartDaemon()
	pod := n.NewPod("alone")
	for _, verb := range []string{"ADD", "CHECK"} {
		call := callFor(n, pod).with(func(c *call) { c.prevResult = nil })
		_, err := call.run(t, verb)
		testbed.WantCNIError(t, err, 7, "prevResult", "chained")
	}
	testbed.WantNoTraces(t, n, pod.Host)
}

// TestExcludedNamespaces: their pods are not changed, whichever program is down or file broken.
func TestExcludedNamespaces(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		plugin map[string]any
		pod    string
	}{
		{"by default", nil, "kube-system"},
		{"by name", map[string]any{"excludeNamespaces": []string{"quiet"}}, "quiet"},
		{"not among the included", map[string]any{"includeNamespaces": []string{"ci"}}, "default"},
		{"where ADD would fail", map[string]any{"onDaemonDown": "fail", "stateDir": "/proc/nowhere"}, "sluice-system"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			maps.Copy(n.Plugin, c.plugin)
			n.World.ServeCaller(net.JoinHostPort(testbed.WorldIPv6, "80"))
			pod := n.NewPod("passing").InNamespace(c.pod)
			before := pod.Rules()
			if err := pod.Add(); err != nil {
				t.Fatalf("ADD: %s", testbed.Describe(err))
			}
			if after := pod.Rules(); after != before {
				t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
			}
			testbed.WantNoTraces(t, n, pod.Host)
			testbed.WantCaller(t, pod.Host, net.JoinHostPort(testbed.WorldIPv6, "80"), pod.IPv6)
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK: %s", testbed.Describe(err))
			}
			if err := pod.Del(); err != nil {
				t.Errorf("DEL: %s", testbed.Describe(err))
			}
		})
	}
}
