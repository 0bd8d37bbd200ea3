package trust

import "github.com/containerd/nri/pkg/api"

// Adjustment brings the files in line with the CA, and returns the additions to a container. Tests and benchmarks that
// stand in for the runtime call it.
func (t *Trust) Adjustment(c *api.Container) *api.ContainerAdjustment {
	t.updateCA()
	return t.adjustment(c)
}
