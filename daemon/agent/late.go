package agent

import (
	"fmt"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// longWait is how long a pod's connections wait for the upstream before the pod's people are told.
const longWait = 10 * time.Second

// lateness is what is known of the connections of one netns that wait for the upstream.
type lateness struct {
	since time.Time // since when some do; zero while none does
	// arrived is when those in the accept queues came, the first first. The kernel does not say; it is looked at
	// every second.
	arrived map[*gate.Listener][]time.Time
	told    map[string]bool // events about this time that the upstream is late
}

// attend tells the pods whose connections have waited for long, and resets those that have waited for longer than they
// are to. It is called every second or so: how long a connection has waited is known no better.
func (a *Agent) attend(now time.Time) {
	up := a.upstream.Status()
	late := up.Reason != ""
	for _, n := range a.all() {
		if !n.changing.TryLock() {
			continue // somebody is at it, perhaps for seconds
		}
		if !late {
			n.late = lateness{}
		} else {
			a.mu.Lock()
			t, timeout := n.traffic(), n.timeout
			a.mu.Unlock()
			a.tellLate(n, t, now, up)
			a.expire(n, t, timeout, now, up)
		}
		n.changing.Unlock()
	}
}

// tellLate notes since when connections wait, and makes an event if that is long ago.
func (a *Agent) tellLate(n *netns, t traffic, now time.Time, up attach.UpstreamStatus) {
	waiting, err := t.waiting()
	switch {
	case err != nil || waiting == 0: // the status shows the error
		n.late.since = time.Time{}
	case n.late.since.IsZero():
		n.late.since = now
	case now.Sub(n.late.since) >= longWait:
		a.tellOnce(n, reasonWaiting, fmt.Sprintf("connections wait for the upstream %s: %s", up.Address, up.Reason))
	}
}

// tellOnce makes an event for the pods of n, once for each time that the upstream is late.
func (a *Agent) tellOnce(n *netns, reason, message string) {
	if n.late.told[reason] {
		return
	}
	if n.late.told == nil {
		n.late.told = map[string]bool{}
	}
	n.late.told[reason] = true
	for _, r := range a.records(n) {
		a.source.Report(r.Pod, true, reason, message)
	}
}

// expire resets what has waited for longer than the timeout, at its gate and for an answer.
func (a *Agent) expire(n *netns, t traffic, timeout time.Duration, now time.Time, up attach.UpstreamStatus) {
	if timeout == 0 || t.acceptor == nil {
		n.late.arrived = nil
		return
	}
	count := t.acceptor.Expire(timeout)
	if t.gate != nil {
		count += n.late.expireQueued(t.gate, now, timeout)
	}
	if count == 0 {
		return
	}
	a.expired.Add(uint64(count))
	a.log.Warn("connections reset: they have waited too long", "netns", n.id.String(), "count", count, "timeout", timeout.String())
	a.tellOnce(n, reasonExpired, fmt.Sprintf("connections were reset: they had waited for the upstream %s for more than %s: %s", up.Address, timeout, up.Reason))
}

// expireQueued resets connections at the head of the accept queues. Nobody else takes any while the upstream is late; if
// somebody did all the same, it was from the head.
func (l *lateness) expireQueued(g *gate.Gate, now time.Time, timeout time.Duration) (count int) {
	arrived := map[*gate.Listener][]time.Time{}
	for _, listener := range g.Listeners {
		queued, err := listener.Queued()
		if err != nil {
			continue // closed meanwhile
		}
		known := l.arrived[listener]
		known = known[max(0, len(known)-queued):]
		for len(known) < queued {
			known = append(known, now)
		}
		for len(known) > 0 && now.Sub(known[0]) >= timeout {
			conn, err := listener.Accept()
			if err != nil || conn == nil {
				break
			}
			gate.Reset(conn)
			known = known[1:]
			count++
		}
		arrived[listener] = known
	}
	l.arrived = arrived
	return count
}
