package endpoint

import (
	"fmt"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/late"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// longWait is how long a pod's connections wait for the upstream before an event on the pod says so.
const longWait = 10 * time.Second

// sweepBudget bounds the time of each tick in which accept queues are looked at for connections that the app has given
// up. The order of the endpoints changes, so none is left out for long.
const sweepBudget = 50 * time.Millisecond

// Reasons of the events about connections that wait, or have waited too long.
const (
	ReasonWaiting = "SluiceUpstreamLate"
	ReasonReset   = "SluiceConnectionsReset"
	ReasonDirect  = "SluiceConnectionsDirect"
)

// Notice is a warning for the pods of an endpoint. Each reason is given once for each time that the upstream is late.
type Notice struct{ Reason, Message string }

// lateness ends waits of one endpoint's connections, and describes them while the upstream is late.
type lateness struct {
	service *service

	// The zero values of these stand for an upstream that is not late.
	since  time.Time // since when connections wait; zero while none does
	queued late.Queued
	given  map[string]bool // reasons of which a notice was given
}

// Tick ends the wait of connections that the app has given up, or that have waited for longer than their pod's policy
// allows, and calls notify with warnings for the pods. It is called about every second, so waiting times are known to
// about a second.
func (t *Table) Tick(now time.Time, up attach.UpstreamStatus, notify func(*Endpoint, Notice)) {
	sweepUntil := time.Now().Add(sweepBudget)
	for _, e := range t.All() {
		if !e.changing.TryLock() {
			continue // another goroutine has entered it, perhaps for seconds
		}
		s := e.snapshot(attach.Record{})
		s.accepted.Forget()
		queued, err := s.queued() // once: on a full node the system calls of each pod add up
		switch {
		case err == nil && queued == 0:
			e.service.over.Store(0)
		case time.Now().Before(sweepUntil):
			e.service.sweep(s.gate)
		}
		for _, n := range e.lateness.tick(s, queued, err, now, up) {
			if e.lateness.isNew(n) {
				notify(e, n)
			}
		}
		if up.Reason == "" { // neither late nor misconfigured
			e.lateness = lateness{service: e.service}
		}
		e.changing.Unlock()
	}
}

// isNew reports whether no notice was given for that reason since the upstream is late.
func (l *lateness) isNew(n Notice) bool {
	if l.given[n.Reason] {
		return false
	}
	if l.given == nil {
		l.given = map[string]bool{}
	}
	l.given[n.Reason] = true
	return true
}

// tick looks at the connections of s. queued are those in its accept queues, or err if they cannot be counted.
func (l *lateness) tick(s Snapshot, queued int, err error, now time.Time, up attach.UpstreamStatus) []Notice {
	notices := l.directNotices()
	if up.Reason == "" {
		return notices
	}
	switch {
	case err != nil || s.waitingOf(queued) == 0: // the status shows the error
		l.since = time.Time{}
	case l.since.IsZero():
		l.since = now
	case now.Sub(l.since) >= longWait:
		notices = append(notices, Notice{
			ReasonWaiting, fmt.Sprintf("connections wait for the upstream %s: %s", up.Address, up.Reason),
		})
	}
	if s.acceptor == nil || s.policy.Timeout == 0 {
		l.queued.Reset()
		return notices
	}
	count := l.expire(s, now, up)
	if count == 0 || s.policy.Policy == attach.Direct { // directNotices tells of those
		return notices
	}
	return append(notices, l.noticeReset(count, fmt.Sprintf(
		"connections were reset: they had waited for the upstream %s for more than %s: %s",
		up.Address, s.policy.Timeout, up.Reason)))
}

// expire ends the wait of the connections that have waited for longer than the timeout, in the accept queues and for
// the upstream's answer, and counts them.
func (l *lateness) expire(s Snapshot, now time.Time, up attach.UpstreamStatus) int {
	ctx, carrier, _ := l.service.connections()
	if ctx == nil {
		return 0
	}
	cause, expireQueued := late.ErrExpired, (*gate.Listener).Refuse
	if s.policy.Policy == attach.Direct {
		cause = late.ErrDirect
		expireQueued = func(from *gate.Listener) (found, open bool, err error) {
			found, err = carrier.AcceptOne(ctx, &l.service.table.serving, s.gate, from)
			return found, found, err
		}
	}
	count := s.accepted.Expire(s.policy.Timeout, !up.Ready, cause)
	if s.gate != nil {
		count += l.queued.Tick(s.gate, now, s.policy.Timeout, expireQueued)
	}
	return count
}

// directNotices counts the connections that went direct since the last tick, and logs a warning.
func (l *lateness) directNotices() (notices []Notice) {
	_, carrier, pod := l.service.connections()
	if carrier == nil {
		return nil
	}
	results, table := carrier.Take(), l.service.table
	if results.Direct > 0 {
		table.direct.Add(uint64(results.Direct))
		table.log.Warn("connections went direct, without the upstream: they had waited for it for too long",
			"pod", pod, "netnsID", l.service.id.String(), "count", results.Direct)
		notices = append(notices, Notice{ReasonDirect, "connections went to their destinations WITHOUT the upstream: " +
			"they had waited for it for too long"})
	}
	if results.NotExempt > 0 {
		notices = append(notices, l.noticeReset(results.NotExempt, fmt.Sprintf("connections were reset: "+
			"they had waited for the upstream for too long, and could not go direct: %s", results.Err)))
	}
	return notices
}

func (l *lateness) noticeReset(count int, message string) Notice {
	table := l.service.table
	_, _, pod := l.service.connections()
	table.expired.Add(uint64(count))
	table.log.Warn("waiting connections were reset",
		"pod", pod, "netnsID", l.service.id.String(), "count", count, "reason", message)
	return Notice{ReasonReset, message}
}
