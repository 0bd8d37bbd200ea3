package netconf

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/plugin/attach"
)

func TestParseFillsInDefaults(t *testing.T) {
	t.Parallel()
	for _, stdin := range []string{`{}`, `{"cniVersion":"1.0.0","name":"pods","type":"sluice"}`} {
		c, err := Parse([]byte(stdin))
		if err != nil {
			t.Fatalf("Parse(%s): %v", stdin, err)
		}
		if err := c.Validate(); err != nil {
			t.Errorf("Validate of %s: %v", stdin, err)
		}
		got := map[string]any{
			"agentSocket": c.AgentSocket, "stateDir": c.StateDir, "dataDir": c.DataDir,
			"onDaemonDown": c.OnDaemonDown, "backend": c.Backend,
			"includeNamespaces": c.IncludeNamespaces, "excludeNamespaces": c.ExcludeNamespaces,
		}
		want := map[string]any{
			"agentSocket": "/run/sluice/agent.sock", "stateDir": "/run/sluice", "dataDir": "/var/lib/sluice",
			"onDaemonDown": "hold", "backend": "auto",
			"includeNamespaces": []string(nil), "excludeNamespaces": []string{"kube-system", "sluice-system"},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", stdin, diff)
		}
	}
}

func TestParseTakesEveryKey(t *testing.T) {
	t.Parallel()
	c, err := Parse([]byte(`{
		"cniVersion": "1.1.0", "cniVersions": ["1.0.0", "1.1.0"], "name": "pods", "type": "sluice",
		"args": {"cni": {"ips": []}}, "ipMasq": true, "ipam": {}, "dns": {"nameservers": ["192.0.2.53"]},
		"disableCheck": false, "disableGC": true,
		"loadOnlyInlinedPlugins": true, "capabilities": {"io.kubernetes.cri.pod-annotations": true},
		"cni.dev/attachments": [], "cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}],
		"cni.dev/unknown": 1,
		"runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"sluice.dev/quic": "allow"}, "portMappings": []},
		"agentSocket": "/s", "stateDir": "/d", "dataDir": "/l",
		"includeNamespaces": ["a"], "excludeNamespaces": [],
		"onDaemonDown": "fail", "backend": "nftables", "statusNeedsUpstream": true}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Errorf("Validate: %v", err)
	}
	got := []any{
		c.AgentSocket, c.StateDir, c.DataDir, c.IncludeNamespaces, c.ExcludeNamespaces, c.OnDaemonDown, c.Backend,
		c.StatusNeedsUpstream, c.Name, len(c.ValidAttachments),
	}
	want := []any{"/s", "/d", "/l", []string{"a"}, []string{}, "fail", "nftables", true, "pods", 1}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ stdin, want string }{
		{``, "network configuration is not a JSON object"},
		{`[]`, "network configuration is not a JSON object"},
		{`"sluice"`, "network configuration is not a JSON object"},
		{`{"name":`, "network configuration is not a JSON object"},
		{`{"name":"pods"}}`, "trailing data after the JSON object"},
		{`{"name":"pods"}{}`, "trailing data after the JSON object"},
		{`{"name":"pods"} x`, "trailing data after the JSON object"},
		{`{"agentSocket": 7}`, "agentSocket: 7 is not a string"},
		{`{"stateDir": ["/run"]}`, `stateDir: ["/run"] is not a string`},
		{`{"backend": {"a": 1}}`, `backend: {"a":1} is not a string`},
		{`{"onDaemonDown": true}`, "onDaemonDown: true is not a string"},
		{`{"statusNeedsUpstream": "yes"}`, "statusNeedsUpstream: \"yes\" is not a bool"},
		{`{"excludeNamespaces": "kube-system"}`, `excludeNamespaces: "kube-system" is not a list of strings`},
		{`{"includeNamespaces": {}}`, "includeNamespaces: {} is not a list of strings"},
		{`{"includeNamespaces": ["a", 1]}`, "includeNamespaces"},
		{`{"name": 1}`, "name: 1 is not a string"},
		{`{"runtimeConfig": 1}`, "runtimeConfig: 1 is not a JSON object"},
		{`{"runtimeConfig": {"io.kubernetes.cri.pod-annotations": []}}`, "runtimeConfig"},
		{`{"agentSocket": [` + strings.Repeat("1,", 100) + `1]}`, "agentSocket: its value is not a string"},
		{`{"cniVersion": "1.0.0", "prevResult": "x"}`, "prevResult"},
		{`{"cniVersion": "1.0.0", "prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "x"}]}}`, "prevResult"},
		{`{"cniVersion": "9.9.9", "prevResult": {}}`, "prevResult"},
	} {
		_, err := Parse([]byte(tc.stdin))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("Parse(%s): got %v, want an error with %q", tc.stdin, err, tc.want)
		}
	}
}

func TestParseForRemoval(t *testing.T) {
	t.Parallel()
	const defaultSocket, defaultDir = attach.DefaultSocket, attach.DefaultStateDir
	for _, tc := range []struct {
		stdin, socket, dir string
		ignored            []string // a part of each
	}{
		{`{}`, defaultSocket, defaultDir, nil},
		{`{"agentSocket": "/s", "stateDir": "/d"}`, "/s", "/d", nil},
		{`{"agentSocket": 7, "stateDir": "/d"}`, defaultSocket, "/d", []string{"agentSocket: 7 is not a string"}},
		{`{"agentSocket": "/s", "stateDir": ["/d"]}`, "/s", defaultDir, []string{`stateDir: ["/d"] is not a string`}},
		{`{"agentSocket": "s", "stateDir": ""}`, defaultSocket, defaultDir, []string{
			`agentSocket: "s" is not an absolute path`, `stateDir: "" is not an absolute path`,
		}},
		{`{"stateDir": "/d", "excludeNamespaces": "x", "backend": 7}`, defaultSocket, "/d", []string{
			"backend: 7 is not a string", `excludeNamespaces: "x" is not a list of strings`,
		}},
		{`{"cniVersion": "1.0.0", "prevResult": "x"}`, defaultSocket, defaultDir, nil},
		{`{"typo": 1, "onDaemonDown": "pray"}`, defaultSocket, defaultDir, nil},
	} {
		c, ignored, err := ParseForRemoval([]byte(tc.stdin))
		if err != nil {
			t.Errorf("%s: %v", tc.stdin, err)
			continue
		}
		if c.AgentSocket != tc.socket || c.StateDir != tc.dir || len(ignored) != len(tc.ignored) {
			t.Errorf("%s: got %q and %q, ignored %v; want %q and %q, ignored %q",
				tc.stdin, c.AgentSocket, c.StateDir, ignored, tc.socket, tc.dir, tc.ignored)
			continue
		}
		for i, want := range tc.ignored {
			if !strings.Contains(ignored[i].Error(), want) {
				t.Errorf("%s: ignored %v, want %q", tc.stdin, ignored[i], want)
			}
		}
	}
	if _, _, err := ParseForRemoval([]byte(`{"stateDir": 7}`), "stateDir"); err == nil {
		t.Error("a needed key of another type: got no error")
	}
	for _, stdin := range []string{``, `[]`, `{"name":`, `{} x`} {
		if _, _, err := ParseForRemoval([]byte(stdin)); err == nil {
			t.Errorf("%s: got no error", stdin)
		}
	}
}

// TestValidateErrors: each error names the key and the value. Parse accepts all of these.
func TestValidateErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ stdin, want string }{
		{`{"agentsocket": "/s"}`, `unknown key "agentsocket"`},
		{`{"typo": 1}`, `unknown key "typo"; the keys of a sluice entry are agentSocket, stateDir, dataDir, ` +
			`includeNamespaces, excludeNamespaces, onDaemonDown, optIn, provisionalFor, backend, statusNeedsUpstream`},
		{`{"zzz": 1, "aaa": 1}`, `unknown key "aaa"`},
		{`{"cni.dev": 1}`, `unknown key "cni.dev"`},
		{`{"agentSocket": ""}`, `agentSocket: "" is not an absolute path`},
		{`{"agentSocket": "run/agent.sock"}`, `agentSocket: "run/agent.sock" is not an absolute path`},
		{`{"dataDir": "data"}`, `dataDir: "data" is not an absolute path`},
		{`{"stateDir": "."}`, `stateDir: "." is not an absolute path`},
		{`{"onDaemonDown": "queue"}`, `onDaemonDown: "queue" is not one of hold, fail`},
		{`{"provisionalFor": "2"}`, `provisionalFor: "2" is not a duration`},
		{`{"provisionalFor": "-1s"}`, `provisionalFor: "-1s" is not a duration`},
		{`{"provisionalFor": ""}`, `provisionalFor: "" is not a duration`},
		{`{"optIn": "label"}`, `optIn: "label" is not one of daemon, annotation`},
		{`{"onDaemonDown": ""}`, `onDaemonDown: "" is not one of hold, fail`},
		{`{"backend": "ipvs"}`, `backend: "ipvs" is not one of auto, iptables, nftables`},
		{`{"backend": "iptables-nft"}`, `backend: "iptables-nft" is not one of`},
		{`{"includeNamespaces": [""]}`, `includeNamespaces: "" is not a namespace`},
		{`{"excludeNamespaces": ["ok", "a b"]}`, `excludeNamespaces: "a b" is not a namespace`},
		{`{"excludeNamespaces": ["a/b"]}`, `excludeNamespaces: "a/b" is not a namespace`},
	} {
		c, err := Parse([]byte(tc.stdin))
		if err != nil {
			t.Errorf("Parse(%s): %v", tc.stdin, err)
			continue
		}
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("Validate of %s: got %v, want an error with %q", tc.stdin, err, tc.want)
		}
	}
}

func TestExcluded(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name             string
		include, exclude []string
		namespace        string
		want             bool
	}{
		{name: "no lists", namespace: "default", want: false},
		{name: "excluded", exclude: []string{"kube-system", "ci"}, namespace: "ci", want: true},
		{name: "not excluded", exclude: []string{"kube-system"}, namespace: "ci", want: false},
		{name: "included", include: []string{"ci"}, namespace: "ci", want: false},
		{name: "not included", include: []string{"ci"}, namespace: "default", want: true},
		{name: "both", include: []string{"ci"}, exclude: []string{"ci"}, namespace: "ci", want: true},
		{name: "no namespace, no lists", namespace: "", want: false},
		{name: "no namespace, but some are included", include: []string{"ci"}, namespace: "", want: true},
		{name: "a prefix is no match", exclude: []string{"ci"}, namespace: "ci-2", want: false},
	} {
		c := &Conf{IncludeNamespaces: tc.include, ExcludeNamespaces: tc.exclude}
		if got := c.Excluded(tc.namespace); got != tc.want {
			t.Errorf("%s: got %t, want %t", tc.name, got, tc.want)
		}
	}
}

func TestAnnotations(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		stdin string
		want  map[string]string
	}{
		{`{}`, nil},
		{`{"runtimeConfig":{}}`, nil},
		{`{"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"a":"b"}}}`, map[string]string{}},
		{
			`{"runtimeConfig":{"io.kubernetes.cri.pod-annotations":` +
				`{"a":"b","sluice.dev/quic":"allow","sluice.dev":"x","xsluice.dev/quic":"y"}}}`,
			map[string]string{"sluice.dev/quic": "allow"},
		},
		{
			`{"runtimeConfig":{"io.kubernetes.cri.pod-annotations":` +
				`{"sidecar.istio.io/status":"{}","sidecar.istio.io/inject":"true","linkerd.io/proxy-version":"1"}}}`,
			map[string]string{"sidecar.istio.io/status": "{}", "linkerd.io/proxy-version": "1"},
		},
	} {
		c, err := Parse([]byte(tc.stdin))
		if err != nil {
			t.Fatalf("Parse(%s): %v", tc.stdin, err)
		}
		all := len(c.RuntimeConfig.PodAnnotations)
		if diff := cmp.Diff(tc.want, c.Annotations()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.stdin, diff)
		}
		if got := len(c.RuntimeConfig.PodAnnotations); got != all {
			t.Errorf("%s: got %d annotations in the configuration after Annotations, want all %d", tc.stdin, got, all)
		}
	}
}

func TestParseArgs(t *testing.T) {
	t.Parallel()
	web := attach.Pod{Namespace: "ci", Name: "web-0", UID: "7d3f"}
	for _, tc := range []struct {
		args    string
		want    attach.Pod
		wantErr string
	}{
		{args: ""},
		{args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=ci;K8S_POD_NAME=web-0;K8S_POD_UID=7d3f", want: web},
		{args: "K8S_POD_UID=7d3f;K8S_POD_NAME=web-0;K8S_POD_NAMESPACE=ci", want: web},
		{args: "K8S_POD_INFRA_CONTAINER_ID=4f2a;K8S_POD_NAMESPACE=ci", want: attach.Pod{Namespace: "ci"}},
		{args: "FOO=BAR"},
		{args: "IgnoreUnknown=0;FOO=BAR", wantErr: "FOO"},
		{args: "K8S_POD_NAMESPACE", wantErr: `CNI_ARGS "K8S_POD_NAMESPACE"`},
		{args: "K8S_POD_NAME=a=b", wantErr: "CNI_ARGS"},
		{args: ";", wantErr: "CNI_ARGS"},
		{args: "K8S_POD_NAME=a\r\nX-Evil: 1", wantErr: `pod name "a\r\nX-Evil: 1"`},
		{args: "K8S_POD_NAMESPACE=a b", wantErr: `pod namespace "a b"`},
		{args: "K8S_POD_UID=" + strings.Repeat("x", 254), wantErr: "pod UID"},
	} {
		got, err := ParseArgs(tc.args)
		switch {
		case tc.wantErr == "" && err != nil,
			tc.wantErr != "" && (err == nil || !strings.Contains(err.Error(), tc.wantErr)):
			t.Errorf("ParseArgs(%q): got error %v, want %q", tc.args, err, tc.wantErr)
		case got != tc.want:
			t.Errorf("ParseArgs(%q): got %+v, want %+v", tc.args, got, tc.want)
		}
	}
}
