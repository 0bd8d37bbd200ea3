package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/watch"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

const (
	// roundInterval is the time between looks at one netns after the other. They find changes that the kernel does not
	// report, which are those of the legacy iptables tools. A look takes a hundredth of a second.
	roundInterval = 10 * time.Second
	// countInterval is the time between looks at the counters of countAtOnce walls. A look takes some tenths of a
	// millisecond, so on a full node the daemon looks less often at each wall, and not longer.
	countInterval, countAtOnce = time.Second, 4
	// undoneOften is how many times rules are restored within undoneWithin before the pod is said to undo them.
	undoneOften, undoneWithin = 3, 10 * time.Minute
)

// verifier keeps the rules of captured pods as they were installed.
type verifier struct {
	restored map[attach.NetnsID][]time.Time // when rules were restored, as far as undoneWithin ago
	looked   time.Time                      // of the last look at one netns
	looks    watch.Round
	counted  time.Time // of the last look at counters
	counts   watch.Round
}

// watched syncs the watched netns with the captured ones, unless the records are those of the last time.
func (a *Agent) watched() {
	a.watching.Lock() // until the end: an older state of the table must not come last
	defer a.watching.Unlock()
	changes := a.table.Changes()
	if a.watching.synced == changes {
		return
	}
	paths := map[attach.NetnsID]string{}
	for _, e := range a.table.All() {
		for _, r := range e.Records() {
			if r.Installed != nil {
				paths[e.ID] = r.Netns
			}
		}
	}
	if err := a.watch.Sync(paths); err != nil {
		if !a.watching.failed {
			a.log.Error("the rules of a pod are not watched; trying again", "err", err)
		}
		a.watching.failed = true
		return
	}
	a.watching.synced, a.watching.failed = changes, false
}

// verifyChanged verifies the netns that have changed, and from time to time another one.
func (a *Agent) verifyChanged(ctx context.Context, now time.Time) {
	a.watched()
	maps.DeleteFunc(a.verifier.restored, func(id attach.NetnsID, _ []time.Time) bool { return a.table.Get(id) == nil })
	all := a.watch.Take(now)
	if now.Sub(a.verifier.looked).Abs() >= roundInterval {
		a.verifier.looked = now
		if id, ok := a.nextLegacy(); ok && !slices.Contains(all, id) {
			all = append(all, id)
		}
	}
	for _, id := range all {
		a.pulse.beat()
		_ = a.tenure.Do(func() error { // short, because a hand-over waits for it
			a.verify(ctx, id, now)
			return nil
		})
	}
	if now.Sub(a.verifier.counted).Abs() >= countInterval {
		a.verifier.counted = now
		for _, id := range a.watch.Next(&a.verifier.counts, countAtOnce) {
			if e := a.table.Get(id); e != nil {
				a.count(e)
			}
		}
	}
}

// nextLegacy returns a netns for a look whose changes the kernel does not report: one whose wall has stopped packets,
// since the rules that redirect them may be missing, or the next one of the round.
func (a *Agent) nextLegacy() (attach.NetnsID, bool) {
	if id, ok := a.watch.Suspect(a.isLegacy); ok {
		return id, true
	}
	for _, id := range a.watch.Next(&a.verifier.looks, 1) {
		return id, a.isLegacy(id)
	}
	return attach.NetnsID{}, false
}

// isLegacy reports whether the kernel does not report changes of the rules in a netns.
func (a *Agent) isLegacy(id attach.NetnsID) bool {
	e := a.table.Get(id)
	if e == nil {
		return false
	}
	in := e.Installed()
	return in != nil && (in.Backend == "iptables-legacy" || in.Backend == "iptables")
}

// verify restores the rules of a netns if they differ from those that the records on disk have. The plugin may change
// rules and records meanwhile; then the netns is verified later.
func (a *Agent) verify(ctx context.Context, id attach.NetnsID, now time.Time) {
	if a.table.Get(id) == nil {
		return
	}
	e := a.table.Enter(id)
	defer e.Leave()
	known := e.Records()
	if len(known) == 0 {
		return
	}
	release, err := a.store.TryLock(id)
	if err != nil {
		a.watch.Again(id)
		if !errors.Is(err, attach.ErrBusy) {
			a.recordTrouble(known[0], fmt.Errorf("its rules cannot be verified: %w", err))
		}
		return
	}
	defer release()
	records := a.stored(known)
	if len(records) == 0 {
		return
	}
	r := records[0]
	drift, err := r.Installed.Check(ctx, r.Netns)
	if err == nil && len(drift) > 0 {
		err = a.repair(ctx, e, records, drift, now)
	}
	if err == nil {
		err = a.knowBridges(r)
	}
	if err == nil {
		err = a.reportForeign(r)
	}
	if err != nil {
		a.watch.Again(id)
		a.recordTrouble(r, fmt.Errorf("its rules cannot be verified: %w", err))
		a.events.report(r.Pod, true, reasonNotVerified, fmt.Sprintf("the pod's rules cannot be verified: %s", err))
	}
}

// stored reads the records of those attachments whose rules are installed. It returns none if the plugin changes the
// rules: an ADD or a DEL has begun, or was killed. It returns none either if the rules are those of another version,
// which the settler replaces.
func (a *Agent) stored(known []attach.Record) (records []attach.Record) {
	for _, k := range known {
		r, err := a.store.Read(k.ID)
		switch {
		case err != nil || r.State == attach.Adding || r.State == attach.Removing:
			return nil
		case r.Installed != nil && r.Installed.Revision != ruleset.Revision:
			return nil
		case r.Installed != nil:
			records = append(records, r)
		}
	}
	return records
}

// repair brings the rules of a netns in line with its interfaces, and with what was installed.
func (a *Agent) repair(
	ctx context.Context, e *endpoint.Endpoint, records []attach.Record, drift []string, now time.Time,
) error {
	first := records[0]
	moved, err := first.Installed.CheckInterfaces(first.Netns)
	if err != nil {
		return err
	}
	in, err := ruleset.Apply(ctx, first.Netns, first.Installed.Ruleset, first.Installed.Backend, first.Installed)
	if err != nil {
		return fmt.Errorf("restoring rules that were changed (%s): %w", drift[0], err)
	}
	a.count(e)                    // the counters of a wall that was restored begin anew
	if len(moved) == len(drift) { // Check names them as well
		a.log.Info("rules follow an interface that has changed", "attachment", first.String(), "drift", summary(drift))
	} else {
		a.sayRestored(e.ID, records, drift, now)
	}
	for _, r := range records {
		r.Installed = &in
		e.Add(r)
		if err := a.store.Write(r); err != nil {
			return err
		}
	}
	return nil
}

// sayRestored counts and reports that rules were restored.
func (a *Agent) sayRestored(id attach.NetnsID, records []attach.Record, drift []string, now time.Time) {
	a.restored.Add(1)
	times := slices.DeleteFunc(a.verifier.restored[id], func(t time.Time) bool { return now.Sub(t) > undoneWithin })
	times = append(times, now)
	a.verifier.restored[id] = times
	text := fmt.Sprintf("the pod's rules were not as installed and were restored: %s", summary(drift))
	reason := reasonRestored
	if len(times) >= undoneOften {
		reason = reasonUndone
		text = fmt.Sprintf("the pod undoes sluice's rules again and again: they were restored %d times within %s, "+
			"and while they are missing its connections fail; the last change: %s",
			len(times), undoneWithin, summary(drift))
	}
	a.log.Warn("rules were restored", "attachment", records[0].String(), "drift", summary(drift))
	for _, r := range records {
		if len(times) <= undoneOften { // then it has been said
			a.orchestrator.Report(r.Pod, true, reason, text)
		}
	}
}

// reportForeign reports rules of another program that come before sluice's. The daemon leaves them alone: the program
// would install them again.
func (a *Agent) reportForeign(r attach.Record) error {
	before, err := r.Installed.Before(r.Netns)
	if err != nil || len(before) == 0 {
		return err
	}
	a.events.report(r.Pod, true, reasonUndone, summary(before)+
		": the pod's connections fail, and none goes around the proxy; find the program that has made the chain")
	return nil
}

// summary is the begin of a list of differences.
func summary(drift []string) string {
	const enough = 3
	if len(drift) <= enough {
		return strings.Join(drift, "; ")
	}
	return fmt.Sprintf("%s; and %d more", strings.Join(drift[:enough], "; "), len(drift)-enough)
}

func (a *Agent) knowBridges(r attach.Record) error {
	bridges, err := netns.Bridges(r.Netns)
	if err != nil || len(bridges) == 0 {
		return err
	}
	return r.Installed.KnowBridges(r.Netns, bridges)
}

// causes describes why packets were stopped. QUIC is none of them: it is rejected all the time, and clients use TCP.
var causes = map[ruleset.Cause]string{
	ruleset.CausePod: around + "a process in the pod, by a raw socket or on a connection that the kernel's " +
		"connection tracking does not know",
	ruleset.CauseNested: around + "a container nested in the pod",
	ruleset.CausePacket: around + "a packet socket, or a network stack of its own such as gVisor's or Kata's",
	ruleset.CauseOther: "packets that are neither TCP nor allowed DNS were rejected, by capture.other or the " +
		"annotation " + attach.AnnotationPrefix + "other",
}

const around = "packets were stopped that would have left the pod around the proxy. The likely sender: "

// Count reads the counters of all walls, and reports the first packets of each cause on its pod.
func (a *Agent) Count() {
	for _, e := range a.table.All() {
		a.count(e)
	}
}

// count is Count for one netns.
func (a *Agent) count(e *endpoint.Endpoint) {
	in := e.Installed()
	if in == nil || in.Wall == ruleset.WallNone {
		return
	}
	first, err := a.watch.Count(e.ID)
	if err != nil {
		a.log.Debug("the counters of a wall cannot be read", "netnsID", e.ID.String(), "err", err)
	}
	e.SetStopped(a.watch.Stopped(e.ID))
	for _, cause := range first {
		text, ok := causes[cause]
		if !ok {
			continue
		}
		for _, r := range e.Records() {
			a.log.Warn("packets of a pod were stopped", "attachment", r.String(), "cause", string(cause))
			a.orchestrator.Report(r.Pod, true, reasonStopped, text)
		}
	}
}

// Restored is how many times rules were restored.
func (a *Agent) Restored() uint64 { return a.restored.Load() }

// Stopped returns how many packets all walls had stopped at the last Count.
func (a *Agent) Stopped() map[ruleset.Cause]uint64 { return a.watch.Total() }
