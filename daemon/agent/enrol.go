package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// uncaptured are the running pods that opted in and are not captured, as of the last enrol.
type uncaptured struct {
	mu      sync.Mutex // guards the fields; no lock is taken under it
	reasons map[attach.Pod]string
	since   map[attach.Pod]time.Time
}

// set replaces all pods. It returns those that have been uncaptured for reconsiderInterval.
func (u *uncaptured) set(reasons map[attach.Pod]string, now time.Time) (lasting []attach.Pod) {
	u.mu.Lock()
	defer u.mu.Unlock()
	since := map[attach.Pod]time.Time{}
	for pod := range reasons {
		since[pod] = now
		if before, ok := u.since[pod]; ok {
			since[pod] = before
		}
		if now.Sub(since[pod]) >= reconsiderInterval {
			lasting = append(lasting, pod)
		}
	}
	u.reasons, u.since = reasons, since
	return lasting
}

// Uncaptured returns the running pods that opted in and are not captured, sorted by name. The orchestrator knows them,
// whether the plugin was called for them or not. Pods of the upstream are not among them.
func (a *Agent) Uncaptured() (all []attach.UncapturedPod) {
	a.uncaptured.mu.Lock()
	defer a.uncaptured.mu.Unlock()
	for pod, reason := range a.uncaptured.reasons {
		all = append(all, attach.UncapturedPod{Pod: pod.String(), Reason: reason})
	}
	slices.SortFunc(all, func(x, y attach.UncapturedPod) int { return strings.Compare(x.Pod, y.Pod) })
	return all
}

// Enrolled is how many pods were captured that had started without the plugin.
func (a *Agent) Enrolled() uint64 { return a.enrolled.Load() }

// Reasons for which a running pod that opted in is not captured.
const (
	whyHostNetwork = "the pod uses the host's network, so its connections are the node's"
	whyNoNetns     = "the pod started without the plugin, and no network namespace in " + netnsDir +
		" has its addresses"
	whyAmbiguous = "the pod started without the plugin, and its addresses do not tell its network namespace: two " +
		"have one of them, or one has those of two pods. A pod may have taken the address of another; restart the pod"
)

// enrol captures the running pods that opted in and were never attached: they ran before sluice was installed, or
// another program had undone the installation when they started. It reports why the others cannot be captured.
func (a *Agent) enrol(ctx context.Context) {
	if a.settler.dissolving.Load() {
		return
	}
	var missing []optin.Running
	reasons := map[attach.Pod]string{}
	attached, running := a.table.Pods(), a.orchestrator.Running()
	for _, p := range running {
		state, isAttached := attached[attach.Pod{Namespace: p.Pod.Namespace, Name: p.Pod.Name}]
		switch {
		case state.State == attach.Provisional && state.Left > 0: // also if its label is invalid
			reasons[p.Pod] = cmp.Or(state.Trouble, "its capture has not begun")
		case !optin.Wanted(p.Facts):
		case p.HostNetwork:
			reasons[p.Pod] = whyHostNetwork
			a.events.report(p.Pod, true, reasonNotCaptured, whyHostNetwork)
		case p.Facts.Upstream:
			a.events.report(p.Pod, true, reasonNotCaptured,
				"the pod runs the upstream: its connections would come back to it")
		case !isAttached:
			reasons[p.Pod] = whyNoNetns // unless it is found
			missing = append(missing, p)
		case state.State == attach.Passed:
			reasons[p.Pod] = cmp.Or(state.Trouble, "its capture has not begun")
		case p.RuntimeClass != "":
			if why := a.passedBy(p, state.Netns); why != "" {
				reasons[p.Pod] = why
				a.events.report(p.Pod, true, reasonNotCaptured, why)
			}
		}
	}
	a.enrolAll(ctx, missing, running, reasons)
	for _, pod := range a.uncaptured.set(reasons, time.Now()) {
		// A pod that ends has no netns for a moment, and a new one may have its address.
		if why := reasons[pod]; why == whyNoNetns || why == whyAmbiguous {
			a.events.report(pod, true, reasonNotCaptured, why)
		}
	}
}

// passedBy says why the connections of a pod with a RuntimeClass do not pass the rules in its netns, or nothing if they
// do. Only the runtime knows: it makes the sandbox after the plugin has run, and the name of the class says nothing.
func (a *Agent) passedBy(p optin.Running, id attach.NetnsID) (why string) {
	e := a.table.Get(id)
	if e == nil {
		return ""
	}
	records := e.Records()
	if len(records) == 0 {
		return ""
	}
	sign, err := netns.OtherStack(records[0].Netns, p.IPs)
	if err != nil { // such as of a pod that ends
		a.log.Debug("the netns of a pod with a RuntimeClass cannot be read", "pod", p.Pod.String(), "err", err)
		return ""
	}
	e.SetBypassed(sign != "")
	if sign == "" {
		return ""
	}
	return fmt.Sprintf("the runtime of its RuntimeClass %s has a network stack of its own (%s), which the rules do "+
		"not see: with the default network model of Kata Containers the pod's connections go around the proxy, and "+
		"with another model or runtime the wall stops them", p.RuntimeClass, sign)
}

// enrolAll enrols the missing pods among the running ones, and leaves in reasons those that are not captured then.
func (a *Agent) enrolAll(ctx context.Context, missing, running []optin.Running, reasons map[attach.Pod]string) {
	if len(missing) == 0 {
		return
	}
	found, ambiguous, err := a.search.find(missing, running, a.table.Attached(), time.Now())
	if err != nil {
		a.log.Error("the netns of running pods cannot be searched", "err", err)
	}
	for _, pod := range ambiguous {
		reasons[pod] = whyAmbiguous
	}
	for _, at := range found {
		a.pulse.beat()
		err := a.enrolOne(ctx, at)
		if err == nil {
			delete(reasons, at.Pod)
			continue
		}
		if !errors.Is(err, attach.ErrNodeNetns) { // that stays as it is; the event is made once
			a.log.Error("running pod cannot be captured yet; trying again", "pod", at.Pod.String(), "err", err)
		}
		reasons[at.Pod] = err.Error()
		a.events.report(at.Pod, true, reasonNotCaptured, err.Error())
	}
}

func (a *Agent) enrolOne(ctx context.Context, at attach.Attachment) error {
	id, err := attach.IdentifyNetns(at.Netns)
	if err != nil {
		return err
	}
	if err := id.CheckNotNode(); err != nil {
		return fmt.Errorf("netns %s: %w", at.Netns, err)
	}
	e := a.table.Enter(id)
	defer e.Leave()
	if len(e.Records()) > 0 {
		return nil // its ADD came first
	}
	r := attach.Record{Attachment: at, NetnsID: id, State: attach.Passed}
	if err := a.store.Write(r); err != nil {
		return err
	}
	e.Add(r)
	if err := a.settler.settle(ctx, e, r); err != nil {
		return err
	}
	a.enrolled.Add(1)
	return nil
}
