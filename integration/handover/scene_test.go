package handover

import (
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// relayingNode is a node with an echo service in its world, a proxy, a daemon, and a captured pod.
func relayingNode(t *testing.T) (*testbed.Node, *testbed.Daemon, *testbed.Pod) {
	t.Helper()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	testbed.StartConnectProxy(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	return n, d, pod
}
