package endpoint

import (
	"context"
	"errors"
	"os"

	"github.com/sluice-cni/sluice/daemon/direct"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// prepareLocked makes the acceptor, once.
func (e *Endpoint) prepareLocked(at attach.Attachment) {
	if e.acceptor != nil {
		return
	}
	e.direct = direct.NewCarrier(&e.joined, e.table.log.With("pod", at.Pod.String()))
	e.acceptor = e.table.accept(Served{
		Netns: e.ID, Pod: at.Pod, IPs: at.IPs, Accepted: &e.accepted, Joined: &e.joined, Direct: e.direct,
	})
}

// serveLocked begins to accept at g, which replaces the gate that e had, if any. The connections of that go on.
func (e *Endpoint) serveLocked(g *gate.Gate) error {
	if e.gate != nil {
		e.refuse(ErrHandedOver)
		if err := errors.Join(g.Pause(), g.Resume()); err != nil { // ends accepting at the listeners that both have
			return err
		}
	}
	if e.ctx == nil {
		e.ctx, e.stop = context.WithCancel(context.Background())
	}
	e.gate = g
	accepting, refuse := context.WithCancelCause(e.ctx)
	e.refuse = refuse
	ctx, acceptor := e.ctx, e.acceptor
	e.table.serving.Go(func() { acceptor.Serve(ctx, accepting, g) })
	return nil
}

// pause stops accepting, and returns the listeners, or nil if e has no gate.
func (e *Endpoint) pause() ([]*os.File, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gate == nil {
		return nil, nil
	}
	e.refuse(ErrHandedOver)
	return e.gate.Files(), e.gate.Pause()
}

// resume undoes pause.
func (e *Endpoint) resume() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gate == nil {
		return nil
	}
	return e.serveLocked(e.gate)
}

// release closes this process's listeners.
func (e *Endpoint) release() {
	e.mu.Lock()
	g := e.gate
	e.gate = nil
	if e.refuse != nil {
		e.refuse(ErrHandedOver)
	}
	e.mu.Unlock()
	if g == nil {
		return
	}
	if err := g.Close(); err != nil {
		e.table.log.Error("closing a gate failed", "netnsID", e.ID.String(), "err", err)
	}
}

// endConnections resets the connections that came through the gate.
func (e *Endpoint) endConnections() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stop != nil {
		e.stop()
		e.ctx, e.stop = nil, nil
	}
}
