package agent

import (
	"context"
	"fmt"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// Source says what is wanted of the node's pods, and is told what became of them.
type Source interface {
	// Decide says what becomes of an attachment, given every interface through which its container is attached, and with
	// every address that it has.
	// optin.ErrUnknown means to ask again later; any other error is final for the attachment as it is. live is to
	// take the time, up to seconds, to ask for what is not known.
	Decide(ctx context.Context, a attach.Attachment, interfaces []string, live bool) (attach.Decision, error)
	// Running lists the pods that run on this node, attached or not.
	Running() []optin.Running
	// Changed receives when other decisions may be wanted than were.
	Changed() <-chan struct{}
	// Report tells the pod's people.
	Report(pod attach.Pod, warning bool, reason, message string)
}

// Decide is the Source that knows attachments only.
type Decide func(a attach.Attachment, interfaces []string) (attach.Decision, error)

// Decide implements Source.
func (d Decide) Decide(_ context.Context, a attach.Attachment, interfaces []string, _ bool) (attach.Decision, error) {
	return d(a, interfaces)
}

// Running implements Source.
func (Decide) Running() []optin.Running { return nil }

// Changed implements Source.
func (Decide) Changed() <-chan struct{} { return nil }

// Report implements Source.
func (Decide) Report(attach.Pod, bool, string, string) {}

// Reasons of the events.
const (
	reasonCaptured    = "SluiceCaptured"
	reasonReleased    = "SluiceReleased"
	reasonNotCaptured = "SluiceNotCaptured"
	reasonRefused     = "SluiceRefused"
	reasonWaiting     = "SluiceUpstreamLate"
	reasonExpired     = "SluiceConnectionsReset"
	reasonDirect      = "SluiceConnectionsDirect"
)

// tell reports what became of an attachment that was in another state, or new.
func (a *Agent) tell(pod attach.Pod, was attach.State, d attach.Decision) {
	before := ""
	if was != "" && was != attach.Provisional {
		before = "; connections that were open before stay as they are"
	}
	switch {
	case d.Capture:
		a.report(pod, false, reasonCaptured, fmt.Sprintf("TCP connections go through the node's proxy (%s)%s", d.Reason, before))
	case was == attach.Captured:
		a.report(pod, false, reasonReleased, fmt.Sprintf("TCP connections go straight out (%s)%s", d.Reason, before))
	}
}

// report makes an event, unless the last of that pod was the same.
func (a *Agent) report(pod attach.Pod, warning bool, reason, message string) {
	a.mu.Lock()
	key := pod.String()
	said := reason + ": " + message
	again := a.told[key] == said
	a.told[key] = said
	a.mu.Unlock()
	if !again {
		a.source.Report(pod, warning, reason, message)
	}
}
