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

// Reasons of the events about connections that wait, or have waited too long.
const (
	ReasonWaiting = "SluiceUpstreamLate"
	ReasonReset   = "SluiceConnectionsReset"
	ReasonDirect  = "SluiceConnectionsDirect"
)

// Notice is a warning for the pods of an endpoint. Each reason is given once for each time that the upstream is late.
type Notice struct{ Reason, Message string }

// lateness describes the connections that wait while the upstream is late. Its zero value stands for an upstream that
// is not late.
type lateness struct {
	since  time.Time // since when connections wait; zero while none does
	queued late.Queued
	given  map[string]bool // reasons of which a notice was given
}

// Tick ends the wait of connections that have waited for longer than their pod's policy allows, and calls notify with
// warnings for the pods. It is called about every second; how long a connection has waited is known no better.
func (t *Table) Tick(now time.Time, up attach.UpstreamStatus, notify func(*Endpoint, Notice)) {
	for _, e := range t.All() {
		if !e.changing.TryLock() {
			continue // another goroutine has entered it, perhaps for seconds
		}
		for _, n := range e.tick(now, up) {
			if !e.lateness.given[n.Reason] {
				if e.lateness.given == nil {
					e.lateness.given = map[string]bool{}
				}
				e.lateness.given[n.Reason] = true
				notify(e, n)
			}
		}
		if up.Reason == "" {
			e.lateness = lateness{}
		}
		e.changing.Unlock()
	}
}

func (e *Endpoint) tick(now time.Time, up attach.UpstreamStatus) []Notice {
	notices := e.directNotices()
	if up.Reason == "" { // neither late nor misconfigured
		return notices
	}
	s, policy := e.snapshot(attach.Record{}), e.currentPolicy()
	waiting, err := s.waiting()
	switch {
	case err != nil || waiting == 0: // the status shows the error
		e.lateness.since = time.Time{}
	case e.lateness.since.IsZero():
		e.lateness.since = now
	case now.Sub(e.lateness.since) >= longWait:
		notices = append(notices, Notice{
			ReasonWaiting, fmt.Sprintf("connections wait for the upstream %s: %s", up.Address, up.Reason),
		})
	}
	if s.acceptor == nil || policy.Timeout == 0 {
		e.lateness.queued.Reset()
		return notices
	}
	count := e.expire(s.gate, policy, now, up)
	if count == 0 || policy.Policy == attach.Direct { // directNotices tells of those
		return notices
	}
	return append(notices, e.noticeReset(count, fmt.Sprintf(
		"connections were reset: they had waited for the upstream %s for more than %s: %s",
		up.Address, policy.Timeout, up.Reason)))
}

func (e *Endpoint) currentPolicy() attach.Late {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.policy
}

// expire ends the wait of the connections that have waited for longer than the timeout, in the accept queues of g and
// for the upstream's answer, and counts them.
func (e *Endpoint) expire(g *gate.Gate, policy attach.Late, now time.Time, up attach.UpstreamStatus) int {
	e.mu.Lock()
	ctx, carrier := e.ctx, e.direct
	e.mu.Unlock()
	if ctx == nil {
		return 0
	}
	cause, expireQueued := late.ErrExpired, (*gate.Listener).Refuse
	if policy.Policy == attach.Direct {
		cause = late.ErrDirect
		expireQueued = func(l *gate.Listener) (bool, error) { return carrier.AcceptOne(ctx, &e.table.serving, g, l) }
	}
	count := e.accepted.Expire(policy.Timeout, !up.Ready, cause)
	if g != nil {
		count += e.lateness.queued.Tick(g, now, policy.Timeout, expireQueued)
	}
	return count
}

// directNotices counts the connections that went direct since the last tick, and says so loudly.
func (e *Endpoint) directNotices() (notices []Notice) {
	e.mu.Lock()
	carrier := e.direct
	e.mu.Unlock()
	if carrier == nil {
		return nil
	}
	results := carrier.Take()
	if results.Direct > 0 {
		e.table.direct.Add(uint64(results.Direct))
		e.table.log.Warn("connections went direct, without the upstream: they had waited for it for too long",
			"netnsID", e.ID.String(), "count", results.Direct)
		notices = append(notices, Notice{ReasonDirect, "connections went to their destinations WITHOUT the upstream: " +
			"they had waited for it for too long"})
	}
	if results.NotExempt > 0 {
		notices = append(notices, e.noticeReset(results.NotExempt, fmt.Sprintf("connections were reset: "+
			"they had waited for the upstream for too long, and could not go direct: %s", results.Err)))
	}
	return notices
}

func (e *Endpoint) noticeReset(count int, message string) Notice {
	e.table.expired.Add(uint64(count))
	e.table.log.Warn("waiting connections were reset", "netnsID", e.ID.String(), "count", count, "reason", message)
	return Notice{ReasonReset, message}
}
