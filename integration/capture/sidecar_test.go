package capture

import (
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestSidecar: a pod with the sidecar of a service mesh is refused, by the annotations that the runtime passes on.
func TestSidecar(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.StartDaemon()
	for annotation, mesh := range map[string]string{
		"sidecar.istio.io/status": "Istio", "linkerd.io/proxy-version": "Linkerd",
	} {
		pod := n.NewPod("meshed")
		n.Annotated(map[string]string{annotation: "x", "example.com/other": "y"})(pod)
		testbed.WantCNIError(t, pod.Add(), 100, "the sidecar of "+mesh, annotation, "excludeNamespaces")
		testbed.WantNoTraces(t, n, pod.Host)
	}
}
