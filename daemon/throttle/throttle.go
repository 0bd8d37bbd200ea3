// Package throttle limits the log lines about events that a pod or a proxy can cause at any rate.
package throttle

import (
	"sync"
	"time"
)

// interval is the shortest time between two lines with the same cause.
const interval = 10 * time.Second

// Lines are the log lines about one pod, about the proxies of the node, or about the upstream. Its zero value has
// logged none. Causes are few, and never texts that a pod or a proxy chooses: they are never forgotten.
type Lines struct {
	mu     sync.Mutex // guards causes; no lock is taken under it
	causes map[string]*cause
}

type cause struct {
	logged time.Time
	count  int // of events since then
}

// Due counts an event. It reports whether a line is to be logged now, and for how many events that line stands: this
// one, and those with the same cause since the last line.
func (l *Lines) Due(of string) (count int, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.causes[of]
	if c == nil {
		c = &cause{}
		if l.causes == nil {
			l.causes = map[string]*cause{}
		}
		l.causes[of] = c
	}
	c.count++
	if time.Since(c.logged) < interval {
		return 0, false
	}
	count, c.count, c.logged = c.count, 0, time.Now()
	return count, true
}
