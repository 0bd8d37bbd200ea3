package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestAgentThatStandsStillHangs, unless another daemon has taken over: kubelet would start this one again.
func TestAgentThatStandsStillHangs(t *testing.T) {
	t.Parallel()
	a := newAgent(t, pass)
	if err := a.Alive(); err != nil {
		t.Errorf("before the start: %v", err)
	}
	a.pulse.beat()
	if err := a.pulse.check(time.Now().Add(hangsAfter - time.Second)); err != nil {
		t.Errorf("just before it hangs: %v", err)
	}
	a.pulse.last.Store(time.Now().Add(-hangsAfter - 2*time.Second).Unix())
	if err := a.Alive(); err == nil || !strings.Contains(err.Error(), "this sluiced hangs") {
		t.Errorf("got %v, want it to hang", err)
	}
	if err := a.tenure.PassOn(func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := a.Alive(); err != nil {
		t.Errorf("when it has handed over: %v", err)
	}
}

// beats reports whether the agent goes on during act.
func (a *testAgent) beats(act func()) bool {
	const longAgo = 1
	a.pulse.last.Store(longAgo)
	act()
	return a.pulse.last.Load() != longAgo
}

// TestEachPodIsABeat: with many pods, each of which takes seconds, all of them take longer than an agent that hangs.
func TestEachPodIsABeat(t *testing.T) {
	t.Parallel()
	v := newVerified(t, "nftables")
	v.undo()
	testbed.Eventually(t, "the rules are restored", func() bool {
		beats := v.agent.beats(func() { v.verify(t) })
		restored := v.inLine(t)
		if restored && !beats {
			t.Error("no beat for a pod that is verified")
		}
		return restored
	})
	if !v.agent.beats(func() { v.agent.CleanUp(t.Context()) }) {
		t.Error("no beat for a pod whose capture may have ended")
	}
	const ip = "203.0.113.28" // no other test has a pod with this address
	podWith(t, "found", ip)
	v.orchestrator.set(capture, runningPod("found", ip))
	if !v.agent.beats(func() { v.agent.enrol(t.Context()) }) || v.agent.Enrolled() != 1 {
		t.Error("no beat for a pod that is enrolled")
	}
}
