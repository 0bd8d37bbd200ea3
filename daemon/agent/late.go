package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/direct"
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

// attend tells the pods whose connections have waited for long, and ends the patience of those that have waited for
// longer than they are to. It is called every second or so: how long a connection has waited is known no better.
func (a *Agent) attend(now time.Time) {
	up := a.upstream.Status()
	late := up.Reason != ""
	for _, n := range a.all() {
		if !n.changing.TryLock() {
			continue // somebody is at it, perhaps for seconds
		}
		a.tellDirect(n)
		if !late {
			n.late = lateness{}
		} else {
			a.mu.Lock()
			t, ctx, policy := n.traffic(), n.ctx, n.policy
			a.mu.Unlock()
			a.tellLate(n, t, now, up)
			if t.acceptor != nil && ctx != nil && policy.Timeout > 0 {
				a.expire(ctx, n, t, policy, now, up)
			} else {
				n.late.arrived = nil
			}
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
	if n.late.told[reason] || a.isRetired() { // who has retired speaks to the API server no more
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

// expire ends the wait of what has waited for longer than the timeout, at its gate and for an answer. What goes direct does
// so until ctx ends.
func (a *Agent) expire(ctx context.Context, n *netns, t traffic, policy attach.Late, now time.Time, up attach.UpstreamStatus) {
	var went func(error)
	end := (*gate.Listener).Refuse
	if policy.Policy == attach.Direct {
		went = n.direct.went
		atOnce, cancel := context.WithCancel(ctx)
		cancel() // nobody here waits for a descriptor
		end = func(l *gate.Listener) (bool, error) {
			conn, err := l.Accept(atOnce)
			if errors.Is(err, context.Canceled) { // there was none, and it was reset
				went(fmt.Errorf("%w: out of file descriptors", direct.ErrNotExempt))
			}
			if conn == nil {
				return false, err
			}
			a.serving.Go(func() { t.acceptor.Direct(ctx, t.gate, l, conn, went) })
			return true, nil
		}
	}
	count := t.acceptor.Expire(policy.Timeout, went)
	if t.gate != nil {
		count += n.late.expireQueued(t.gate, now, policy.Timeout, end)
	}
	if count > 0 && went == nil {
		a.tellExpired(n, count, fmt.Sprintf("connections were reset: they had waited for the upstream %s for more than %s: %s", up.Address, policy.Timeout, up.Reason))
	}
}

func (a *Agent) tellExpired(n *netns, count int, message string) {
	a.expired.Add(uint64(count))
	a.log.Warn("captured connections are lost", "why", message, "netns", n.id.String(), "count", count)
	a.tellOnce(n, reasonExpired, message)
}

// directs is what became of the connections of a netns that were to go direct, since the last look.
type directs struct {
	mu     sync.Mutex
	count  int
	failed int // to be let out; what the destination says is no failure here
	err    error
}

// went is told of each of them.
func (d *directs) went(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err == nil:
		d.count++
	case errors.Is(err, direct.ErrNotExempt):
		d.failed++
		d.err = err
	}
}

func (d *directs) take() (count, failed int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	count, failed, err = d.count, d.failed, d.err
	d.count, d.failed, d.err = 0, 0, nil
	return count, failed, err
}

// tellDirect says loudly what has gone around the upstream.
func (a *Agent) tellDirect(n *netns) {
	count, failed, err := n.direct.take()
	if count > 0 {
		const message = "connections went to their destinations WITHOUT the upstream: they had waited for it for too long"
		a.direct.Add(uint64(count))
		a.log.Warn(message, "netns", n.id.String(), "count", count)
		a.tellOnce(n, reasonDirect, message)
	}
	if failed > 0 {
		a.tellExpired(n, failed, fmt.Sprintf("connections were reset: they had waited for the upstream for too long, and could not go direct: %s", err))
	}
}

// expireQueued ends the wait of connections at the head of the accept queues. Nobody else takes any while the upstream is
// late; if somebody did all the same, it was from the head.
func (l *lateness) expireQueued(g *gate.Gate, now time.Time, timeout time.Duration, end func(*gate.Listener) (bool, error)) (count int) {
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
			if was, err := end(listener); err != nil || !was {
				break
			}
			known = known[1:]
			count++
		}
		arrived[listener] = known
	}
	l.arrived = arrived
	return count
}
