package agent

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// runAgent runs a until the end of the test.
func runAgent(t *testing.T, a *testAgent) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

func (p *testPod) wantNoRules(t *testing.T) {
	t.Helper()
	if rules := p.rules(); strings.Contains(strings.ToLower(rules), "sluice") {
		t.Errorf("rules are left:\n%s", rules)
	}
}

// TestDissolve: captured and provisional pods are released. Connections that wait, for the proxy or for a decision, go
// straight out. An older one stays open. No pod is captured afterwards.
func TestDissolve(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		captured, provisional := newTestPod(t), newTestPod(t)
		before := captured.connectEarlier(t)
		o := newOrchestrator()
		o.set(capture)
		a := newAgentFor(t, o)
		c := a.write(t, captured.Host, attach.Provisional, captured.apply(t, backend))
		a.Reconcile(t.Context())
		o.set(unknown)
		p := a.write(t, provisional.Host, attach.Provisional, provisional.apply(t, backend))
		held := provisional.ask(t, server+":80")
		provisional.waitForSYNs(t, 1)
		runAgent(t, a)
		waiting := captured.ask(t, server+":80")
		testbed.Eventually(t, "a connection waits for the upstream", func() bool {
			s, _ := a.statusOf(c.ID)
			return s.State == attach.Captured && s.Waiting == 1
		})

		a.Dissolve(t.Context())
		for name, got := range map[string]<-chan string{"captured": waiting, "provisional": held} {
			if got := <-got; got != "hello 198.51.100.2" {
				t.Errorf("the waiting connection of the %s pod: got %q", name, got)
			}
		}
		before.check(t, "released")
		for _, pod := range []*testPod{captured, provisional} {
			pod.wantNoRules(t)
			if listening(t, pod.Host) {
				t.Error("the capture port is open")
			}
		}
		for _, id := range []attach.ID{c.ID, p.ID} {
			if r, err := a.store.Read(id); err != nil || r.State != attach.Passed || r.Installed != nil {
				t.Errorf("record: got %+v, %v; want it passed, without rules", r, err)
			}
		}
		late := newTestPod(t)
		o.set(capture, optin.Running{
			Pod:   attach.Pod{Namespace: "ci", Name: "old-0", UID: "4c1e"},
			IPs:   []netip.Addr{netip.MustParseAddr("203.0.113.5")},
			Facts: optin.Facts{Labels: map[string]string{optin.Label: "true"}},
		})
		if d, err := a.Attach(t.Context(), attachment(late.Host, "eth0")); err != nil || d.Capture {
			t.Errorf("an ADD afterwards: got %+v, %v", d, err)
		}
	})
}

// TestDissolveInTime: connections that do not end keep the rules for a limited time, and are reset then.
func TestDissolveInTime(t *testing.T) {
	t.Parallel()
	p := newTestPod(t)
	a := newAgent(t, capture) // and does not run, so that no wait ends
	r := a.write(t, p.Host, attach.Provisional, p.apply(t, "nftables"))
	a.Reconcile(t.Context())
	waiting := p.ask(t, server+":80")
	testbed.Eventually(t, "a connection waits for the upstream", func() bool {
		s, _ := a.statusOf(r.ID)
		return s.Waiting == 1
	})
	ctx, cancel := context.WithCancel(t.Context())
	dissolved := make(chan struct{})
	go func() {
		defer close(dissolved)
		a.Dissolve(ctx)
	}()
	testbed.Eventually(t, "the pod is released", func() bool {
		s, _ := a.statusOf(r.ID)
		return s.State == attach.Passed
	})
	if got, want := <-p.ask(t, server+":80"), "hello 198.51.100.2"; got != want {
		t.Errorf("a new connection: got %q, want %q", got, want)
	}
	select {
	case <-dissolved:
		t.Error("Dissolve has returned while a connection was open")
	default:
	}
	cancel()
	select {
	case <-dissolved:
	case <-time.After(10 * time.Second):
		t.Fatal("Dissolve does not end with its context")
	}
	if got := <-waiting; !strings.Contains(got, "reset") {
		t.Errorf("the open connection: got %q, want a reset", got)
	}
	p.wantNoRules(t)
}
