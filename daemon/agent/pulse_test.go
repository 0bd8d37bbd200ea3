package agent

import (
	"strings"
	"testing"
	"time"
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
