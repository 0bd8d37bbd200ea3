// Package agent keeps the node's attachments: it decides about them, opens and closes their gates, takes them
// up again after a restart, and notices those that went without a word.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/relay"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// reconcileInterval is how often records and netns are looked at for what nobody told.
const reconcileInterval = time.Second

// Decide says what becomes of an attachment, given every interface through which its container is
// attached. An error is final for this attachment as it is.
type Decide func(a attach.Attachment, interfaces []string) (attach.Decision, error)

// Agent is the daemon's part of the conversation with the plugin.
type Agent struct {
	decide   Decide
	store    attach.Store
	upstream *upstream.Upstream
	relay    *relay.Relay
	log      *slog.Logger
	serving  sync.WaitGroup // relays, one for each gate

	mu      sync.Mutex
	netns   map[attach.NetnsID]*netns
	byID    map[attach.ID]*netns
	watched time.Time // the state of the record directory at the last look
}

// netns is a network namespace with everything attached to it; nearly always one attachment.
type netns struct {
	id          attach.NetnsID
	attachments map[attach.ID]*attach.Record
	gate        *gate.Gate // nil when not captured, or when it could not be opened
	pod         *relay.Pod
	stop        context.CancelFunc
	trouble     string // why it is not as its record says
}

// New makes an agent without attachments.
func New(decide Decide, store attach.Store, up *upstream.Upstream, log *slog.Logger) *Agent {
	return &Agent{
		decide: decide, store: store, upstream: up, relay: relay.New(up, log), log: log,
		netns: map[attach.NetnsID]*netns{}, byID: map[attach.ID]*netns{},
	}
}

// Run takes up what is recorded and then keeps up with it until ctx ends. It closes every gate before it
// returns; the rules stay, so connections wait for the next daemon.
func (a *Agent) Run(ctx context.Context) error {
	tick := time.NewTicker(reconcileInterval)
	defer tick.Stop()
	for ctx.Err() == nil {
		a.Reconcile(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	a.mu.Lock()
	for _, n := range a.netns {
		a.shut(n)
	}
	a.mu.Unlock()
	a.serving.Wait()
	return nil
}

// Attach decides about an attachment and, to capture it, opens its gate.
func (a *Agent) Attach(at attach.Attachment) (attach.Decision, error) {
	if err := at.Validate(); err != nil {
		return attach.Decision{}, &attach.RefusedError{Message: err.Error(), Final: true}
	}
	id, err := attach.IdentifyNetns(at.Netns)
	if err != nil {
		return attach.Decision{}, &attach.RefusedError{Message: err.Error(), Final: errors.Is(err, attach.ErrNetnsGone)}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	old := a.byID[at.ID]
	if old != nil && old.id != id {
		a.forget(at.ID)
		old = nil
	}
	d, err := a.decide(at, a.interfaces(id, at.IfName))
	if err != nil {
		a.log.Warn("attachment refused", "attachment", at.String(), "err", err)
		return attach.Decision{}, &attach.RefusedError{Message: err.Error(), Final: true}
	}
	n := a.join(&attach.Record{Attachment: at, NetnsID: id, State: state(d)})
	if d.Capture {
		if err := a.open(n); err != nil {
			if old == nil {
				a.forget(at.ID)
			}
			a.log.Error("attachment refused", "attachment", at.String(), "err", err)
			return attach.Decision{}, &attach.RefusedError{Message: err.Error()}
		}
	}
	if !d.Capture {
		a.shut(n)
	}
	a.log.Info("attached", "attachment", at.String(), "state", string(state(d)), "reason", d.Reason)
	return d, nil
}

func state(d attach.Decision) attach.State {
	if d.Capture {
		return attach.Captured
	}
	return attach.Passed
}

// Detach forgets an attachment and its record; one that is not known is no error.
func (a *Agent) Detach(id attach.ID) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := a.byID[id]; n != nil {
		a.log.Info("detached", "attachment", n.attachments[id].String())
	}
	a.forget(id)
	return a.store.Remove(id)
}

// join adds an attachment to its netns. It is for who holds mu, as everything below.
func (a *Agent) join(r *attach.Record) *netns {
	n := a.netns[r.NetnsID]
	if n == nil {
		n = &netns{id: r.NetnsID, attachments: map[attach.ID]*attach.Record{}}
		a.netns[r.NetnsID] = n
	}
	n.attachments[r.ID] = r
	a.byID[r.ID] = n
	return n
}

// forget drops an attachment, and closes the gate behind the last one in a netns.
func (a *Agent) forget(id attach.ID) {
	n := a.byID[id]
	if n == nil {
		return
	}
	delete(a.byID, id)
	delete(n.attachments, id)
	if len(n.attachments) == 0 {
		a.shut(n)
		delete(a.netns, n.id)
	}
}

// open opens the gate of n and starts to serve it; an open one stays.
func (a *Agent) open(n *netns) error {
	if n.gate != nil {
		return nil
	}
	r := n.any()
	g, err := gate.Open(r.Netns)
	if err != nil {
		return err
	}
	n.gate = g
	n.pod = &relay.Pod{Name: r.Pod, IPs: r.IPs}
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	a.serving.Go(func() { a.relay.Serve(ctx, g, n.pod) })
	return nil
}

// shut closes the gate of n and ends what is relayed for it.
func (a *Agent) shut(n *netns) {
	if n.gate == nil {
		return
	}
	n.stop()
	if err := n.gate.Close(); err != nil {
		a.log.Error("closing gate", "netns", n.any().Netns, "err", err)
	}
	n.gate = nil
}

// interfaces are those through which a netns is attached, with the one that is about to be.
func (a *Agent) interfaces(id attach.NetnsID, ifName string) []string {
	names := map[string]bool{ifName: true}
	if n := a.netns[id]; n != nil {
		for other := range n.attachments {
			names[other.IfName] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// any is one of the attachments: they differ in nothing that matters to the gate.
func (n *netns) any() *attach.Record {
	for _, r := range n.attachments {
		return r
	}
	return &attach.Record{}
}

// Reconcile takes up records that are not known yet, resolves provisional ones, and drops the attachments
// whose netns is gone.
func (a *Agent) Reconcile(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, n := range a.byID {
		a.dropIfGone(n, id)
	}
	changed, err := a.store.Changed(a.watched)
	if err != nil || changed.Equal(a.watched) {
		a.complain(err)
		return
	}
	records, err := a.store.List()
	a.complain(err)
	settled := true
	for _, r := range records {
		err := a.takeUp(ctx, r)
		settled = settled && err == nil
		a.note(r, err)
	}
	a.complain(a.store.Sweep(time.Minute))
	if settled {
		a.watched = changed
	}
}

// note remembers, and says once, why an attachment is not as it should be.
func (a *Agent) note(r attach.Record, err error) {
	n := a.byID[r.ID]
	if n == nil {
		a.complain(err)
		return
	}
	was := n.trouble
	n.trouble = ""
	if err != nil {
		n.trouble = err.Error()
	}
	switch {
	case n.trouble == was:
	case err != nil:
		a.log.Error("attachment is not settled; will try again", "attachment", r.String(), "err", err)
	default:
		a.log.Info("attachment is settled after all", "attachment", r.String())
	}
}

func (a *Agent) complain(err error) {
	if err != nil {
		a.log.Error("attachment records", "err", err)
	}
}

// dropIfGone notices a DEL that never came. While a gate is open its netns cannot have been replaced by one
// with the same inode; the look without the cookie is enough.
func (a *Agent) dropIfGone(n *netns, id attach.ID) {
	r := n.attachments[id]
	now, err := attach.StatNetns(r.Netns)
	if err == nil && now.SameFile(n.id) || err != nil && !errors.Is(err, attach.ErrNetnsGone) {
		return
	}
	a.log.Warn("netns went without a DEL", "attachment", r.String(), "netns", r.Netns)
	a.forget(id)
	a.complain(a.store.Remove(id))
}

// takeUp brings what is held in line with a record that somebody else wrote.
func (a *Agent) takeUp(ctx context.Context, r attach.Record) error {
	if n := a.byID[r.ID]; n != nil && n.id == r.NetnsID && r.State != attach.Provisional && (n.gate != nil) == (r.State == attach.Captured) {
		n.attachments[r.ID] = &r // it may tell more than was known when it was attached
		return nil
	}
	if now, err := attach.IdentifyNetns(r.Netns); errors.Is(err, attach.ErrNetnsGone) || err == nil && now != r.NetnsID {
		a.log.Info("record dropped: its netns is gone", "attachment", r.String(), "netns", r.Netns)
		a.forget(r.ID)
		return a.store.Remove(r.ID)
	} else if err != nil {
		return err
	}
	n := a.join(&r)
	switch r.State {
	case attach.Provisional:
		return a.resolve(ctx, n, r)
	case attach.Captured:
		return a.open(n)
	}
	return nil
}

// resolve settles a provisional attachment. The order matters: first what is excluded leaves the rules, then
// the kernel forgets where it sent the SYNs that still wait, and only then does anybody listen. So each of
// those connections ends where it would have gone with the daemon there from the start.
func (a *Agent) resolve(ctx context.Context, n *netns, r attach.Record) error {
	if r.Installed == nil {
		return errors.New("its record has no ruleset")
	}
	d, err := a.decide(r.Attachment, a.interfaces(n.id, r.IfName))
	if err != nil {
		return fmt.Errorf("it stays provisional, and its connections wait: %w", err)
	}
	if d.Capture {
		in, err := ruleset.Apply(ctx, r.Netns, *d.Ruleset, r.Installed.Backend, r.Installed)
		if err != nil {
			return err
		}
		if err := forgetWaiting(r.Netns); err != nil {
			return err
		}
		if err := a.open(n); err != nil {
			return err
		}
		r.Installed = &in
	} else {
		if err := r.Installed.Remove(ctx, r.Netns, forgetWaitingHere); err != nil {
			return err
		}
		r.Installed = nil
	}
	r.State = state(d)
	a.log.Info("provisional attachment settled", "attachment", r.String(), "state", string(r.State), "reason", d.Reason)
	if _, err := a.store.Read(r.ID); errors.Is(err, os.ErrNotExist) {
		return nil // a DEL is on its way
	}
	a.join(&r)
	if err := a.store.Write(r); err != nil || r.Installed == nil {
		return err
	}
	return a.store.Share(r.ID, r.NetnsID, r.Installed)
}

// Status describes the attachments, by pod.
func (a *Agent) Status() attach.Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := attach.Status{Upstream: a.upstream.Status(), Attachments: []attach.AttachmentStatus{}}
	for id, n := range a.byID {
		s.Attachments = append(s.Attachments, n.status(id))
	}
	slices.SortFunc(s.Attachments, func(x, y attach.AttachmentStatus) int {
		return slices.Compare([]string{x.Pod, x.Attachment}, []string{y.Pod, y.Attachment})
	})
	return s
}

func (n *netns) status(id attach.ID) attach.AttachmentStatus {
	r := n.attachments[id]
	s := attach.AttachmentStatus{Pod: r.Pod.String(), Attachment: id.String(), State: r.State, Netns: r.Netns}
	if r.Installed != nil {
		s.Backend = r.Installed.Backend
		if !r.Installed.SYNGate {
			s.Notes = append(s.Notes, "no SYN gate: this kernel lacks the socket match; refuses connections while sluiced is down")
		}
	}
	if n.trouble != "" {
		s.Notes = append(s.Notes, n.trouble)
	}
	if n.gate == nil {
		return s
	}
	queued, err := n.gate.Queued()
	if err != nil {
		s.Notes = append(s.Notes, err.Error())
	}
	c := n.pod.Counts()
	s.Waiting, s.Open, s.Bytes = queued+c.Waiting, c.Open, c.Bytes
	return s
}
