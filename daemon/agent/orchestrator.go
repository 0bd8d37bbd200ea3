package agent

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// Orchestrator decides about the pods of this node, and makes events about them. Kubernetes is one.
type Orchestrator interface {
	// Decision decides about an attachment, given every interface through which its netns is attached, and with every
	// address of the netns in at.IPs. The error optin.ErrUnknown means to ask again later; any other error is final for
	// the attachment as it is. live allows it to take up to seconds, to ask for facts that are not known yet.
	Decision(ctx context.Context, at attach.Attachment, interfaces []string, live bool) (attach.Decision, error)
	// Running lists the pods that run on this node, attached or not.
	Running() []optin.Running
	// Changed receives when decisions may have changed.
	Changed() <-chan struct{}
	// Report makes an event on the pod.
	Report(pod attach.Pod, warning bool, reason, message string)
}

// Reasons of the events. Those about connections that wait are in package endpoint.
const (
	reasonCaptured     = "SluiceCaptured"
	reasonReleased     = "SluiceReleased"
	reasonCapturedLate = "SluiceCapturedLate"
	reasonNotCaptured  = "SluiceNotCaptured"
	reasonRefused      = "SluiceRefused"
	reasonStopped      = "SluiceStopped"
	reasonRestored     = "SluiceRulesRestored"
	reasonUndone       = "SluiceRulesUndone"
	reasonNotVerified  = "SluiceRulesNotVerified"
)

// toldFor is how long an event that is not repeated is remembered. Pods that were never attached do not say when they
// go.
const toldFor = time.Hour

// events reports to the orchestrator, and leaves out repetitions.
type events struct {
	orchestrator Orchestrator

	mu    sync.Mutex      // guards the fields below; no lock is taken under it
	last  map[string]told // by pod
	swept time.Time       // when old events were last forgotten
}

// told is the last event on a pod.
type told struct {
	text string
	at   time.Time // when it was last to be reported
}

// report makes an event, unless the pod's last one was the same.
func (e *events) report(pod attach.Pod, warning bool, reason, message string) {
	text, now := reason+": "+message, time.Now()
	e.mu.Lock()
	repeated := e.last[pod.String()].text == text
	e.last[pod.String()] = told{text, now}
	if now.Sub(e.swept) >= toldFor {
		e.swept = now
		maps.DeleteFunc(e.last, func(_ string, t told) bool { return now.Sub(t.at) >= toldFor })
	}
	e.mu.Unlock()
	if !repeated {
		e.orchestrator.Report(pod, warning, reason, message)
	}
}

// changed reports the decision about a pod that was in another state, or is new.
func (e *events) changed(pod attach.Pod, previous attach.State, d attach.Decision) {
	open := ""
	if previous != "" && previous != attach.Provisional {
		open = "; connections that were open before stay as they are"
	}
	switch {
	case d.Capture:
		e.report(pod, false, reasonCaptured, fmt.Sprintf(
			"TCP connections go through the node's proxy (%s)%s", d.Reason, open))
	case previous == attach.Captured:
		e.report(pod, false, reasonReleased, fmt.Sprintf("TCP connections go straight out (%s)%s", d.Reason, open))
	}
}

// forget lets the next event of a pod of that name be reported.
func (e *events) forget(pod attach.Pod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.last, pod.String())
}
