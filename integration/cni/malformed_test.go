package cni

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// refusing is a node with a daemon, and a pod's netns that must not change.
type refusing struct {
	node   *testbed.Node
	daemon *testbed.Daemon
	pod    *testbed.Pod
	before string
}

func newRefusing(t *testing.T) *refusing {
	t.Helper()
	n := testbed.New(t)
	r := &refusing{node: n, daemon: n.StartDaemon(), pod: n.NewPod("untouched")}
	r.pod.Exec("iptables", "-A", "INPUT", "-i", "lo", "-j", "ACCEPT") // a rule of the pod's own
	r.before = r.pod.Rules()
	return r
}

// wantUntouched fails the test if the attempt has left any trace.
func (r *refusing) wantUntouched(t *testing.T) {
	t.Helper()
	if after := r.pod.Rules(); after != r.before {
		t.Errorf("rules before:\n%s\nafter:\n%s", r.before, after)
	}
	testbed.WantNoTraces(t, r.node, r.pod.Host)
	if s := r.daemon.Status(); len(s.Attachments) > 0 {
		t.Errorf("the daemon has %s", testbed.JSON(s.Attachments))
	}
}

func TestMalformedNetworkConfiguration(t *testing.T) {
	t.Parallel()
	r := newRefusing(t)
	valid := callFor(r.node, r.pod)
	for _, c := range []struct {
		name  string
		stdin string         // the whole configuration, or else
		conf  map[string]any // keys beside the valid ones
		code  uint
		names string
	}{
		{name: "nothing", stdin: " ", code: 6},
		{name: "no JSON", stdin: `{"cniVersion": "1.0.0", "name": "pods", "type": "sluice", `, code: 6},
		{name: "no object", stdin: `["sluice"]`, code: 6},
		{name: "more than an object", stdin: string(valid.input(t)) + "{}", code: 6},
		{
			name: "unknown key", conf: map[string]any{"agentSokcet": "/run/x"},
			code: 7, names: `agentSokcet.*agentSocket`,
		},
		{name: "unknown version", conf: map[string]any{"cniVersion": "9.9.9"}, code: 1, names: "9.9.9"},
		{
			name: "relative socket", conf: map[string]any{"agentSocket": "agent.sock"},
			code: 7, names: `agentSocket.*"agent.sock"`,
		},
		{name: "empty state directory", conf: map[string]any{"stateDir": ""}, code: 7, names: `stateDir.*""`},
		{name: "socket of another type", conf: map[string]any{"agentSocket": 7}, code: 6, names: "agentSocket.*7"},
		{name: "bad policy", conf: map[string]any{"onDaemonDown": "pray"}, code: 7, names: `onDaemonDown.*"pray"`},
		{name: "bad backend", conf: map[string]any{"backend": "ipchains"}, code: 7, names: `backend.*"ipchains"`},
		{
			name: "backend that only records have", conf: map[string]any{"backend": "iptables-nft"},
			code: 7, names: `backend.*"iptables-nft"`,
		},
		{
			name: "namespaces not in a list", conf: map[string]any{"excludeNamespaces": "kube-system"},
			code: 6, names: `excludeNamespaces.*"kube-system"`,
		},
		{
			name: "bad namespace", conf: map[string]any{"includeNamespaces": []string{"ci", "a/b"}},
			code: 7, names: `includeNamespaces.*"a/b"`,
		},
		{
			name: "empty namespace", conf: map[string]any{"excludeNamespaces": []string{""}},
			code: 7, names: `excludeNamespaces.*""`,
		},
		{name: "bad prevResult", conf: map[string]any{"prevResult": "10.0.0.1"}, code: 6, names: "prevResult"},
		{
			name: "bad address in prevResult", conf: map[string]any{"prevResult": resultOf("1.0.0", "10.0.0.300/24")},
			code: 6, names: "prevResult.*10.0.0.300",
		},
		{
			name: "bad annotations", conf: map[string]any{
				"runtimeConfig": map[string]any{"io.kubernetes.cri.pod-annotations": []string{"x"}},
			},
			code: 6, names: "runtimeConfig",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			call := valid.with(func(x *call) {
				x.conf = c.conf
				if c.stdin != "" {
					x.stdin = []byte(c.stdin)
				}
				if c.conf["prevResult"] != nil {
					x.prevResult = nil
				}
			})
			_, err := call.run(t, "ADD")
			testbed.WantCNIError(t, err, c.code)
			testbed.WantErrorLike(t, err, c.names)
			r.wantUntouched(t)
		})
	}
}

// wronglyTyped are keys of the entry with a value of another type. ADD and CHECK name the key and the value.
var wronglyTyped = map[string]any{
	"includeNamespaces": "ci", "excludeNamespaces": "x", "onDaemonDown": true, "backend": 7,
	"statusNeedsUpstream": "yes", "capabilities": []string{"x"}, "ipam": "host-local", "dns": 1,
	"prevResult":    "10.0.0.1",
	"runtimeConfig": map[string]any{"io.kubernetes.cri.pod-annotations": []string{"x"}},
}

// TestDelIgnoresWronglyTypedKeys: it does not need them, and a pod whose DEL fails stays Terminating. ADD and CHECK
// refuse them.
func TestDelIgnoresWronglyTypedKeys(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	d := n.StartDaemon()
	pod := n.NewPod("typed")
	valid := callFor(n, pod)
	for key, value := range wronglyTyped {
		t.Run(key, func(t *testing.T) {
			valid.must(t, "ADD")
			wrong := valid.with(func(c *call) {
				c.conf = map[string]any{key: value}
				if key == "prevResult" {
					c.prevResult = nil
				}
			})
			for _, verb := range []string{"ADD", "CHECK"} {
				_, err := wrong.run(t, verb)
				testbed.WantCNIError(t, err, 6, key)
			}
			wrong.must(t, "DEL")
			testbed.WantNoTraces(t, n, pod.Host)
			if s := d.Status(); len(s.Attachments) > 0 {
				t.Errorf("the daemon still has %s", testbed.JSON(s.Attachments))
			}
		})
	}
}

// TestDelFallsBackToDefaultPaths if it cannot read those of the entry. Here nothing is at the defaults.
func TestDelFallsBackToDefaultPaths(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	pod := n.NewPod("typed")
	for key, value := range map[string]any{"agentSocket": 7, "stateDir": []string{"/run/sluice"}} {
		// Other tests may run where the defaults are in use.
		const nothingThere = "mount -t tmpfs none /run"
		wrong := callFor(n, pod).with(func(c *call) { c.conf = map[string]any{key: value} })
		_, err := wrong.run(t, "ADD")
		testbed.WantCNIError(t, err, 6, key)
		wrong.netns, wrong.setup = "", nothingThere
		wrong.must(t, "DEL")
	}
}

// TestGCIgnoresWronglyTypedKeys, except for the list of valid attachments: without it GC would delete them all.
func TestGCIgnoresWronglyTypedKeys(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.StartDaemon()
	valid, stale := n.AddPod("valid"), n.AddPod("stale")
	gc := callFor(n, valid).with(func(c *call) {
		c.containerID, c.netns, c.ifName, c.args, c.prevResult = "", "", "", "", nil
		c.conf = map[string]any{"cniVersion": "1.1.0"}
		maps.Copy(c.conf, wronglyTyped)
	})
	const list = "cni.dev/valid-attachments"
	for _, wrong := range []any{"all", []any{map[string]any{"containerID": 7}}} {
		gc.conf[list] = wrong
		_, err := gc.run(t, "GC")
		testbed.WantCNIError(t, err, 6, list)
		if got := len(n.Records()); got != 2 {
			t.Fatalf("%d records are left, want both", got)
		}
	}
	gc.conf[list] = []map[string]string{{"containerID": valid.ID, "ifname": "eth0"}}
	gc.must(t, "GC")
	if r := n.Records(); len(r) != 1 || r[0].ContainerID != valid.ID {
		t.Errorf("left on disk: %s", testbed.JSON(r))
	}
	testbed.WantNoTraces(t, n, stale.Host)
}

func TestMalformedArgs(t *testing.T) {
	t.Parallel()
	r := newRefusing(t)
	for _, c := range []struct {
		name   string
		change func(*call)
		names  string
	}{
		{"no pairs", func(c *call) { c.args = "K8S_POD_NAME" }, "K8S_POD_NAME"},
		{
			"a header's end in a name",
			func(c *call) { c.args = "K8S_POD_NAME=x\r\nSluice-Pod-Namespace: kube-system" },
			"name.*Sluice-Pod-Namespace",
		},
		{"a path as a namespace", func(c *call) { c.args = "K8S_POD_NAMESPACE=../../etc" }, `namespace.*\.\./\.\./etc`},
		{"a space in a UID", func(c *call) { c.args = "K8S_POD_UID=a b" }, "UID.*a b"},
		{"a name without an end", func(c *call) { c.args = "K8S_POD_NAME=" + strings.Repeat("x", 300) }, "name.*xxx"},
		{
			"a path as a container ID", func(c *call) { c.containerID = "../../../tmp/x" },
			`\.\./\.\./\.\./tmp/x|container`,
		},
		{"no container ID", func(c *call) { c.containerID = "" }, "CNI_CONTAINERID"},
		{"a wildcard as an interface", func(c *call) { c.ifName = "eth+" }, `"eth\+"`},
		{"a path as an interface", func(c *call) { c.ifName = "../eth0" }, "interface name contains /"},
		{"no netns", func(c *call) { c.netns = "" }, "CNI_NETNS"},
		{"a netns that is not there", func(c *call) { c.netns += "-not" }, "-not"},
		{"a netns that is a file", func(c *call) { c.netns = c.node.Binary("sluice") }, "netns|network namespace|NS"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := callFor(r.node, r.pod).with(c.change).run(t, "ADD")
			testbed.WantErrorLike(t, err, c.names)
			r.wantUntouched(t)
		})
	}
}

func TestMalformedAnnotations(t *testing.T) {
	t.Parallel()
	r := newRefusing(t)
	n := r.node
	for key, values := range map[string][]string{
		"include-outbound-ports": {"http", "0", "70000", "90-80", "80;443", "-", "80,,443"},
		"exclude-outbound-ports": {"1-2-3", "80 443"},
		"include-outbound-cidrs": {"10.0.0.0/33", "10.1.2.3/8", "example.com", "::ffff:10.0.0.0/104", "fe80::1%eth0"},
		"exclude-outbound-cidrs": {"*", "10.0.0.0/8 fd00::/8", "0.0.0.0/0\n-A OUTPUT -j ACCEPT"},
		"exclude-interfaces":     {"eth+", "a b", "../x", "sixteen-letters-", "lo\nCOMMIT"},
		"quic":                   {"maybe", ""},
		"when-late":              {"never", "Direct"},
		"late-timeout":           {"soon", "-1s", "10"},
		"capture-inbound-ports":  {"*", "8080 8081"},
		"exclude-outbound-port":  {"80"},
		"":                       {"x"},
	} {
		for _, value := range values {
			t.Run(fmt.Sprintf("%s=%q", key, value), func(t *testing.T) {
				n.Annotated(map[string]string{"sluice.dev/" + key: value})(r.pod)
				err := r.pod.Add()
				testbed.WantCNIError(t, err, 100, "sluice.dev/"+key)
				if key != "" && key != "exclude-outbound-port" {
					testbed.WantCNIError(t, err, 100, fmt.Sprintf("%q", value))
				}
				if err := r.pod.Del(); err != nil {
					t.Errorf("DEL: %s", testbed.Describe(err))
				}
				r.wantUntouched(t)
			})
		}
	}
}

// TestAnnotationsThatAreNotAllowed: the configuration says which annotations a pod may have.
func TestAnnotationsThatAreNotAllowed(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.Config["capture"].(map[string]any)["annotations"] = map[string]any{
		"exclude-outbound-ports": []any{5432, "8000-8999"},
	}
	r := &refusing{node: n, daemon: n.StartDaemon(), pod: n.NewPod("untouched")}
	r.before = r.pod.Rules()
	for key, value := range map[string]string{"exclude-outbound-ports": "8080, 80", "when-late": "direct"} {
		n.Annotated(map[string]string{"sluice.dev/" + key: value})(r.pod)
		err := r.pod.Add()
		testbed.WantCNIError(t, err, 100, "sluice.dev/"+key)
		testbed.WantCNIError(t, err, 100, "the configuration (capture.annotations) does not allow")
		if err := r.pod.Del(); err != nil {
			t.Errorf("DEL: %s", testbed.Describe(err))
		}
		r.wantUntouched(t)
	}
	n.Annotated(map[string]string{"sluice.dev/exclude-outbound-ports": "8080"})(r.pod)
	if err := r.pod.Add(); err != nil {
		t.Fatal(testbed.Describe(err))
	}
	if rules := r.pod.Rules(); !strings.Contains(rules, "8080") {
		t.Errorf("the port is not excluded:\n%s", rules)
	}
}

func TestMalformedRequests(t *testing.T) {
	t.Parallel()
	r := newRefusing(t)
	good := attach.Attachment{
		ID: attach.ID{ContainerID: r.pod.ID, IfName: "eth0"}, Network: "pods", Netns: r.pod.Path(),
		Pod: attach.Pod{Namespace: "default", Name: "x", UID: "y"},
	}
	with := func(change func(*attach.Attachment)) string {
		a := good
		change(&a)
		data, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	const attachments = attach.PathAttachments
	for _, c := range []struct {
		name, method, path, body string
		code                     int
		names                    string
	}{
		{"no body", "POST", attachments, "", 422, "not an attachment"},
		{"no JSON", "POST", attachments, "{", 422, "not an attachment"},
		{"unknown field", "POST", attachments, `{"netns": "/x", "uid": 0}`, 422, "uid"},
		{"another type", "POST", attachments, `{"netns": ["a"]}`, 422, "netns"},
		{
			"too large", "POST", attachments, `{"network": "` + strings.Repeat("x", attach.MaxRequest) + `"}`,
			422, "too large",
		},
		{"no netns", "POST", attachments, with(func(a *attach.Attachment) { a.Netns = "" }), 422, "netns"},
		{
			"a netns that is not there", "POST", attachments, with(func(a *attach.Attachment) { a.Netns += "-not" }),
			422, "-not",
		},
		{
			"a netns that is a file", "POST", attachments,
			with(func(a *attach.Attachment) { a.Netns = r.node.Binary("sluice") }),
			422, "netns",
		},
		{
			"the node's own netns", "POST", attachments,
			with(func(a *attach.Attachment) { a.Netns = r.node.Path() }),
			422, "node's own network namespace",
		},
		{
			"a path as a container ID", "POST", attachments,
			with(func(a *attach.Attachment) { a.ContainerID = "../x" }),
			422, `\.\./x`,
		},
		{
			"a wildcard as an interface", "POST", attachments, with(func(a *attach.Attachment) { a.IfName = "eth+" }),
			422, `eth\+`,
		},
		{
			"a header's end in a name", "POST", attachments, with(func(a *attach.Attachment) { a.Pod.Name = "x\r\ny" }),
			422, "name",
		},
		{
			"a bad annotation", "POST", attachments,
			with(func(a *attach.Attachment) { a.Annotations = map[string]string{"sluice.dev/quic": "?"} }),
			422, "quic.*\\?",
		},
		{"an interface to detach", "DELETE", attachments + "/x/eth+", "", 422, `eth\+`},
		{"a path to detach", "DELETE", attachments + "/..%2Fx/eth0", "", 422, `\.\./x`},
		{"nothing to detach", "DELETE", attachments, "", http.StatusMethodNotAllowed, ""},
		{"another method", "PUT", attachments, "{}", http.StatusMethodNotAllowed, ""},
		{"another path", "GET", "/v2/status", "", http.StatusNotFound, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, err := dialAs(r.node.AgentSocket(), 0)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close() //nolint:errcheck // asked once
			const format = "%s %s HTTP/1.1\r\nHost: sluiced\r\nContent-Length: %d\r\n\r\n%s"
			request := fmt.Sprintf(format, c.method, c.path, len(c.body), c.body)
			resp, err := testbed.RoundTrip(t.Context(), conn, request)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close() //nolint:errcheck // read below
			if resp.StatusCode != c.code {
				t.Errorf("got %s, want %d", resp.Status, c.code)
			}
			var said attach.RefusedError
			if c.code == 422 {
				if err := json.NewDecoder(resp.Body).Decode(&said); err != nil || !said.Final {
					t.Errorf("the answer is %+v, %v; want a final refusal", said, err)
				}
			}
			testbed.WantMatch(t, said.Message, c.names)
			r.wantUntouched(t)
		})
	}
	t.Run("no HTTP", func(t *testing.T) {
		conn, err := dialAs(r.node.AgentSocket(), 0)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close() //nolint:errcheck // asked once
		resp, err := testbed.RoundTrip(t.Context(), conn, "\x16\x03\x01 what is this?\r\n\r\n")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close() //nolint:errcheck // not read
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("got %s, want 400", resp.Status)
		}
		r.wantUntouched(t)
	})
}
