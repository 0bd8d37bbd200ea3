package netconf

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/plugin/attach"
)

// FuzzParse: for every input of a runtime, Parse returns an error or a usable configuration, and ParseForRemoval
// accepts at least as much.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		`{}`,
		`{"cniVersion":"1.0.0","name":"pods","type":"sluice",` +
			`"agentSocket":"/s","excludeNamespaces":["a"],"onDaemonDown":"fail"}`,
		`{"cniVersion":"1.0.0","prevResult":{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.5/24"}],"x":1}}`,
		`{"cniVersion":"0.4.0","prevResult":{"cniVersion":"1.0.0","ips":[{"address":"fd00::5/64"}]}}`,
		`{"cniVersion":"1.1.0","prevResult":{},"cni.dev/attachments":[{"containerID":"a","ifname":"eth0"}]}`,
		`{"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"sluice.dev/quic":"allow"}}}`,
		`{"agentSocket":7}`, `{"prevResult":null}`, `null`, `{} {}`, `{"agentSocket":"/a","AgentSocket":"b"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, stdin []byte) {
		forRemoval, ignored, rerr := ParseForRemoval(stdin)
		if rerr == nil && (forRemoval.AgentSocket[0] != '/' || forRemoval.StateDir[0] != '/') {
			t.Errorf("ParseForRemoval took the paths %q and %q", forRemoval.AgentSocket, forRemoval.StateDir)
		}
		c, err := Parse(stdin)
		if err != nil {
			return
		}
		if rerr != nil || c.Validate() == nil && len(ignored) > 0 {
			t.Errorf("Parse accepts it, and ParseForRemoval says %v and %v", ignored, rerr)
		}
		_ = c.Excluded("default")
		for key := range c.Annotations() {
			isSidecar := func(s attach.Sidecar) bool { return s.Annotation == key }
			ofSidecar := slices.ContainsFunc(attach.Sidecars, isSidecar)
			if !strings.HasPrefix(key, attach.AnnotationPrefix) && !ofSidecar {
				t.Errorf("got annotation %q, want the prefix %s or that of a sidecar", key, attach.AnnotationPrefix)
			}
		}
		if c.Validate() != nil {
			return
		}
		for _, path := range []string{c.AgentSocket, c.StateDir} {
			if path == "" || path[0] != '/' {
				t.Errorf("Validate accepted the path %q", path)
			}
		}
		if _, err := c.Result(); err != nil {
			return
		}
		var out bytes.Buffer
		if err := c.PrintResult(&out); err == nil && !json.Valid(out.Bytes()) {
			t.Errorf("PrintResult wrote %q", out.String())
		}
	})
}

// FuzzParseArgs: the names of an accepted pod are allowed in a header.
func FuzzParseArgs(f *testing.F) {
	for _, seed := range []string{
		"", "IgnoreUnknown=1;K8S_POD_NAMESPACE=ci;K8S_POD_NAME=web-0;K8S_POD_UID=7d3f", "K8S_POD_NAME=a\r\nb", "=;=",
		"CommonArgs=1", "IgnoreUnknown=maybe", "K8S_POD_NAME==",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, args string) {
		pod, err := ParseArgs(args)
		if err != nil {
			return
		}
		for _, s := range []string{pod.Namespace, pod.Name, pod.UID} {
			if bytes.ContainsAny([]byte(s), "\r\n\x00 :") {
				t.Errorf("ParseArgs(%q): got %+v", args, pod)
			}
		}
	})
}
