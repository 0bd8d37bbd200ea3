package waiting

import (
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// late are the annotations for a policy and its timeout.
func late(policy, timeout string) map[string]string {
	return map[string]string{"sluice.dev/when-late": policy, "sluice.dev/late-timeout": timeout}
}

// TestQueueTimeout: connections are reset when they have waited for the timeout of their pod. Those of another pod wait
// on, and are served.
func TestQueueTimeout(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			n.Config["late"] = map[string]any{"policy": "queue", "timeout": "2s"}
			testbed.ServeEcho(n)
			d := n.StartDaemon()
			hasty := n.AddPod("hasty")
			patient := testbed.Flavours[0].AddPod(t, n, "patient", n.Annotated(late("queue", "0s")))
			ends := testbed.Echoes(t, 10, 200, hasty.Host)
			served := testbed.Echoes(t, 10, 200, patient.Host)
			testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(hasty, patient) == 20 })
			for range 10 {
				if err := <-ends; !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("got %v, want a reset", err)
				}
			}
			testbed.Eventually(t, "the log says that they were reset", func() bool {
				return strings.Contains(d.Log(), "connections were reset: they had waited for the upstream")
			})
			testbed.StartUpstream(n)
			testbed.WantServed(t, served, 10)
			testbed.EchoAll(t, 10, 200, hasty.Host)
		})
	}
}

// TestHold: ADD waits for the upstream within its timeout; other pods start meanwhile.
func TestHold(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	d := n.StartDaemon()
	given := n.NewPod("givenup")
	n.Annotated(late("hold", "300ms"))(given)
	testbed.WantCNIError(t, given.Add(), 11, "upstream 127.0.0.1:18080 is late", "after 300ms")
	testbed.WantNoTraces(t, n, given.Host)

	held := n.NewPod("held")
	n.Annotated(late("hold", "0s"))(held)
	added := make(chan error, 1)
	go func() { added <- held.Add() }()
	isHeld := func(a attach.AttachmentStatus) bool { return a.Pod == held.String() }
	testbed.Eventually(t, "the pod is held", func() bool {
		return slices.ContainsFunc(d.Status().Attachments, isHeld)
	})
	n.AddPod("other")
	select {
	case err := <-added:
		t.Fatalf("ADD of a pod that is held returned: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	testbed.StartConnectProxy(n)
	if err := <-added; err != nil {
		t.Fatalf("ADD: %v", testbed.Describe(err))
	}
	t.Cleanup(func() { _ = held.Del() })
	testbed.EchoAll(t, 4, 200, held.Host)
}

// TestUpstreamThatFailsItsProbeIsLate: a mitmproxy that listens and does not serve is late, so connections wait. It is
// there again as soon as it serves.
func TestUpstreamThatFailsItsProbeIsLate(t *testing.T) {
	t.Parallel()
	for _, m := range mitmModes {
		t.Run(m.protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.Config["upstream"] = map[string]any{
				"address": testbed.ProxyAddress, "protocol": m.protocol, "probeInterval": "100ms",
			}
			testbed.ServeEcho(n)
			proxy := testbed.StartMitmdump(n, "--mode", m.mode, "--set", "ignore_hosts=.*")
			d := n.StartDaemon()
			pod := n.AddPod("web")
			testbed.EchoAll(t, 4, 200, pod.Host)
			proxy.Freeze()
			var up attach.UpstreamStatus
			testbed.Eventually(t, "it is late", func() bool {
				up = d.Status().Upstream
				return !up.Ready
			})
			testbed.WantMatch(t, up.Reason, `the upstream accepts connections but fails a probe: .*`)
			outcome := testbed.Echoes(t, 10, 200, pod.Host)
			testbed.Eventually(t, "they wait", func() bool { return d.Of(pod).Waiting == 10 })
			proxy.Signal(syscall.SIGCONT)
			testbed.WantServed(t, outcome, 10)
			if got := d.Status().Upstream; !got.Ready {
				t.Errorf("got %+v, want it ready", got)
			}
		})
	}
}
