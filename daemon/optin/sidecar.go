package optin

import (
	"fmt"
	"slices"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// noSidecar returns an error if the pod has the sidecar of a service mesh. Its rules and those of sluice would capture
// the same connections: the mesh would see none of them, and with Istio's ports one of the two could not listen.
func noSidecar(c config.Config, facts Facts) error {
	remedy := "its namespace is one of excludeNamespaces"
	if c.Capture.Source == config.Kubernetes {
		remedy = fmt.Sprintf("the pod has the label %s: \"false\"", Label)
	}
	for _, s := range attach.Sidecars {
		sign := ""
		if _, ok := facts.Annotations[s.Annotation]; ok {
			sign = "annotation " + s.Annotation
		}
		if slices.Contains(facts.Containers, s.Container) {
			sign = "container " + s.Container
		}
		if sign != "" {
			return fmt.Errorf("the pod has the sidecar of %s (%s), which captures the same connections: "+
				"keep the sidecar out of the pod, or see to it that %s", s.Mesh, sign, remedy)
		}
	}
	return nil
}
