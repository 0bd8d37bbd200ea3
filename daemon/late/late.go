// Package late ends the wait of captured connections that have waited for the upstream for longer than their pod's
// timeout: they are reset, or go direct. It also ends the wait of connections that the app has given up.
package late

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
)

// Causes of the end of a wait. They are the cause of the context that Add returns.
var (
	// ErrExpired means that the connection is to be reset.
	ErrExpired = errors.New("the connection has waited for longer than its pod's timeout")
	// ErrDirect means that the connection is to go to its destination without the upstream.
	ErrDirect = errors.New("the connection has waited for longer than its pod's timeout, and goes direct")
)

// Accepted is the connections of one pod that were accepted and that the upstream has not answered for yet. Its zero
// value is empty.
type Accepted struct {
	mu    sync.Mutex // guards waits and their fields; no lock is taken under it
	waits map[*Wait]struct{}
}

// Wait is one connection's wait for the upstream.
type Wait struct {
	list   *Accepted
	since  time.Time
	cancel context.CancelCauseFunc
	gone   func() error
	// misconfigured is set while the upstream is there but answers in a way that an operator has to mend.
	misconfigured bool
}

// Add begins a wait. gone returns an error once the app has given up the connection. The context ends with ctx, when
// the wait expires (its cause is ErrExpired or ErrDirect), at the next Forget when gone returns an error (its cause),
// or with Done.
func (a *Accepted) Add(ctx context.Context, gone func() error) (context.Context, *Wait) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &Wait{list: a, since: time.Now(), cancel: cancel, gone: gone}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waits == nil {
		a.waits = map[*Wait]struct{}{}
	}
	a.waits[w] = struct{}{}
	return ctx, w
}

// Misconfigured records that the upstream refuses the connection by its configuration. Such a connection expires even
// though the upstream is there.
func (w *Wait) Misconfigured() {
	w.list.mu.Lock()
	defer w.list.mu.Unlock()
	w.misconfigured = true
}

// Done ends the wait.
func (w *Wait) Done() {
	w.cancel(nil)
	w.list.mu.Lock()
	defer w.list.mu.Unlock()
	delete(w.list.waits, w)
}

// Len counts the waits.
func (a *Accepted) Len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.waits)
}

// Forget ends the waits of connections that are gone.
func (a *Accepted) Forget() {
	a.mu.Lock()
	waits := slices.Collect(maps.Keys(a.waits))
	a.mu.Unlock()
	for _, w := range waits { // without the lock: gone asks the kernel
		if err := w.gone(); err != nil {
			w.cancel(err)
			a.mu.Lock()
			delete(a.waits, w)
			a.mu.Unlock()
		}
	}
}

// Expire ends every wait that has lasted longer than timeout, with that cause, and counts them. While the upstream is
// not late, a connection that it works on does not wait for it; only misconfigured waits expire then.
func (a *Accepted) Expire(timeout time.Duration, upstreamLate bool, cause error) (count int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for w := range a.waits {
		if time.Since(w.since) > timeout && (upstreamLate || w.misconfigured) {
			w.cancel(cause)
			delete(a.waits, w) // it counts once
			count++
		}
	}
	return count
}

// Queued remembers since when connections wait in the accept queues of a gate. The kernel does not tell, so each tick
// compares the length of each queue with the length before. It is not safe for concurrent use.
type Queued struct {
	arrivals map[*gate.Listener][]time.Time // the oldest first
}

// Tick looks at the accept queues of g, and calls expire for each connection at the head of a queue that has waited for
// timeout. expire takes the connection from the queue and reports whether there was one, and whether it was still open.
// While the upstream is late nothing else takes connections; if something did, it took them from the head. Tick counts
// the connections that were open.
func (q *Queued) Tick(g *gate.Gate, now time.Time, timeout time.Duration,
	expire func(*gate.Listener) (found, open bool, err error),
) (count int) {
	arrivals := map[*gate.Listener][]time.Time{}
	for _, l := range g.Listeners {
		length, err := l.Queued()
		if err != nil {
			continue // closed meanwhile
		}
		known := q.arrivals[l]
		known = known[max(0, len(known)-length):]
		for len(known) < length {
			known = append(known, now)
		}
		for len(known) > 0 && now.Sub(known[0]) >= timeout {
			found, open, err := expire(l)
			if err != nil || !found {
				break
			}
			known = known[1:]
			if open {
				count++
			}
		}
		arrivals[l] = known
	}
	q.arrivals = arrivals
	return count
}

// Reset forgets all arrivals.
func (q *Queued) Reset() { q.arrivals = nil }
