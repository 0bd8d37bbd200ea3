package agent

import (
	"context"
	"time"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// Dissolve releases every pod of this node, and captures none from then on. New connections of the pods go straight
// out, and so do those that wait, for a decision or for the upstream. Connections that the upstream has go on. Dissolve
// returns when these have ended and no rules are left, or another daemon has taken over. After drainTimeout, or when
// ctx ends, it removes the rules all the same, which resets the rest. Run goes on meanwhile.
func (a *Agent) Dissolve(ctx context.Context) {
	a.settler.dissolving.Store(true)
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	again := time.NewTicker(reconcileInterval)
	defer again.Stop()
	for {
		a.Reconsider(ctx) // at each turn: an ADD that had begun before may end late
		a.CleanUp(ctx)
		if a.isDissolved() {
			return
		}
		select {
		case <-again.C:
		case <-a.tenure.Succeeded():
			return
		case <-ctx.Done():
			_ = a.tenure.Do(func() error {
				a.removeAllRules(context.WithoutCancel(ctx))
				return nil
			})
			return
		}
	}
}

// isDissolved reports whether no rules and no gate are left.
func (a *Agent) isDissolved() bool {
	for _, e := range a.table.All() {
		if !e.IsFree() {
			return false
		}
	}
	return true
}

// removeAllRules removes the rules and the gates of all pods, and so resets connections.
func (a *Agent) removeAllRules(ctx context.Context) {
	for _, e := range a.table.All() {
		e := a.table.Enter(e.ID)
		a.free(ctx, e)
		e.Leave()
	}
}

// free removes the rules and the gate of e. The caller has entered e.
func (a *Agent) free(ctx context.Context, e *endpoint.Endpoint) {
	for _, r := range e.Records() {
		a.recordTrouble(r, a.settler.removeRules(ctx, e, r))
	}
	e.Shut()
}

// dissolved is the decision about every attachment since Dissolve was called. A connection that waits for the upstream
// goes direct at the next tick: the upstream may be removed together with sluice.
var dissolved = attach.Decision{
	Reason: "sluice is being removed from this node",
	Late:   attach.Late{Policy: attach.Direct, Timeout: time.Nanosecond},
}
