package integration

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
			n, start := newNodeFor(t, protocol)
			n.Config["late"] = map[string]any{"policy": "queue", "timeout": "2s"}
			echoWorld(n)
			d := n.StartDaemon()
			hasty := n.AddPod("hasty")
			patient := flavours[0].addPod(t, n, "patient", annotated(n, late("queue", "0s")))
			ends, served := clients(patience(t), 10, random(200), hasty.Host), clients(patience(t), 10, random(200), patient.Host)
			testbed.Eventually(t, "all of them wait", func() bool { return waiting(d, hasty, patient) == 20 })
			for range 10 {
				if err := <-ends; !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("got %v, want a reset", err)
				}
			}
			testbed.Eventually(t, "the log says so", func() bool {
				return strings.Contains(d.Log(), "connections were reset: they had waited for the upstream")
			})
			start()
			allWell(t, served, 10)
			allWell(t, clients(patience(t), 10, random(200), hasty.Host), 10)
		})
	}
}

// TestHold: ADD waits for the upstream, and for no longer than it may; other pods start meanwhile.
func TestHold(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	d := n.StartDaemon()
	given := n.NewPod("givenup")
	annotated(n, late("hold", "300ms"))(given)
	wantError(t, given.Add(), 11, "upstream 127.0.0.1:18080 is late", "after 300ms")
	wantNoTraces(t, n, given.Host)

	held := n.NewPod("held")
	annotated(n, late("hold", "0s"))(held)
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
	startConnectProxy(n)
	if err := <-added; err != nil {
		t.Fatalf("ADD: %v", describe(err))
	}
	t.Cleanup(func() { _ = held.Del() })
	allWell(t, clients(patience(t), 4, random(200), held.Host), 4)
}

// TestPatienceOfPods: those that are captured wait for longer than TCP does by itself, and others are none of our business.
func TestPatienceOfPods(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	sysctls := func(h *testbed.Host) string {
		return h.Exec("sysctl", "-n", "net.ipv4.tcp_syn_retries", "net.ipv4.tcp_retries2")
	}
	untouched := sysctls(testbed.NewHost(t, "untouched"))
	early := n.AddPod("early") // nobody knows whether it is to be captured
	if got, want := early.Exec("sysctl", "-n", "net.ipv4.tcp_syn_retries"), "127\n"; got != want {
		t.Errorf("provisional: got tcp_syn_retries %q, want %q", got, want)
	}
	n.StartDaemon()
	if got, want := n.AddPod("web").Exec("sysctl", "-n", "net.ipv4.tcp_syn_retries"), "127\n"; got != want {
		t.Errorf("captured: got tcp_syn_retries %q, want %q", got, want)
	}
	if got := sysctls(addBystander(t, n).Host); got != untouched {
		t.Errorf("not captured: got %q, want %q", got, untouched)
	}
}

// TestProbe: a mitmproxy that listens and does not serve is late, so what is to happen then happens, and it is there again as
// soon as it serves.
func TestProbe(t *testing.T) {
	t.Parallel()
	for _, m := range mitmModes {
		t.Run(m.protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			n.Config["upstream"] = map[string]any{"address": testbed.ProxyAddress, "protocol": m.protocol, "probeInterval": "100ms"}
			echoWorld(n)
			proxy := n.StartMitmdump("--mode", m.mode, "--set", "ignore_hosts=.*")
			d := n.StartDaemon()
			pod := n.AddPod("web")
			allWell(t, clients(patience(t), 4, random(200), pod.Host), 4)
			proxy.Freeze()
			var up attach.UpstreamStatus
			testbed.Eventually(t, "it is late", func() bool {
				up = d.Status().Upstream
				return !up.Ready
			})
			wantText(t, up.Reason, `it takes connections, and fails a probe: .*`)
			outcome := clients(patience(t), 10, random(200), pod.Host)
			testbed.Eventually(t, "they wait", func() bool { return d.Of(pod).Waiting == 10 })
			proxy.Signal(syscall.SIGCONT)
			allWell(t, outcome, 10)
			if got := d.Status().Upstream; !got.Ready {
				t.Errorf("got %+v, want it ready", got)
			}
		})
	}
}
