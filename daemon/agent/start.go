package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/sluice-cni/sluice/daemon/handover"
	"github.com/sluice-cni/sluice/daemon/unixsock"
)

// evictAfter is the grace period before the listeners of another process at a capture port of a captured pod are
// closed. The process may be an older daemon that hangs, or one in the pod. With proxies that return listeners it is
// much longer: a proxy may hang itself, and connections wait safely in its listeners meanwhile.
const evictAfter, evictProxyAfter = 10 * time.Second, 2 * time.Minute

// Start begins the tenure, and returns the listener of the agent socket at path:
//
//  0. The agent socket is made, so that nothing but its rename can fail once the other daemon has given up its pods.
//  1. The daemon that serves the socket, if any, sends its listeners.
//  2. The gates of the pods that were captured are opened with these listeners, or with new ones, and provisional pods
//     are settled. Whether the orchestrator wants something else by now is left to Run: to change the rules of hundreds
//     of pods takes many seconds, and neither the connections nor the other daemon wait for that.
//  3. The other daemon is told that its listeners are served. Its tenure ends.
//  4. The agent socket replaces that of the other daemon. Calls queue there until they are served.
func (a *Agent) Start(ctx context.Context, path string) (net.Listener, error) {
	socket, err := unixsock.Bind("unix", path, a.log)
	if err != nil {
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	if err := a.takeOver(ctx, path); err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	if err := socket.Publish(); err != nil {
		return nil, errors.Join(fmt.Errorf("agent socket: %w", err), socket.Close())
	}
	a.socket = socket
	a.started.Store(true)
	return socket, nil
}

// takeOver is the steps of Start with the daemon that serves the socket at path.
func (a *Agent) takeOver(ctx context.Context, path string) error {
	transfer, err := handover.Take(path)
	switch {
	case errors.Is(err, handover.ErrHangs):
		a.log.Warn("the previous sluiced does not answer; starting without it", "err", err)
		transfer, a.evictFrom = &handover.Transfer{}, time.Now().Add(a.returning)
	case err != nil:
		return err
	case a.returning > 0:
		a.evictFrom = time.Now().Add(evictProxyAfter)
	default:
		a.evictFrom = time.Now().Add(evictAfter)
	}
	a.table.Inherit(transfer.Listeners)
	err = a.tenure.Do(func() error {
		a.reconcile(ctx, gatesOnly)
		return nil
	})
	a.table.DropInherited()
	if err := errors.Join(err, transfer.Confirm()); err != nil {
		return fmt.Errorf("taking over from the sluiced before this one: %w", err)
	}
	return nil
}

// Ready returns an error, for the user, unless this process owns the node's pods.
func (a *Agent) Ready() error {
	switch {
	case !a.started.Load():
		return errors.New("this sluiced has not taken over the node's pods yet")
	case a.tenure.IsSucceeded():
		return errors.New("another sluiced has taken over the node's pods from this one")
	}
	return nil
}

// HandOver gives every gate to the daemon at the other end of conn. If that fails, this daemon goes on serving them.
func (a *Agent) HandOver(conn *net.UnixConn) error {
	err := a.tenure.PassOn(func() error {
		if err := handover.Offer(conn, a.table.Offer); err != nil {
			a.table.Resume()
			return err
		}
		a.table.Release()
		return nil
	})
	switch {
	case errors.Is(err, handover.ErrOver):
		a.log.Info("hand-over refused: this sluiced owns no gates any more")
		return err
	case err != nil:
		a.log.Error("hand-over failed; still serving", "err", err)
		return err
	}
	a.log.Info("handed over to another sluiced; open connections are relayed to their end")
	return nil
}

// yieldIfReplaced ends the tenure if another daemon serves the agent socket by now and has not asked for the gates:
// this daemon has hung for so long that the other one started without it.
func (a *Agent) yieldIfReplaced() {
	if a.socket == nil || !a.socket.Replaced() {
		return
	}
	_ = a.tenure.PassOn(func() error { // the only error is that the tenure has ended already
		a.log.Error("this sluiced hung, and another one runs by now; open connections are relayed to their end")
		a.table.Release()
		return nil
	})
}

// Succeeded is closed when another daemon has taken over.
func (a *Agent) Succeeded() <-chan struct{} { return a.tenure.Succeeded() }

// IsSucceeded reports whether another daemon has taken over.
func (a *Agent) IsSucceeded() bool { return a.tenure.IsSucceeded() }

// Returned takes over the listeners that a proxy holds of a daemon that did not live to hand them over. The proxy says
// of which netns they are. While it holds them, no others can be opened there. Unwanted listeners are closed.
func (a *Agent) Returned(netns string, files []*os.File) {
	err := a.tenure.Do(func() error {
		if a.table.Return(netns, files) {
			a.records.rescan() // opens the gate with them
		}
		return nil
	})
	if err != nil {
		unixsock.Close(files)
	}
}
