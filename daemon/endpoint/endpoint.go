package endpoint

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/direct"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/late"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/splice"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Acceptor sees to it that the connections of one pod are accepted: it relays them, or hands the listeners to proxies.
type Acceptor interface {
	// Serve returns when g is closed or paused, or accepting ends, and the connections that came through g have ended.
	// The end of ctx resets those connections. If the cause of the end of accepting is ErrHandedOver, the listeners
	// stay open in other processes.
	Serve(ctx, accepting context.Context, g *gate.Gate)
	// Counts returns the connections that do not wait any more. Counting may take milliseconds.
	Counts() sockdiag.Counts
}

// ErrHandedOver is the cause of the end of accepting at a gate that stays open elsewhere.
var ErrHandedOver = errors.New("the gate is handed over")

// Served is one endpoint as its acceptor sees it.
type Served struct {
	Netns attach.NetnsID
	Pod   attach.Pod
	IPs   []netip.Addr
	// Records returns the records of the attachments in the netns as they are now.
	Records func() []attach.Record
	// Policy says where connections may go.
	Policy captured.Policy
	// Accepted, Joined and Direct belong to the endpoint. An acceptor that relays counts its connections in the first
	// two, and gives those that go direct to the third.
	Accepted *late.Accepted
	Joined   *splice.Set
	Direct   *direct.Carrier
}

// Addresses returns the pod's addresses: IPs, and those of its other attachments.
func (s Served) Addresses() []netip.Addr {
	all := slices.Clone(s.IPs)
	for _, r := range s.Records() {
		for _, ip := range r.IPs {
			if !slices.Contains(all, ip) {
				all = append(all, ip)
			}
		}
	}
	return all
}

// Endpoint is a netns with the attachments in it, nearly always one.
type Endpoint struct {
	// ID is the identity of the netns. It does not change.
	ID attach.NetnsID

	table    *Table
	changing sync.Mutex // see the package comment
	lateness lateness   // guarded by changing
	service  *service   // the gate, as it is served; has a lock of its own

	mu          sync.Mutex // guards the fields below
	attachments map[attach.ID]attach.Record
	trouble     string      // why the endpoint is not as its records say
	policy      attach.Late // for connections that wait for the upstream
	stopped     map[ruleset.Cause]uint64
	bypassed    bool // the pod has a network stack of its own
}

// Records returns the records of the attachments.
func (e *Endpoint) Records() []attach.Record {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Values(e.attachments))
}

// Record returns the record of one attachment.
func (e *Endpoint) Record(id attach.ID) (attach.Record, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	r, ok := e.attachments[id]
	return r, ok
}

// Neighbours returns the interfaces through which the netns is attached, and its addresses, both with those of an
// attachment that may be about to be added.
func (e *Endpoint) Neighbours(at attach.Attachment) (interfaces []string, ips []netip.Addr) {
	e.mu.Lock()
	defer e.mu.Unlock()
	names := map[string]bool{at.IfName: true}
	ips = slices.Clone(at.IPs)
	for id, r := range e.attachments {
		names[id.IfName] = true
		ips = append(ips, r.IPs...)
	}
	slices.SortFunc(ips, netip.Addr.Compare)
	return slices.Sorted(maps.Keys(names)), slices.Compact(ips)
}

// Attach carries out a decision as far as the gate is concerned, and adds the attachment. The gate is open when Attach
// returns and the decision is to capture. The caller has entered e, as for every method below that changes it.
func (e *Endpoint) Attach(r attach.Record, d attach.Decision) error {
	if !d.Capture {
		e.Shut()
	} else if err := e.Open(r.Attachment, *d.Ruleset); err != nil {
		return err
	}
	e.SetPolicy(d.Late)
	e.Add(r)
	return nil
}

// Add adds an attachment, or replaces its record.
func (e *Endpoint) Add(r attach.Record) {
	e.mu.Lock()
	e.attachments[r.ID] = r
	e.mu.Unlock()
	e.table.record(r.ID, e, nil)
}

func (e *Endpoint) remove(id attach.ID) (attach.Record, bool) {
	e.mu.Lock()
	r, ok := e.attachments[id]
	delete(e.attachments, id)
	e.mu.Unlock()
	e.table.record(id, nil, e)
	return r, ok
}

// Installed returns the ruleset that is in the netns, or nil.
func (e *Endpoint) Installed() *ruleset.Installed {
	for _, r := range e.Records() {
		if r.Installed != nil {
			return r.Installed
		}
	}
	return nil
}

// Inherit returns r with the properties that never change while the pod lives: those of the ruleset in the netns, and
// the ports of the gate. The gate may be open before the record of the rules that lead to it is known.
func (e *Endpoint) Inherit(r ruleset.Ruleset) ruleset.Ruleset {
	r = r.Inherit(e.Installed())
	if g := e.service.current(); g != nil && g.Ports() != r.CapturePorts() {
		r.Ports = g.Ports()
	}
	return r
}

// SetPolicy sets how long connections may wait for the upstream, and whether they are reset or go direct then.
func (e *Endpoint) SetPolicy(p attach.Late) {
	if p.Policy == attach.Hold { // its timeout is that of ADD
		p = attach.Late{Policy: attach.Queue}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.policy = p
}

// SetStopped records how many packets the wall has stopped.
func (e *Endpoint) SetStopped(counts map[ruleset.Cause]uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = counts
}

// SetBypassed records whether the pod has a network stack of its own, so that its connections do not pass the rules.
func (e *Endpoint) SetBypassed(bypassed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.bypassed = bypassed
}

// SetTrouble records why the endpoint is not as its records say; nil for no reason. It reports whether that is news.
func (e *Endpoint) SetTrouble(err error) (news bool) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	news = e.trouble != text
	e.trouble = text
	return news
}

// InLine reports whether r is the record that e has, and the gate is as r needs it.
func (e *Endpoint) InLine(r attach.Record) bool {
	known, ok := e.Record(r.ID)
	return ok && r.State != attach.Provisional && known.State == r.State &&
		(known.Installed != nil) == (r.Installed != nil) && (e.service.current() != nil || r.State != attach.Captured)
}

// lacksGate reports whether e is captured and has no gate.
func (e *Endpoint) lacksGate() bool {
	captured := func(r attach.Record) bool { return r.State == attach.Captured }
	return e.service.current() == nil && slices.ContainsFunc(e.Records(), captured)
}

// IsFree reports whether there is neither a rule nor a gate.
func (e *Endpoint) IsFree() bool { return e.Installed() == nil && e.service.current() == nil }

// Unused reports whether rules or a gate of a capture that has ended remain, and no connection uses them.
func (e *Endpoint) Unused() bool {
	s := e.snapshot(attach.Record{})
	left := s.gate != nil
	for _, r := range e.Records() {
		if r.State != attach.Passed {
			return false
		}
		left = left || r.Installed != nil
	}
	if !left {
		return false
	}
	queued, err := s.queued()
	return err == nil && queued+s.accepted.Len()+s.Counts().Open == 0
}

// Reopen opens the gate of an attachment that was captured before. If another process holds the capture ports and evict
// is set, its listeners are closed. Reopen reports whether that was necessary.
func (e *Endpoint) Reopen(at attach.Attachment, r ruleset.Ruleset, evict bool) (evicted bool, err error) {
	err = e.Open(at, r)
	if !evict || !errors.Is(err, unix.EADDRINUSE) {
		return false, err
	}
	g := e.service.current()
	if g == nil {
		g = gate.None(r.CapturePorts())
	}
	if err := g.Evict(at.Netns, e.inboundAddresses(at, r)); err != nil {
		return false, err
	}
	return true, e.Open(at, r)
}

// Open opens the gate as far as r needs it, and begins to serve it. Listeners that are open stay open.
func (e *Endpoint) Open(at attach.Attachment, r ruleset.Ruleset) error {
	inbound := e.inboundAddresses(at, r)
	if len(inbound) == 0 && len(r.InboundPorts) > 0 {
		return errors.New("the pod's addresses are not known, so inbound connections cannot be captured")
	}
	was := e.service.current()
	g, err := was, error(nil)
	if g == nil {
		g, err = e.newGate(at.Netns, r.CapturePorts())
	}
	if err != nil {
		return err
	}
	wide, err := g.Widen(at.Netns, inbound)
	if err == nil && len(wide.Listeners) > unixsock.MaxFiles {
		err = fmt.Errorf("no more than %d addresses can be captured inbound", unixsock.MaxFiles-2)
	}
	if err != nil {
		if was == nil {
			err = errors.Join(err, g.Close())
		}
		return err
	}
	if wide == was {
		return nil
	}
	return e.service.serve(at, wide)
}

// inboundAddresses are the addresses at which the gate listens for inbound connections.
func (e *Endpoint) inboundAddresses(at attach.Attachment, r ruleset.Ruleset) []netip.Addr {
	if len(r.InboundPorts) == 0 {
		return nil
	}
	_, ips := e.Neighbours(at)
	return ips
}

// newGate uses inherited listeners, or opens new ones.
func (e *Endpoint) newGate(path string, ports ruleset.Ports) (*gate.Gate, error) {
	if files := e.table.takeInherited(e.ID); files != nil {
		return gate.Adopt(path, files, ports)
	}
	return gate.Open(path, ports)
}

// Shut closes the gate for every process that holds it, and resets the connections that came through it.
func (e *Endpoint) Shut() {
	e.service.end() // first: its cause tells the acceptor that no other process goes on with the gate
	if g := e.service.current(); g != nil {
		if err := g.Shut(); err != nil {
			e.table.log.Error("shutting a gate failed", "netnsID", e.ID.String(), "err", err)
		}
	}
	e.service.release()
	if err := gate.Discard(e.table.takeInherited(e.ID)); err != nil {
		e.table.log.Error("shutting inherited listeners failed", "netnsID", e.ID.String(), "err", err)
	}
}

// Narrow closes the inbound listeners if no rule leads to them any more and no connection waits in them.
func (e *Endpoint) Narrow() error {
	for _, r := range e.Records() {
		if r.Installed == nil || len(r.Installed.Ruleset.InboundPorts) > 0 {
			return nil
		}
	}
	return e.service.narrow()
}
