package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Reconcile takes up records that are not known yet, resolves provisional ones, and drops the attachments
// whose netns is gone.
func (a *Agent) Reconcile(ctx context.Context) {
	a.yield() // first: nothing is to be taken from the other
	a.unlessRetired(func() { a.reconcile(ctx, false) })
}

// reconcile is hasty if gates are to be open before anything else is seen to.
func (a *Agent) reconcile(ctx context.Context, hasty bool) {
	a.dropGone()
	a.closeUnused(ctx)
	a.mu.Lock()
	watched := a.watched
	a.mu.Unlock()
	changed, err := a.store.Changed(watched)
	if err != nil || changed.Equal(watched) {
		a.complain(err)
		return
	}
	records, err := a.store.List()
	a.complain(err)
	a.mu.Lock()
	a.watched = changed // before the records are acted upon: what is written meanwhile is for the next time
	a.mu.Unlock()
	for _, r := range records {
		err := a.takeUp(ctx, r, hasty)
		a.note(r, err)
		if err != nil {
			a.look()
		}
	}
	a.complain(a.store.Sweep(time.Minute))
}

// note remembers, and says once, why an attachment is not as it should be.
func (a *Agent) note(r attach.Record, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.byID[r.ID]
	if n == nil {
		a.complain(err)
		return
	}
	was := n.trouble
	n.trouble = ""
	if err != nil {
		n.trouble = err.Error()
	}
	switch {
	case n.trouble == was:
	case err != nil:
		a.log.Error("attachment is not settled; will try again", "attachment", r.String(), "err", err)
	default:
		a.log.Info("attachment is settled after all", "attachment", r.String())
	}
}

func (a *Agent) complain(err error) {
	if err != nil {
		a.log.Error("attachment records", "err", err)
	}
}

// dropGone notices a DEL that never came.
func (a *Agent) dropGone() {
	for _, r := range a.gone() {
		a.log.Warn("netns went without a DEL", "attachment", r.String(), "netns", r.Netns)
		a.forget(r.ID)
		a.complain(a.store.Remove(r.ID))
	}
}

// gone are the attachments whose netns is not there any more.
func (a *Agent) gone() []attach.Record {
	a.mu.Lock()
	defer a.mu.Unlock()
	var gone []attach.Record
	for id, n := range a.byID {
		if r := n.attachments[id]; isGone(r.Netns, n.id) {
			gone = append(gone, *r)
		}
	}
	return gone
}

// isGone looks without the cookie: while a gate is open its netns cannot have been replaced by one with the same
// inode.
func isGone(path string, id attach.NetnsID) bool {
	now, err := attach.StatNetns(path)
	return err == nil && !now.SameFile(id) || errors.Is(err, attach.ErrNetnsGone)
}

// takeUp brings what is held in line with a record that somebody else wrote.
func (a *Agent) takeUp(ctx context.Context, r attach.Record, hasty bool) error {
	if a.inLine(r) {
		return nil
	}
	now, err := attach.IdentifyNetns(r.Netns)
	if errors.Is(err, attach.ErrNetnsGone) || err == nil && now != r.NetnsID {
		a.log.Info("record dropped: its netns is gone", "attachment", r.String(), "netns", r.Netns)
		a.forget(r.ID)
		return a.store.Remove(r.ID)
	}
	if err != nil {
		return err
	}
	n := a.enter(r.NetnsID)
	defer a.leave(n)
	if a.deleted(r) {
		return nil
	}
	a.join(n, &r) // it may tell more than was known when it was attached
	if r.State == attach.Captured {
		var was ruleset.Ruleset
		if r.Installed != nil {
			was = r.Installed.Ruleset
		}
		if err := a.reopen(n, r.Attachment, was); err != nil {
			return err
		}
	}
	if hasty && r.State != attach.Provisional {
		return nil
	}
	return a.settle(ctx, n, r)
}

// Begin opens the gates of what was captured before, and settles what was captured provisionally. Whether the source wants
// something else by now of what was settled is for Run: to change the rules of hundreds of pods takes many seconds, which
// neither connections nor the daemon before this one wait for.
func (a *Agent) Begin(ctx context.Context) {
	if a.evictFrom.IsZero() { // the one before this one does not hang
		after := evictAfter
		if a.Returning > 0 {
			after = evictProxyAfter
		}
		a.evictFrom = time.Now().Add(after)
	}
	a.unlessRetired(func() { a.reconcile(ctx, true) })
}

// reopen opens the gate of an attachment that was captured before, in the place of whoever has held it for long enough.
func (a *Agent) reopen(n *netns, at attach.Attachment, r ruleset.Ruleset) error {
	err := a.open(n, at, r)
	if !errors.Is(err, unix.EADDRINUSE) || a.evictFrom.IsZero() || time.Now().Before(a.evictFrom) {
		return err
	}
	ours := n.gate
	if ours == nil {
		ours = &gate.Gate{}
	}
	if err := ours.Evict(at.Netns, a.inbound(n, at, r)); err != nil {
		return err
	}
	if err := a.open(n, at, r); err != nil {
		return err
	}
	a.log.Warn("ended the listeners of another process, of a sluiced that hangs most likely", "attachment", at.String())
	return nil
}

// inLine tells whether r is known as it is.
func (a *Agent) inLine(r attach.Record) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.byID[r.ID]
	if n == nil || n.id != r.NetnsID || r.State == attach.Provisional {
		return false
	}
	known := n.attachments[r.ID]
	return known.State == r.State && (known.Installed != nil) == (r.Installed != nil) && (n.gate != nil || r.State != attach.Captured)
}

// deleted tells whether a DEL took the record away meanwhile.
func (a *Agent) deleted(r attach.Record) bool {
	_, err := a.store.Read(r.ID)
	return errors.Is(err, os.ErrNotExist)
}

// settle brings an attachment in line with what the source wants of it by now, as far as it knows. A provisional
// one has nobody who listens yet, and what waits at its gate belongs to where it would have gone with the daemon
// there from the start. So the order matters: first what is excluded leaves the rules, then the kernel forgets
// where it sent the SYNs that wait, and only then does anybody listen.
func (a *Agent) settle(ctx context.Context, n *netns, r attach.Record) error {
	if r.State != attach.Passed && r.Installed == nil {
		return errors.New("its record has no ruleset")
	}
	d, err := a.decide(ctx, n, r.Attachment, false)
	switch {
	case errors.Is(err, optin.ErrUnknown) && r.State != attach.Provisional:
		return nil
	case err != nil:
		if !errors.Is(err, optin.ErrUnknown) {
			a.report(r.Pod, true, reasonRefused, fmt.Sprintf("the pod stays %s: %s", r.State, err))
		}
		return fmt.Errorf("it stays %s: %w", r.State, err)
	}
	a.limit(n, d.Late)
	if state(d) == r.State && (!d.Capture || equal(*d.Ruleset, r.Installed.Ruleset) && r.Installed.Revision == ruleset.Revision) {
		return nil
	}
	was := r.State
	switch {
	case d.Capture:
		err = a.capture(ctx, n, &r, *d.Ruleset)
	case was == attach.Captured:
		err = a.drain(ctx, &r)
	default:
		err = a.free(ctx, &r, forgetWaitingHere)
	}
	if err != nil {
		return err
	}
	r.State = state(d)
	a.log.Info("attachment settled", "attachment", r.String(), "was", string(was), "state", string(r.State), "reason", d.Reason)
	if a.deleted(r) {
		return nil
	}
	a.join(n, &r)
	a.tell(r.Pod, was, d)
	if err := a.store.Write(r); err != nil || r.Installed == nil {
		return err
	}
	return a.store.Share(r.ID, r.NetnsID, r.Installed)
}

// equal compares as JSON does, which does not tell an empty list from none.
func equal(x, y ruleset.Ruleset) bool {
	a, aerr := json.Marshal(x)
	b, berr := json.Marshal(y)
	return aerr == nil && berr == nil && bytes.Equal(a, b)
}

func (a *Agent) capture(ctx context.Context, n *netns, r *attach.Record, want ruleset.Ruleset) error {
	if r.State != attach.Provisional {
		if err := a.open(n, r.Attachment, want); err != nil { // before anything can arrive
			return err
		}
	}
	backend := ruleset.BackendAuto
	if r.Installed != nil {
		backend = r.Installed.Backend
	}
	in, err := ruleset.Apply(ctx, r.Netns, want, backend, r.Installed)
	if err != nil {
		return err
	}
	r.Installed = &in
	if err := ruleset.Patience(r.Netns, true); err != nil {
		// In a container /proc/sys is read-only; the plugin, which is not in one, has done it for most pods.
		a.log.Debug("the pod gives up sooner if sluiced is late", "attachment", r.String(), "err", err)
	}
	if err := forgetWaiting(r.Netns); err != nil {
		return err
	}
	return a.open(n, r.Attachment, want)
}

// drain ends the capture of new connections. Rules stay, because those that were redirected need the kernel's
// nat for as long as they are open: its hooks go with the last nat chain. closeUnused takes the rest away.
func (a *Agent) drain(ctx context.Context, r *attach.Record) error {
	nothing := r.Installed.Ruleset
	everywhere := []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	nothing.ExcludeCIDRs, nothing.ExcludeSources = everywhere, everywhere
	in, err := ruleset.Apply(ctx, r.Netns, nothing, r.Installed.Backend, r.Installed)
	if err != nil {
		return err
	}
	r.Installed = &in
	return nil
}

// free takes the rules away.
func (a *Agent) free(ctx context.Context, r *attach.Record, released func() error) error {
	if r.Installed == nil {
		return nil
	}
	if err := r.Installed.Remove(ctx, r.Netns, released); err != nil {
		return err
	}
	r.Installed = nil
	return nil
}

// Reconsider looks whether the source still wants of each attachment what was done, and of each pod that runs
// without having been attached whether it is to be captured.
func (a *Agent) Reconsider(ctx context.Context) {
	a.Reconcile(ctx) // what has just been recorded can be changed too
	for _, n := range a.all() {
		for _, r := range a.records(n) {
			a.unlessRetired(func() { a.reconsider(ctx, r) })
		}
	}
	a.unlessRetired(func() { a.enrol(ctx) })
}

// unlessRetired calls do, which no hand-over interrupts. It is short: a hand-over waits for it.
func (a *Agent) unlessRetired(do func()) {
	a.handing.RLock()
	defer a.handing.RUnlock()
	if !a.isRetired() {
		do()
	}
}

func (a *Agent) reconsider(ctx context.Context, r attach.Record) {
	err := a.takeUp(ctx, r, false) // what has failed before
	if err == nil {
		err = a.again(ctx, r)
	}
	a.note(r, err)
}

func (a *Agent) records(n *netns) []attach.Record {
	a.mu.Lock()
	defer a.mu.Unlock()
	var records []attach.Record
	for _, r := range n.attachments {
		records = append(records, *r)
	}
	return records
}

// again settles an attachment that was settled before.
func (a *Agent) again(ctx context.Context, r attach.Record) error {
	n := a.enter(r.NetnsID)
	defer a.leave(n)
	a.mu.Lock()
	now := n.attachments[r.ID]
	a.mu.Unlock()
	if now == nil || now.State != attach.Passed && now.Installed == nil {
		return nil // gone, or the plugin has yet to record what it installed; Reconcile will see that
	}
	return a.settle(ctx, n, *now)
}

// closeUnused takes away what is left of captures that have ended, when the last of their connections has: of inbound
// ones, those that wait to be accepted.
func (a *Agent) closeUnused(ctx context.Context) {
	for _, n := range a.all() {
		n.changing.Lock()
		if a.unused(n) {
			for _, r := range a.records(n) {
				a.note(r, a.clear(ctx, n, r))
			}
			a.shut(n)
		} else if a.outboundOnly(n) {
			a.complain(a.narrow(n))
		}
		n.changing.Unlock()
	}
}

// outboundOnly tells whether n has a gate, and rules that lead nothing inbound to it.
func (a *Agent) outboundOnly(n *netns) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range n.attachments {
		if r.Installed == nil || len(r.Installed.Ruleset.InboundPorts) > 0 {
			return false
		}
	}
	return n.gate != nil
}

func (a *Agent) narrow(n *netns) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	narrow, err := n.gate.Narrow()
	if narrow != n.gate {
		err = errors.Join(err, a.serve(n, narrow))
	}
	return err
}

func (a *Agent) clear(ctx context.Context, n *netns, r attach.Record) error {
	if r.Installed == nil {
		return nil
	}
	if err := a.free(ctx, &r, nil); err != nil {
		return err
	}
	a.join(n, &r)
	if a.deleted(r) {
		return nil
	}
	return a.store.Write(r)
}

// unused tells whether something is left in n that no connection needs.
func (a *Agent) unused(n *netns) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	left := n.gate != nil
	for _, r := range n.attachments {
		if r.State != attach.Passed {
			return false
		}
		left = left || r.Installed != nil
	}
	if !left {
		return false
	}
	t := n.traffic()
	waiting, err := t.waiting()
	open, _ := t.open()
	return err == nil && waiting+open == 0
}
