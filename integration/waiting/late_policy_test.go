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

// late are annotations.
func late(policy, timeout string) map[string]string {
	return map[string]string{"sluice.dev/when-late": policy, "sluice.dev/late-timeout": timeout}
}

// TestQueueTimeout: connections are reset when they have waited for longer than the timeout of their pod; those of another
// wait on, and are served.
func TestQueueTimeout(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			n.Config["late"] = map[string]any{"policy": "queue", "timeout": "2s"}
			n.ServeEcho()
			d := n.StartDaemon()
			hasty := n.AddPod("hasty")
			patient := testbed.Flavours[0].AddPod(t, n, "patient", n.Annotated(late("queue", "0s")))
			ends, served := testbed.Echoes(testbed.Context(t), 10, testbed.RandomBytes(200), hasty.Host), testbed.Echoes(testbed.Context(t), 10, testbed.RandomBytes(200), patient.Host)
			testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(hasty, patient) == 20 })
			for range 10 {
				if err := <-ends; !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("got %v, want a reset", err)
				}
			}
			testbed.Eventually(t, "the log says so", func() bool {
				return strings.Contains(d.Log(), "connections were reset: they had waited for the upstream")
			})
			n.StartUpstream()
			testbed.WantServed(t, served, 10)
			testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 10, testbed.RandomBytes(200), hasty.Host), 10)
		})
	}
}

// TestHold: ADD waits for the upstream, and for no longer than it may; other pods start meanwhile.
func TestHold(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.ServeEcho()
	d := n.StartDaemon()
	given := n.NewPod("givenup")
	n.Annotated(late("hold", "300ms"))(given)
	testbed.WantCNIError(t, given.Add(), 11, "upstream 127.0.0.1:18080 is late", "after 300ms")
	testbed.WantNoTraces(t, n, given.Host)

	held := n.NewPod("held")
	n.Annotated(late("hold", "0s"))(held)
	added := make(chan error, 1)
	go func() { added <- held.Add() }()
	testbed.Eventually(t, "the pod is held", func() bool {
		return slices.ContainsFunc(d.Status().Attachments, func(a attach.AttachmentStatus) bool { return a.Pod == held.String() })
	})
	n.AddPod("other")
	select {
	case err := <-added:
		t.Fatalf("ADD of a pod that is held returned: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	n.StartConnectProxy()
	if err := <-added; err != nil {
		t.Fatalf("ADD: %v", testbed.Describe(err))
	}
	t.Cleanup(func() { _ = held.Del() })
	testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 4, testbed.RandomBytes(200), held.Host), 4)
}

// TestProbe: a mitmproxy that listens and does not serve is late, so what is to happen then happens, and it is there again as
// soon as it serves.
func TestProbe(t *testing.T) {
	t.Parallel()
	for _, m := range mitmModes {
		t.Run(m.protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.Config["upstream"] = map[string]any{"address": testbed.ProxyAddress, "protocol": m.protocol, "probeInterval": "100ms"}
			n.ServeEcho()
			proxy := n.StartMitmdump("--mode", m.mode, "--set", "ignore_hosts=.*")
			d := n.StartDaemon()
			pod := n.AddPod("web")
			testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 4, testbed.RandomBytes(200), pod.Host), 4)
			proxy.Freeze()
			var up attach.UpstreamStatus
			testbed.Eventually(t, "it is late", func() bool {
				up = d.Status().Upstream
				return !up.Ready
			})
			testbed.WantMatch(t, up.Reason, `it takes connections, and fails a probe: .*`)
			outcome := testbed.Echoes(testbed.Context(t), 10, testbed.RandomBytes(200), pod.Host)
			testbed.Eventually(t, "they wait", func() bool { return d.Of(pod).Waiting == 10 })
			proxy.Signal(syscall.SIGCONT)
			testbed.WantServed(t, outcome, 10)
			if got := d.Status().Upstream; !got.Ready {
				t.Errorf("got %+v, want it ready", got)
			}
		})
	}
}
