package testbed

import "testing"

// ForEachBackend runs a test for each backend, on a node of its own. The cases run in parallel.
func ForEachBackend(t *testing.T, test func(t *testing.T, n *Node)) {
	t.Helper()
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			n := New(t)
			n.Plugin["backend"] = backend
			test(t, n)
		})
	}
}
