package endpoint

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/late"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Snapshot is one attachment as it is at a moment, with the means to count its connections without a lock.
type Snapshot struct {
	record   attach.Record
	policy   attach.Late
	trouble  string
	stopped  map[ruleset.Cause]uint64
	bypassed bool
	gate     *gate.Gate
	acceptor Acceptor
	accepted *late.Accepted
	over     *atomic.Int64 // see service
}

// Snapshots returns a snapshot of every attachment, in no order.
func (t *Table) Snapshots() []Snapshot {
	var all []Snapshot
	for _, e := range t.All() {
		for _, r := range e.Records() {
			all = append(all, e.snapshot(r))
		}
	}
	return all
}

func (e *Endpoint) snapshot(r attach.Record) Snapshot {
	e.mu.Lock()
	snapshot := Snapshot{
		record: r, policy: e.policy, trouble: e.trouble, stopped: e.stopped, bypassed: e.bypassed,
		accepted: &e.service.accepted, over: &e.service.over,
	}
	e.mu.Unlock()
	e.service.mu.Lock()
	defer e.service.mu.Unlock()
	snapshot.gate, snapshot.acceptor = e.service.gate, e.service.acceptor
	return snapshot
}

// Status describes every attachment, sorted by pod.
func (t *Table) Status() []attach.AttachmentStatus {
	all := []attach.AttachmentStatus{}
	for _, s := range t.Snapshots() {
		a, counts := s.Status(), s.Counts()
		a.Open, a.Bytes = counts.Open, counts.Bytes
		all = append(all, a)
	}
	slices.SortFunc(all, func(x, y attach.AttachmentStatus) int {
		return slices.Compare([]string{x.Pod, x.Attachment}, []string{y.Pod, y.Attachment})
	})
	return all
}

// Status describes the attachment, apart from the counts that take time to find.
func (s Snapshot) Status() attach.AttachmentStatus {
	r := s.record
	a := attach.AttachmentStatus{Pod: r.Pod.String(), Attachment: r.ID.String(), State: r.State, Netns: r.Netns}
	if r.Installed != nil {
		a.Backend, a.Wall = r.Installed.Backend, string(r.Installed.Wall)
		a.Notes = append(a.Notes, shortcomings(*r.Installed)...)
	}
	for cause, n := range s.stopped {
		if n > 0 {
			if a.Stopped == nil {
				a.Stopped = map[string]uint64{}
			}
			a.Stopped[string(cause)] = n
		}
	}
	if r.State == attach.Provisional && r.Installed != nil && !r.Installed.Expires.IsZero() {
		a.Notes = append(a.Notes, expiry(r.Installed.Expires, time.Now()))
	}
	if note := leftBefore(r); note != "" {
		a.Notes = append(a.Notes, note)
	}
	if r.State == attach.Adding {
		a.Notes = append(a.Notes, "its ADD has not finished")
	}
	if r.State == attach.Captured && s.policy.Policy == attach.Direct && s.policy.Timeout > 0 {
		a.Notes = append(a.Notes, fmt.Sprintf(
			"direct: connections go around the upstream when it is late by more than %s", s.policy.Timeout))
	}
	if s.bypassed && r.State == attach.Captured {
		a.State = attach.Passed // the rules are there, and are passed by
	}
	if s.trouble != "" {
		a.Notes = append(a.Notes, s.trouble)
	}
	var err error
	if a.Waiting, err = s.waiting(); err != nil {
		a.Notes = append(a.Notes, err.Error())
	}
	return a
}

// leftBefore says how many packets left while a provisional capture had expired.
func leftBefore(r attach.Record) string {
	left := fmt.Sprintf("%d packets left around the upstream before, while its labels were not known", r.Uncaptured)
	switch {
	case r.Uncaptured == 0:
		return ""
	case r.State == attach.Captured:
		return "captured late: " + left
	case r.State == attach.Provisional:
		return "held late: " + left
	}
	return ""
}

// expiry says until when a provisional capture holds.
func expiry(expires, now time.Time) string {
	if now.Before(expires) {
		return "held until " + expires.Format(time.RFC3339) + " at most, while its labels are not known"
	}
	return "NOT held since " + expires.Format(time.RFC3339) + ", because its labels did not become known in time: " +
		"its TCP goes around the upstream"
}

// shortcomings says how the rules fall short of those on a recent kernel.
func shortcomings(in ruleset.Installed) (notes []string) {
	if !in.SYNGate {
		notes = append(notes, "no SYN gate, because this kernel lacks the socket match: "+
			"connections are refused while sluiced is down")
	}
	switch in.Wall {
	case ruleset.WallFull:
	case ruleset.WallRouted:
		notes = append(notes, "the wall does not see packet sockets, because this kernel has no nftables hook for "+
			"frames (Linux 5.16): they go around the upstream")
	case ruleset.WallNone:
		notes = append(notes, "no wall, because this kernel lacks nftables: segments of connections that the kernel "+
			"has forgotten, and packet sockets, go around the upstream")
	}
	if in.Ruleset.KeepOlder {
		notes = append(notes, "captured while it ran, or by a version without the wall: older connections go on "+
			"around the upstream, and of TCP only SYNs are stopped")
	}
	return notes
}

// waiting counts the connections that wait to be accepted, and those that wait for the upstream's answer. It leaves out
// those that the app has given up, as far as the last tick saw.
func (s Snapshot) waiting() (int, error) {
	queued, err := s.queued()
	return s.waitingOf(queued), err
}

// waitingOf is waiting with that many connections in the accept queues.
func (s Snapshot) waitingOf(queued int) int {
	return s.accepted.Len() + max(queued-int(s.over.Load()), 0)
}

// queued counts all connections in the accept queues.
func (s Snapshot) queued() (int, error) {
	if s.gate == nil {
		return 0, nil
	}
	n, err := s.gate.Queued()
	if errors.Is(err, os.ErrClosed) {
		err = nil // closed since the snapshot
	}
	return n, err
}

// Counts returns the connections that do not wait any more. Connections that came through a gate go on when capture has
// ended.
func (s Snapshot) Counts() sockdiag.Counts {
	if s.acceptor == nil {
		return sockdiag.Counts{}
	}
	return s.acceptor.Counts()
}
