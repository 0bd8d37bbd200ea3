package agent

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// scope says whether a reconciliation settles a record again that was settled before.
type scope bool

const (
	gatesOnly  scope = false // no: only its gate is opened
	everything scope = true  // yes: its rules are brought in line with the orchestrator too
)

// Reconcile reads new records and settles provisional ones.
func (a *Agent) Reconcile(ctx context.Context) {
	a.yieldIfReplaced() // first: if another daemon runs, it owns the endpoints
	_ = a.tenure.Do(func() error {
		a.reconcile(ctx, everything)
		return nil
	})
}

func (a *Agent) reconcile(ctx context.Context, s scope) {
	records, err := a.records.read()
	if err != nil {
		a.log.Error("attachment records cannot be read or removed", "err", err)
	}
	for _, r := range records {
		a.pulse.beat()
		err := a.takeUp(ctx, r, s)
		a.recordTrouble(r, err)
		if err != nil {
			a.records.rescan()
		}
	}
}

// CleanUp removes the attachments whose netns is gone, and ends captures that nothing uses any more.
func (a *Agent) CleanUp(ctx context.Context) {
	_ = a.tenure.Do(func() error {
		if err := a.removeGone(); err != nil {
			a.log.Error("attachment records cannot be read or removed", "err", err)
		}
		a.closeUnused(ctx)
		return nil
	})
}

// recordTrouble records, and logs once, why an attachment is not in line.
func (a *Agent) recordTrouble(r attach.Record, err error) {
	e := a.table.Find(r.ID)
	switch {
	case e != nil && !e.SetTrouble(err): // no news
	case err != nil:
		a.log.Error("attachment cannot be settled yet; trying again", "attachment", r.String(), "err", err)
	case e != nil:
		a.log.Info("attachment is settled now, after earlier errors", "attachment", r.String())
	}
}

// removeGone removes the attachments whose netns was deleted without a DEL.
func (a *Agent) removeGone() error {
	var errs []error
	for _, r := range a.table.Gone() {
		a.pulse.beat()
		a.log.Warn("netns has gone without a DEL", "attachment", r.String(), "netns", r.Netns)
		a.forget(r.ID)
		errs = append(errs, a.store.Remove(r.ID))
	}
	return errors.Join(errs...)
}

// takeUp brings an endpoint in line with a record that the plugin or an earlier daemon wrote.
func (a *Agent) takeUp(ctx context.Context, r attach.Record, s scope) error {
	if e := a.table.Get(r.NetnsID); e != nil && e.InLine(r) {
		return nil
	}
	now, err := attach.IdentifyNetns(r.Netns)
	if errors.Is(err, attach.ErrNetnsGone) || err == nil && now != r.NetnsID {
		a.log.Info("record removed: its netns is gone", "attachment", r.String(), "netns", r.Netns)
		a.forget(r.ID)
		return a.store.Remove(r.ID)
	}
	if err != nil {
		return err
	}
	if err := now.CheckNotNode(); err != nil {
		return a.dropNode(ctx, r, err)
	}
	e := a.enter(r.ID, r.NetnsID)
	defer e.Leave()
	if a.settler.isEnding(r) {
		return nil
	}
	if r.State == attach.Adding {
		// Its ADD goes on and writes another record, or it was killed and DEL removes its rules. An attachment that
		// this daemon has decided about stays as decided: ADD may have succeeded since the record was read.
		if _, known := e.Record(r.ID); !known {
			e.Add(r)
		}
		return nil
	}
	e.Add(r) // the record may say more than the attachment did
	if r.State == attach.Captured {
		if err := a.reopen(e, r); err != nil {
			return err
		}
	}
	if s == gatesOnly && r.State != attach.Provisional {
		return nil
	}
	return a.settler.settle(ctx, e, r)
}

// dropNode removes a record that claims the node's own netns, with its rules: older versions captured there.
func (a *Agent) dropNode(ctx context.Context, r attach.Record, reason error) error {
	if r.Installed != nil {
		if err := r.Installed.Remove(ctx, r.Netns, nil); err != nil {
			return err
		}
	}
	a.log.Warn("record removed, and its rules: it is not of a pod", "attachment", r.String(), "netns", r.Netns,
		"err", reason)
	a.forget(r.ID)
	return a.store.Remove(r.ID)
}

// reopen opens the gate of a pod that was captured before. After a grace period it evicts another process that holds
// the capture port.
func (a *Agent) reopen(e *endpoint.Endpoint, r attach.Record) error {
	var rules ruleset.Ruleset
	if r.Installed != nil {
		rules = r.Installed.Ruleset
	}
	evict := !a.evictFrom.IsZero() && !time.Now().Before(a.evictFrom)
	evicted, err := e.Reopen(r.Attachment, rules, evict)
	if evicted && err == nil {
		a.log.Warn("listeners of another process were closed, most likely of a sluiced that hangs",
			"attachment", r.String())
	}
	return err
}

// Reconsider asks the orchestrator again about every attachment, and about the pods that run without having been
// attached.
func (a *Agent) Reconsider(ctx context.Context) {
	a.Reconcile(ctx) // a record that has just been written can be changed too
	for _, e := range a.table.All() {
		for _, r := range e.Records() {
			a.pulse.beat()
			_ = a.tenure.Do(func() error { // short, because a hand-over waits for it
				a.recordTrouble(r, a.reconsider(ctx, r))
				return nil
			})
		}
	}
	_ = a.tenure.Do(func() error {
		a.enrol(ctx)
		return nil
	})
}

func (a *Agent) reconsider(ctx context.Context, r attach.Record) error {
	if err := a.takeUp(ctx, r, gatesOnly); err != nil { // failed before
		return err
	}
	e := a.table.Enter(r.NetnsID)
	defer e.Leave()
	now, ok := e.Record(r.ID)
	if !ok || now.State != attach.Passed && now.Installed == nil {
		return nil // gone, or the plugin has yet to record its rules; Reconcile will read that record
	}
	return a.settler.settle(ctx, e, now)
}

// closeUnused removes the rules and gates of captures that have ended, once the last connection has ended too. Of
// inbound captures it closes the listeners once no connection waits in them.
func (a *Agent) closeUnused(ctx context.Context) {
	for _, e := range a.table.All() {
		a.pulse.beat()
		e := a.table.Enter(e.ID)
		if e.Unused() {
			a.free(ctx, e)
		} else if err := e.Narrow(); err != nil {
			a.log.Error("inbound listeners cannot be closed yet", "netnsID", e.ID.String(), "err", err)
		}
		e.Leave()
	}
}
