package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Attach decides about an attachment. If the decision is to capture, its gate is open when Attach returns: listen
// before redirect. The error is an [attach.RefusedError], or handover.ErrOver if another daemon has to be asked.
func (a *Agent) Attach(ctx context.Context, at attach.Attachment) (d attach.Decision, err error) {
	if err := at.Validate(); err != nil {
		return d, &attach.RefusedError{Message: err.Error(), Final: true}
	}
	a.yieldIfReplaced()
	err = a.tenure.Do(func() error {
		d, err = a.attach(ctx, at)
		return err
	})
	return d, err
}

func (a *Agent) attach(ctx context.Context, at attach.Attachment) (attach.Decision, error) {
	id, err := attach.IdentifyNetns(at.Netns)
	if err != nil {
		return attach.Decision{}, &attach.RefusedError{
			Message: err.Error(), Final: errors.Is(err, attach.ErrNetnsGone),
		}
	}
	if err := id.CheckNotNode(); err != nil {
		err = fmt.Errorf("netns %s: %w", at.Netns, err)
		a.log.Warn("attachment refused", "attachment", at.String(), "err", err)
		return attach.Decision{}, &attach.RefusedError{Message: err.Error(), Final: true}
	}
	e := a.enter(at.ID, id)
	defer e.Leave()
	d, err := a.settler.decision(ctx, e, at, true)
	if errors.Is(err, optin.ErrUnknown) {
		return a.attachProvisionally(e, at, err), nil
	}
	if err != nil {
		a.events.report(at.Pod, true, reasonRefused, err.Error())
		a.log.Warn("attachment refused", "attachment", at.String(), "err", err)
		return attach.Decision{}, &attach.RefusedError{Message: err.Error(), Final: true}
	}
	if err := e.Attach(attach.Record{Attachment: at, NetnsID: id, State: d.State(), Trust: d.Trust}, d); err != nil {
		a.log.Error("attachment refused: its gate cannot be opened", "attachment", at.String(), "err", err)
		return attach.Decision{}, &attach.RefusedError{Message: err.Error()}
	}
	a.log.Info("attachment decided", "attachment", at.String(), "state", string(d.State()), "reason", d.Reason)
	a.events.changed(at.Pod, "", d)
	return d, nil
}

// enter enters the endpoint of a netns for an attachment. An attachment that was in another netns is removed from that
// one.
func (a *Agent) enter(id attach.ID, netns attach.NetnsID) *endpoint.Endpoint {
	if e := a.table.Find(id); e != nil && e.ID != netns {
		a.forget(id)
	}
	return a.table.Enter(netns)
}

// attachProvisionally captures a pod whose labels are not known yet. It opens no gate, because the waiting connections
// may have to go straight out.
func (a *Agent) attachProvisionally(e *endpoint.Endpoint, at attach.Attachment, err error) attach.Decision {
	a.log.Warn("attachment is provisional: its connections wait until the pod's labels are known",
		"attachment", at.String(), "err", err)
	e.Add(attach.Record{Attachment: at, NetnsID: e.ID, State: attach.Provisional})
	a.records.rescan()
	r := e.Inherit(ruleset.Provisional(at.IfName))
	r.Interfaces, _ = e.Neighbours(at)
	return attach.Decision{Capture: true, Provisional: true, Ruleset: &r, Reason: err.Error()}
}

// Detach forgets an attachment and removes its record. An unknown attachment is no error.
func (a *Agent) Detach(id attach.ID) error {
	a.yieldIfReplaced()
	return a.tenure.Do(func() error {
		if r, ok := a.forget(id); ok {
			a.log.Info("attachment removed", "attachment", r.String())
		}
		return a.store.Remove(id)
	})
}

// forget removes an attachment from memory.
func (a *Agent) forget(id attach.ID) (attach.Record, bool) {
	r, ok := a.table.Remove(id)
	if ok {
		a.events.forget(r.Pod)
		a.watched() // at once, since watching pins the netns
	}
	return r, ok
}
