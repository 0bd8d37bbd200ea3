package relay

import (
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestIdleConnectionsHaveTwoDescriptors, their sockets. Pipes are only for those that carry data.
func TestIdleConnectionsHaveTwoDescriptors(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	testbed.StartConnectProxy(n)
	d := n.StartDaemon()
	pod := n.AddPod("idle")
	descriptors := func() int {
		all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.Pid()))
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	testbed.EchoAll(t, 10, 100, pod.Host)
	testbed.Eventually(t, "no connection is left", func() bool { return d.Of(pod).Open == 0 })
	const count = 100
	before := descriptors()
	talks := testbed.StartTalks(t, pod.Host, count, 10_000)
	testbed.WantEchoes(t, talks)
	limit := before + 2*count + 2*runtime.NumCPU() + 4 // pipes that are kept for all, and requests for the status
	testbed.Eventually(t, "idle connections have their two sockets and no pipes", func() bool {
		return descriptors() <= limit
	})
}
