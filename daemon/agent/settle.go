package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// settler brings single attachments in line with the orchestrator's decisions.
type settler struct {
	orchestrator Orchestrator
	events       *events
	store        attach.Store
	log          *slog.Logger
	dissolving   *atomic.Bool // no attachment is captured any more
}

// decision asks the orchestrator about an attachment in e. live allows it to take the time to ask the API server.
func (s *settler) decision(ctx context.Context, e *endpoint.Endpoint, at attach.Attachment, live bool) (
	attach.Decision, error,
) {
	if s.dissolving.Load() {
		return dissolved, nil
	}
	var interfaces []string
	interfaces, at.IPs = e.Neighbours(at)
	d, err := s.orchestrator.Decision(ctx, at, interfaces, live)
	if err == nil && d.Ruleset != nil {
		r := e.Inherit(*d.Ruleset)
		d.Ruleset = &r
	}
	return d, err
}

// settle brings an attachment in line with the orchestrator's decision of now, as far as that is known. The caller has
// entered e.
func (s *settler) settle(ctx context.Context, e *endpoint.Endpoint, r attach.Record) error {
	if r.State != attach.Passed && r.Installed == nil {
		return errors.New("its record has no ruleset")
	}
	d, err := s.decision(ctx, e, r.Attachment, false)
	switch {
	case errors.Is(err, optin.ErrUnknown) && r.State != attach.Provisional:
		return nil
	case err != nil:
		if !errors.Is(err, optin.ErrUnknown) {
			s.events.report(r.Pod, true, reasonRefused, fmt.Sprintf("the pod stays %s: %s", r.State, err))
			if herr := s.holdOn(ctx, e, r); herr != nil {
				err = errors.Join(err, fmt.Errorf("holding its TCP: %w", herr))
			}
		}
		return fmt.Errorf("it stays %s: %w", r.State, err)
	}
	e.SetPolicy(d.Late)
	if isSettled(r, d) {
		return nil
	}
	return s.unlessEnding(ctx, r, func() error {
		s.withoutEnding(e, &r, d)
		if isSettled(r, d) {
			return nil
		}
		return s.change(ctx, e, r, d)
	})
}

// holdOn lets a provisional capture last until the decision, if it would expire or has expired. It is for a pod that is
// refused: its labels are known, and it must not pass because of them.
func (s *settler) holdOn(ctx context.Context, e *endpoint.Endpoint, r attach.Record) error {
	if r.State != attach.Provisional || r.Installed.Ruleset.ExpiresAfter == 0 {
		return nil
	}
	return s.unlessEnding(ctx, r, func() error {
		left, err := r.Installed.PassedExpired(r.Netns)
		if err != nil {
			return err
		}
		want := r.Installed.Ruleset
		want.ExpiresAfter = 0
		in, err := ruleset.Apply(ctx, r.Netns, want, r.Installed.Backend, r.Installed)
		if err != nil {
			return err
		}
		if err := conntrack.ForgetUnanswered(r.Netns); err != nil {
			return err
		}
		r.Installed, r.Uncaptured = &in, left
		e.Add(r)
		s.warnUncaptured(r)
		return s.writeShared(r)
	})
}

// warnUncaptured logs that packets of a pod that was to be captured have left, if any have.
func (s *settler) warnUncaptured(r attach.Record) {
	if r.Uncaptured > 0 {
		s.log.Warn("a pod that opted in was not captured at first", "attachment", r.String(),
			"packets", r.Uncaptured)
	}
}

// writeShared writes a record, and its rules into those of the other attachments in the netns.
func (s *settler) writeShared(r attach.Record) error {
	if err := s.store.Write(r); err != nil || r.Installed == nil {
		return err
	}
	return s.store.Share(r.ID, r.NetnsID, r.Installed)
}

// withoutEnding brings r and d up to date with the DEL of another attachment in e, which may have gone on since the
// decision was made: its interface is not in the rules any more.
func (s *settler) withoutEnding(e *endpoint.Endpoint, r *attach.Record, d attach.Decision) {
	if stored, err := s.store.Read(r.ID); err == nil && stored.Installed != nil && r.Installed != nil {
		r.Installed = stored.Installed
	}
	for _, other := range e.Records() {
		if d.Ruleset != nil && other.ID != r.ID && s.isEnding(other) {
			d.Ruleset.Interfaces = slices.DeleteFunc(slices.Clone(d.Ruleset.Interfaces), func(name string) bool {
				return name == other.IfName
			})
		}
	}
}

// change brings an attachment in line with a decision that differs from its record.
func (s *settler) change(ctx context.Context, e *endpoint.Endpoint, r attach.Record, d attach.Decision) (err error) {
	previous := r.State
	if d.Capture && previous == attach.Provisional {
		left, err := r.Installed.PassedExpired(r.Netns)
		if err != nil {
			return err
		}
		r.Uncaptured += left // to those before holdOn
	}
	switch {
	case hasRules(r, d): // only its trust differs
	case d.Capture:
		want := *d.Ruleset
		want.KeepOlder = want.KeepOlder || r.Installed == nil // it runs, and was not captured
		err = s.capture(ctx, e, &r, want)
	case previous == attach.Captured:
		err = stopCapturing(ctx, &r)
	default:
		err = release(ctx, &r)
	}
	if err != nil {
		return err
	}
	r.State, r.Trust = d.State(), d.Trust
	s.log.Info("attachment settled", "attachment", r.String(), "previousState", string(previous),
		"state", string(r.State), "reason", d.Reason)
	e.Add(r)
	s.events.changed(r.Pod, previous, d)
	if d.Capture && previous == attach.Provisional && r.Uncaptured > 0 {
		s.warnUncaptured(r)
		s.orchestrator.Report(r.Pod, true, reasonCapturedLate, fmt.Sprintf(
			"%d packets of the pod left around the proxy before it was captured: its labels were not known for longer "+
				"than provisionalFor, and nothing in its namespace had been seen to opt in; connections that were "+
				"opened then stay as they are", r.Uncaptured))
	}
	return s.writeShared(r)
}

// isSettled reports whether r already is as d wants it.
func isSettled(r attach.Record, d attach.Decision) bool { return hasRules(r, d) && d.Trust == r.Trust }

// hasRules reports whether the rules of r already are as d wants them, and of this version.
func hasRules(r attach.Record, d attach.Decision) bool {
	return d.State() == r.State && (!d.Capture ||
		equal(*d.Ruleset, r.Installed.Ruleset) && r.Installed.Revision == ruleset.Revision)
}

// equal compares in JSON, where an empty list and a missing one are the same.
func equal(x, y ruleset.Ruleset) bool {
	a, aerr := json.Marshal(x)
	b, berr := json.Marshal(y)
	return aerr == nil && berr == nil && bytes.Equal(a, b)
}

// capture applies the rules and opens the gate. A captured pod's gate opens first, before a new rule can lead a
// connection to it. A provisional pod has connections that wait at the SYN gate, and each of them must go where it
// would have gone with the daemon there from the start. So the order matters: the rules let excluded destinations go,
// then conntrack forgets where the waiting SYNs were redirected, and only then does the gate open.
func (s *settler) capture(ctx context.Context, e *endpoint.Endpoint, r *attach.Record, want ruleset.Ruleset) error {
	if r.State != attach.Provisional {
		if err := e.Open(r.Attachment, want); err != nil {
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
		// In a container /proc/sys is read-only. For most pods the plugin, which runs on the host, has done it.
		s.log.Debug("SYN patience cannot be set: the pod gives up sooner while sluiced is late",
			"attachment", r.String(), "err", err)
	}
	if err := conntrack.ForgetUnanswered(r.Netns); err != nil {
		return err
	}
	return e.Open(r.Attachment, want)
}

// stopCapturing ends the capture of new connections. The rules stay, with every destination excluded, because open
// redirected connections need the kernel's nat: its hooks go with the last nat chain. closeUnused removes the rest.
func stopCapturing(ctx context.Context, r *attach.Record) error {
	nothing := r.Installed.Ruleset
	all := []netip.Prefix{
		netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0),
	}
	nothing.ExcludeCIDRs, nothing.ExcludeSources = all, all
	in, err := ruleset.Apply(ctx, r.Netns, nothing, r.Installed.Backend, r.Installed)
	if err != nil {
		return err
	}
	r.Installed = &in
	return nil
}

// release removes the rules of a provisional pod. Its waiting connections go straight out.
func release(ctx context.Context, r *attach.Record) error {
	if r.Installed == nil {
		return nil
	}
	if err := r.Installed.Remove(ctx, r.Netns, conntrack.ForgetUnansweredHere); err != nil {
		return err
	}
	r.Installed = nil
	return nil
}

// removeRules removes the rules of an attachment that no connection needs any more.
func (s *settler) removeRules(ctx context.Context, e *endpoint.Endpoint, r attach.Record) error {
	if r.Installed == nil {
		return nil
	}
	return s.unlessEnding(ctx, r, func() error {
		if err := r.Installed.Remove(ctx, r.Netns, nil); err != nil {
			return err
		}
		r.Installed = nil
		e.Add(r)
		return s.store.Write(r)
	})
}

// unlessEnding calls do while the plugin does not change the rules of r. It does not if a DEL removes the attachment.
func (s *settler) unlessEnding(ctx context.Context, r attach.Record, do func() error) error {
	unlock, err := s.store.Lock(ctx, r.NetnsID)
	if err != nil {
		return err
	}
	defer unlock()
	if s.isEnding(r) {
		return nil
	}
	return do()
}

// isEnding reports whether a DEL has begun to remove the attachment, or has removed it.
func (s *settler) isEnding(r attach.Record) bool {
	stored, err := s.store.Read(r.ID)
	return errors.Is(err, os.ErrNotExist) || err == nil && stored.State == attach.Removing
}
