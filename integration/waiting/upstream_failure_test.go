package waiting

import (
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestUpstreamKilledAtEveryStage: connections that it has not answered lose no byte and reach the destination once.
// Those with bytes inside the upstream end with a reset, as they would without sluice.
func TestUpstreamKilledAtEveryStage(t *testing.T) {
	testbed.ForEachBackend(t, func(t *testing.T, n *testbed.Node) {
		seen := testbed.ServeEcho(n)
		proxy := testbed.StartConnectProxy(n)
		d := n.StartDaemon()
		pod := n.AddPod("busy")
		inner := pod.Nested()

		const relayedCount, waitingCount, size = 10, 400, 16 << 10
		relayed := testbed.StartTalks(t, pod.Host, relayedCount, size)
		testbed.WantEchoes(t, relayed)
		proxy.Freeze()
		carried := d.Of(pod).Bytes
		testbed.ForEach(t, len(relayed), func(i int) error { return relayed[i].Send(testbed.RandomBytes(size)) })
		testbed.Eventually(t, "the frozen upstream has bytes of each connection", func() bool {
			return d.Of(pod).Bytes == carried+relayedCount*size
		})
		late := testbed.StartTalks(t, pod.Host, waitingCount/2, size)
		late = append(late, testbed.StartTalks(t, inner, waitingCount/2, size)...)
		testbed.Eventually(t, "connections are at every stage", func() bool {
			s, q := d.Of(pod), pod.Queued()
			return q > 0 && s.Waiting > q && s.Open == relayedCount
		})
		proxy.Kill()
		testbed.WantAllReset(t, relayed)
		testbed.Eventually(t, "the upstream is late", func() bool { return !d.Status().Upstream.Ready })
		testbed.Eventually(t, "all connections without an answer wait", func() bool {
			return d.Of(pod).Waiting == waitingCount
		})
		if got := seen.Load(); got != relayedCount {
			t.Errorf("%d connections have reached the destination, want %d, those relayed", got, relayedCount)
		}
		testbed.StartConnectProxy(n)
		testbed.WantEchoes(t, late)
		if got := seen.Load(); got != relayedCount+waitingCount {
			const all = relayedCount + waitingCount
			t.Errorf("%d connections have reached the destination, want %d, each once", got, all)
		}
		if got := n.SYNs(); got != 0 {
			t.Errorf("%d SYNs left the pod, want none", got)
		}
	})
}

func TestUpstreamKilledWhileConnectionsWait(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	// While it is stopped its backlog takes connections, so the daemon connects and gets no answer.
	proxy := testbed.StartConnectProxy(n)
	testbed.Eventually(t, "the upstream is there", func() bool { return d.Status().Upstream.Ready })
	proxy.Freeze()
	outcome := testbed.Echoes(t, 50, 64<<10, pod.Host)
	testbed.Eventually(t, "all of them wait", func() bool { return d.Of(pod).Waiting == 50 })
	proxy.Kill()
	testbed.Eventually(t, "the upstream is gone", func() bool { return !d.Status().Upstream.Ready })
	testbed.WantPending(t, outcome)
	testbed.StartConnectProxy(n)
	testbed.WantServed(t, outcome, 50)
}
