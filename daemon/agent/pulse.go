package agent

import (
	"fmt"
	"sync/atomic"
	"time"
)

// hangsAfter is the time without a beat after which an agent hangs. The longest step between two beats is one pod,
// which may wait for the API server and for the plugin.
const hangsAfter = 2 * time.Minute

// pulse tells whether the agent goes on. Its zero value is that of an agent that has not begun, which cannot hang.
type pulse struct {
	last atomic.Int64 // when the agent has last gone on, in Unix seconds; 0 before it begins
}

func (p *pulse) beat() { p.last.Store(time.Now().Unix()) }

// check returns an error if the agent hangs at now.
func (p *pulse) check(now time.Time) error {
	last := p.last.Load()
	if still := now.Sub(time.Unix(last, 0)); last != 0 && still > hangsAfter {
		return fmt.Errorf("this sluiced hangs: it has not looked after the node's pods for %s",
			still.Round(time.Second))
	}
	return nil
}

// Alive returns an error if the agent hangs. One that has handed over does not: kubelet would start it again, and it
// would take over from its successor.
func (a *Agent) Alive() error {
	if a.tenure.IsSucceeded() {
		return nil
	}
	return a.pulse.check(time.Now())
}
