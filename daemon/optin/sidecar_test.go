package optin

import (
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/daemon/config"
)

// TestSidecars: a pod that has the sidecar of a mesh is refused, whichever label opts it in. A pod that does not opt in
// is none of sluice's business.
func TestSidecars(t *testing.T) {
	t.Parallel()
	optedIn := NamespaceOf(config.Namespaces{}, map[string]string{Label: "true"})
	on, off := map[string]string{Label: "true"}, map[string]string{Label: "false"}
	istio := map[string]string{"sidecar.istio.io/status": `{"containers":["istio-proxy"]}`}
	linkerd := map[string]string{"linkerd.io/proxy-version": "edge-25.1.1"}
	asked := map[string]string{"sidecar.istio.io/inject": "true", "config.linkerd.io/proxy-version": "x"}
	const label = `see to it that the pod has the label sluice.dev/capture: "false"`
	for _, tc := range []struct {
		name   string
		source config.Source
		facts  Facts
		want   []string // in the error; none: no error
	}{
		{
			"Istio, by the annotation", config.Kubernetes, Facts{Labels: on, Annotations: istio},
			[]string{"the sidecar of Istio (annotation sidecar.istio.io/status)", label},
		},
		{
			"Istio, by the container", config.Kubernetes, Facts{Labels: on, Containers: []string{"app", "istio-proxy"}},
			[]string{"the sidecar of Istio (container istio-proxy)", label},
		},
		{
			"Linkerd, by the annotation, in a labelled namespace", config.Kubernetes,
			Facts{Namespace: optedIn, Annotations: linkerd},
			[]string{"the sidecar of Linkerd (annotation linkerd.io/proxy-version)", label},
		},
		{
			"Linkerd, by the container, in a labelled namespace", config.Kubernetes,
			Facts{Namespace: optedIn, Containers: []string{"linkerd-proxy"}},
			[]string{"the sidecar of Linkerd (container linkerd-proxy)", label},
		},
		{
			"capture.source is all", config.All, Facts{Annotations: istio},
			[]string{"the sidecar of Istio", "see to it that its namespace is one of excludeNamespaces"},
		},
		{"only asked for", config.Kubernetes, Facts{Labels: on, Annotations: asked, Containers: []string{"app"}}, nil},
		{"opted out", config.Kubernetes, Facts{Labels: off, Namespace: optedIn, Annotations: istio}, nil},
		{"not opted in", config.Kubernetes, Facts{Containers: []string{"istio-proxy"}}, nil},
		{"the upstream's pod", config.Kubernetes, Facts{Labels: on, Annotations: istio, Upstream: true}, nil},
	} {
		c := conf()
		c.Capture.Source = tc.source
		d, err := Decide(c, tc.facts, []string{"eth0"})
		if len(tc.want) == 0 {
			if err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue
		}
		for _, want := range tc.want {
			if err == nil || d.Capture || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %+v, %v; want an error with %q", tc.name, d, err, want)
			}
		}
	}
}
