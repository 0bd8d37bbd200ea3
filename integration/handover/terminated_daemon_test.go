package handover

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestTerminatedDaemonEndsUnderLoad: the plugin attaches and detaches pods all the time, and the daemon ends as soon as
// it is told to. No gate is left that would accept connections for nobody.
func TestTerminatedDaemonEndsUnderLoad(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.StartConnectProxy(n)
	const pods = 8
	var hosts []*testbed.Host
	for i := range pods {
		hosts = append(hosts, testbed.NewHost(t, fmt.Sprintf("pod%d", i)))
	}
	for range 10 {
		d := n.StartDaemon()
		ctx, stop := context.WithCancel(testbed.Context(t))
		var calls atomic.Int64
		var load sync.WaitGroup
		for i, h := range hosts {
			load.Go(func() {
				client := attach.NewClient(n.AgentSocket())
				at := attach.Attachment{
					ID: attach.ID{ContainerID: h.Name, IfName: "eth0"}, Network: "pods", Netns: h.Path(),
					Pod: attach.Pod{Namespace: "default", Name: fmt.Sprintf("pod%d", i)},
					IPs: []netip.Addr{netip.MustParseAddr("10.88.0.7")},
				}
				for ctx.Err() == nil && !d.Ended() {
					_, err := client.Attach(ctx, at)
					if err == nil {
						err = client.Detach(ctx, at.ID)
					}
					var refused *attach.RefusedError
					if errors.As(err, &refused) {
						t.Errorf("the daemon refused: %v", err)
						return
					}
					calls.Add(1)
				}
			})
		}
		testbed.Eventually(t, "the load is on", func() bool { return calls.Load() > 10*pods })
		d.Stop()
		stop()
		load.Wait()
	}
	for _, h := range hosts {
		if out := h.Exec("ss", "-Hlnt", "sport = :15001"); out != "" {
			t.Errorf("a listener is left in %s: %s", h.Name, out)
		}
	}
}
