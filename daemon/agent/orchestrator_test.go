package agent

import (
	"context"
	"fmt"
	"sync"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// decide makes the decision about one attachment.
type decide func(at attach.Attachment, interfaces []string) (attach.Decision, error)

// fakeOrchestrator is an orchestrator with decisions that a test sets.
type fakeOrchestrator struct {
	mu      sync.Mutex
	decide  decide
	running []optin.Running
	events  []string
}

func newOrchestrator() *fakeOrchestrator { return &fakeOrchestrator{decide: pass} }

// set replaces the decisions, and the pods that run.
func (o *fakeOrchestrator) set(d decide, running ...optin.Running) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.decide, o.running = d, running
}

// Decision implements Orchestrator.
func (o *fakeOrchestrator) Decision(_ context.Context, at attach.Attachment, interfaces []string, _ bool) (
	attach.Decision, error,
) {
	o.mu.Lock()
	d := o.decide
	o.mu.Unlock()
	return d(at, interfaces)
}

// Changed implements Orchestrator.
func (*fakeOrchestrator) Changed() <-chan struct{} { return nil }

// Running implements Orchestrator.
func (o *fakeOrchestrator) Running() []optin.Running {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.running
}

// Report implements Orchestrator.
func (o *fakeOrchestrator) Report(pod attach.Pod, warning bool, reason, message string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = append(o.events, fmt.Sprintf("%s %t %s: %s", pod, warning, reason, message))
}
