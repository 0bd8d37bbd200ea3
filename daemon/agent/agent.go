// Package agent keeps the node's attachments: it decides about them, opens and closes their gates, takes them
// up again after a restart, and notices those that went without a word.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

const (
	// reconcileInterval is how often records and netns are looked at for what nobody told.
	reconcileInterval = time.Second
	// reconsiderInterval is how often what failed to be brought in line is tried again.
	reconsiderInterval = 10 * time.Second
)

// evictAfter is how long somebody may go on to hold the capture port of a pod that was captured before, if it is not known
// who: a daemon that has hung for longer than the one before this one lived, or a process in the pod. A proxy, which will
// return it, has much longer: it may hang itself, and what waits then does so safely.
const evictAfter, evictProxyAfter = 10 * time.Second, 2 * time.Minute

// Upstream tells whether what accepts is there.
type Upstream interface {
	Status() attach.UpstreamStatus
}

// Acceptor sees to it that one pod's connections are accepted: it relays them, or has handed the listeners to proxies.
type Acceptor interface {
	// Serve returns when g is closed or paused, or accepting ends, and what came through g has ended; the end of ctx
	// ends that. If accepting has ended because somebody else goes on with g (errLeft is the cause), what others hold of
	// it stays with them.
	Serve(ctx, accepting context.Context, g *gate.Gate)
	// Waiting is how many connections were accepted and wait for the upstream.
	Waiting() int
	// Expire ends the wait of those of them that have waited for the upstream for longer than that, and tells how many. They
	// are reset, or, if direct is not nil, go direct.
	Expire(waited time.Duration, direct func(error)) int
	// Direct takes a connection that somebody else has accepted at l to its original destination, without the
	// upstream. went is called once, when it is on its way or with the reason why not. Direct returns when the connection
	// has ended; the end of ctx ends it.
	Direct(ctx context.Context, g *gate.Gate, l *gate.Listener, conn *net.TCPConn, went func(error))
	// Counts are those that do not wait any more. They may take milliseconds to find.
	Counts() gate.Counts
}

// errLeft is why accepting ends at a gate that stays open elsewhere.
var errLeft = errors.New("somebody else goes on with the gate")

// Agent is the daemon's part of the conversation with the plugin.
type Agent struct {
	// Ready, if set, says why the daemon is not ready to serve.
	Ready func() error
	// Returning is how long proxies may take to bring listeners back that a daemon which hangs has too. Then, or at once
	// if it is 0, those are ended.
	Returning time.Duration

	source   Source
	store    attach.Store
	upstream Upstream
	accept   func(attach.NetnsID, attach.Pod, []netip.Addr) Acceptor
	log      *slog.Logger
	serving  sync.WaitGroup // acceptors, one for each gate

	// handing is held while the gates are handed over: nothing changes meanwhile. Whoever changes something
	// holds it for reading.
	handing   sync.RWMutex
	retired   chan struct{}                 // closed when another daemon has taken over
	socket    *unixsock.Listener            // nil until Listen
	evictFrom time.Time                     // from when on others that hold a capture port are taken for dead; zero for never
	inherited map[attach.NetnsID][]*os.File // listeners that were handed over, or back

	mu      sync.Mutex // guards the maps, and what is in a netns; held for moments
	netns   map[attach.NetnsID]*netns
	byID    map[attach.ID]*netns
	told    map[string]string // what was last reported of each pod
	watched time.Time         // the state of the record directory at the last look

	// Connections that had waited too long, by what became of them.
	expired, direct atomic.Uint64
}

// netns is a network namespace with everything attached to it; nearly always one attachment.
type netns struct {
	id attach.NetnsID
	// changing is held while somebody decides about the netns or changes it, which may take seconds; nobody
	// who holds Agent.mu waits for it.
	changing sync.Mutex

	attachments map[attach.ID]*attach.Record
	gate        *gate.Gate // nil when not captured, or when it could not be opened
	acceptor    Acceptor
	ctx         context.Context // of what came through the gate
	stop        context.CancelFunc
	refuse      context.CancelCauseFunc // ends what accepts
	trouble     string                  // why it is not as its record says
	policy      attach.Late             // what becomes of its connections while the upstream is late
	late        lateness                // for who holds changing
	direct      directs
}

// New makes an agent without attachments. accept makes the acceptor for one pod, by its netns and its addresses.
func New(source Source, store attach.Store, up Upstream, accept func(attach.NetnsID, attach.Pod, []netip.Addr) Acceptor, log *slog.Logger) *Agent {
	return &Agent{
		source: source, store: store, upstream: up, accept: accept, log: log,
		netns: map[attach.NetnsID]*netns{}, byID: map[attach.ID]*netns{}, told: map[string]string{},
		retired: make(chan struct{}), inherited: map[attach.NetnsID][]*os.File{},
	}
}

// Run takes up what is recorded and then keeps up with it, and with what the source wants, until ctx ends or
// another daemon has taken over. In the first case it lets go of every gate before it returns; the rules stay, so
// connections wait for the next daemon, unless a proxy holds the listeners. In the second it returns when what it
// relays has ended, or is ended after drainTime.
func (a *Agent) Run(ctx context.Context) error {
	reconcile, reconsider := time.NewTicker(reconcileInterval), time.NewTicker(reconsiderInterval)
	defer reconcile.Stop()
	defer reconsider.Stop()
	a.Reconsider(ctx)
	for ctx.Err() == nil && !a.isRetired() {
		a.Reconcile(ctx)
		select {
		case now := <-reconcile.C:
			a.attend(now)
		case <-reconsider.C:
			a.Reconsider(ctx)
		case <-a.source.Changed():
			a.Reconsider(ctx)
		case <-ctx.Done():
		case <-a.retired:
		}
	}
	if a.isRetired() {
		a.drained(drainTime)
	}
	for _, n := range a.all() {
		a.release(n)
		a.end(n)
	}
	a.serving.Wait()
	return nil
}

// Attach decides about an attachment and, to capture it, opens its gate.
func (a *Agent) Attach(ctx context.Context, at attach.Attachment) (attach.Decision, error) {
	if err := at.Validate(); err != nil {
		return attach.Decision{}, &attach.RefusedError{Message: err.Error(), Final: true}
	}
	a.yield()
	a.handing.RLock()
	defer a.handing.RUnlock()
	if a.isRetired() {
		return attach.Decision{}, errRetired
	}
	id, err := attach.IdentifyNetns(at.Netns)
	if err != nil {
		return attach.Decision{}, &attach.RefusedError{Message: err.Error(), Final: errors.Is(err, attach.ErrNetnsGone)}
	}
	if old := a.of(at.ID); old != nil && old.id != id {
		a.forget(at.ID)
	}
	n := a.enter(id)
	defer a.leave(n)
	d, err := a.decide(ctx, n, at, true)
	if errors.Is(err, optin.ErrUnknown) {
		return a.hold(n, at, err), nil
	}
	if err != nil {
		a.report(at.Pod, true, reasonRefused, err.Error())
		a.log.Warn("attachment refused", "attachment", at.String(), "err", err)
		return attach.Decision{}, &attach.RefusedError{Message: err.Error(), Final: true}
	}
	if d.Capture {
		if err := a.open(n, at, *d.Ruleset); err != nil {
			a.log.Error("attachment refused", "attachment", at.String(), "err", err)
			return attach.Decision{}, &attach.RefusedError{Message: err.Error()}
		}
	} else {
		a.shut(n)
	}
	a.limit(n, d.Late)
	a.join(n, &attach.Record{Attachment: at, NetnsID: id, State: state(d)})
	a.log.Info("attached", "attachment", at.String(), "state", string(state(d)), "reason", d.Reason)
	a.tell(at.Pod, "", d)
	return d, nil
}

// hold captures an attachment of which nothing is known yet. Nobody listens: what waits at the gate may have to
// go straight out.
func (a *Agent) hold(n *netns, at attach.Attachment, why error) attach.Decision {
	a.log.Warn("attached provisionally: its TCP waits", "attachment", at.String(), "err", why)
	a.join(n, &attach.Record{Attachment: at, NetnsID: n.id, State: attach.Provisional})
	a.look()
	r := ruleset.Provisional(at.IfName)
	r.Interfaces = a.interfaces(n, at.IfName)
	return attach.Decision{Capture: true, Provisional: true, Ruleset: &r, Reason: why.Error()}
}

// look makes the next Reconcile read the records again.
func (a *Agent) look() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.watched = time.Time{}
}

func state(d attach.Decision) attach.State {
	switch {
	case d.Provisional:
		return attach.Provisional
	case d.Capture:
		return attach.Captured
	}
	return attach.Passed
}

// Detach forgets an attachment and its record; one that is not known is no error.
func (a *Agent) Detach(id attach.ID) error {
	a.yield()
	a.handing.RLock()
	defer a.handing.RUnlock()
	if a.isRetired() {
		return errRetired
	}
	if r := a.forget(id); r != nil {
		a.log.Info("detached", "attachment", r.String())
	}
	return a.store.Remove(id)
}

// of is the netns that id is attached to, or nil.
func (a *Agent) of(id attach.ID) *netns {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.byID[id]
}

func (a *Agent) all() []*netns {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.netns))
}

// enter returns the netns for the caller alone to change, until leave.
func (a *Agent) enter(id attach.NetnsID) *netns {
	for {
		a.mu.Lock()
		n := a.netns[id]
		if n == nil {
			n = &netns{id: id, attachments: map[attach.ID]*attach.Record{}}
			a.netns[id] = n
		}
		a.mu.Unlock()
		n.changing.Lock()
		a.mu.Lock()
		current := a.netns[id] == n
		a.mu.Unlock()
		if current {
			return n
		}
		n.changing.Unlock() // it was dropped while we waited
	}
}

// leave lets others change n, and drops it if nothing is attached to it.
func (a *Agent) leave(n *netns) {
	defer n.changing.Unlock()
	if len(a.records(n)) > 0 {
		return
	}
	a.shut(n) // before another can take its place
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.netns, n.id)
}

// join adds an attachment to n. It is for who has entered n, as everything below that takes one.
func (a *Agent) join(n *netns, r *attach.Record) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n.attachments[r.ID] = r
	a.byID[r.ID] = n
}

// forget drops an attachment, and closes the gate behind the last one in a netns. It returns what was known.
func (a *Agent) forget(id attach.ID) *attach.Record {
	n := a.of(id)
	if n == nil {
		return nil
	}
	n = a.enter(n.id)
	defer a.leave(n)
	a.mu.Lock()
	defer a.mu.Unlock()
	r := n.attachments[id]
	if r != nil {
		delete(a.byID, id)
		delete(n.attachments, id)
		delete(a.told, r.Pod.String())
	}
	return r
}

// open opens the gate of n as far as r needs it, and starts to serve it; what is open stays.
func (a *Agent) open(n *netns, at attach.Attachment, r ruleset.Ruleset) error {
	inbound := a.inbound(n, at, r)
	if len(inbound) == 0 && len(r.InboundPorts) > 0 {
		return errors.New("its addresses are not known, so nothing can listen at them for what it is sent")
	}
	g, err := n.gate, error(nil)
	if g == nil {
		g, err = a.newGate(n.id, at.Netns)
	}
	if err != nil {
		return err
	}
	wide, err := g.Widen(at.Netns, inbound)
	if err == nil && len(wide.Listeners) > unixsock.MaxFiles {
		err = fmt.Errorf("no more than %d addresses can be captured inbound", unixsock.MaxFiles-2)
	}
	if err != nil {
		if n.gate == nil {
			err = errors.Join(err, g.Close())
		}
		return err
	}
	if wide == n.gate {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if n.acceptor == nil {
		n.acceptor = a.accept(n.id, at.Pod, at.IPs)
	}
	return a.serve(n, wide)
}

// inbound are the addresses at which the gate of n listens for r.
func (a *Agent) inbound(n *netns, at attach.Attachment, r ruleset.Ruleset) []netip.Addr {
	if len(r.InboundPorts) == 0 {
		return nil
	}
	return a.addresses(n, at)
}

// newGate takes the listeners that were handed over for a netns, or opens new ones.
func (a *Agent) newGate(id attach.NetnsID, path string) (*gate.Gate, error) {
	if files := a.inherit(id); files != nil {
		return gate.Adopt(path, files)
	}
	return gate.Open(path)
}

// serve begins to accept at g, in the place of the gate that n has had, if any. It is for who holds mu.
func (a *Agent) serve(n *netns, g *gate.Gate) error {
	if n.gate != nil {
		n.refuse(errLeft)
		if err := errors.Join(g.Pause(), g.Resume()); err != nil { // ends who accepts at what both have
			return err
		}
	}
	if n.ctx == nil {
		n.ctx, n.stop = context.WithCancel(context.Background())
	}
	n.gate = g
	accepting, refuse := context.WithCancelCause(n.ctx)
	n.refuse = refuse
	ctx, acceptor := n.ctx, n.acceptor
	a.serving.Go(func() { acceptor.Serve(ctx, accepting, g) })
	return nil
}

// release lets go of the gate of n, and leaves it to whoever else holds it. What came through it goes on.
func (a *Agent) release(n *netns) {
	a.mu.Lock()
	g := n.gate
	n.gate = nil
	if n.refuse != nil {
		n.refuse(errLeft)
	}
	a.mu.Unlock()
	if g == nil {
		return
	}
	if err := g.Close(); err != nil {
		a.log.Error("closing gate", "err", err)
	}
}

// shut closes the gate of n for everybody, and ends what came through it.
func (a *Agent) shut(n *netns) {
	a.mu.Lock()
	g := n.gate
	a.mu.Unlock()
	a.end(n) // first: the acceptor shall know that nobody goes on with it
	if g != nil {
		if err := g.Shut(); err != nil {
			a.log.Error("shutting gate", "err", err)
		}
	}
	a.release(n)
	if err := gate.Discard(a.inherit(n.id)); err != nil {
		a.log.Error("shutting a gate that was handed over", "err", err)
	}
}

// end ends what came through the gate of n.
func (a *Agent) end(n *netns) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n.stop != nil {
		n.stop()
		n.ctx, n.stop = nil, nil
	}
}

// interfaces are those through which a netns is attached, with the one that is about to be.
func (a *Agent) interfaces(n *netns, ifName string) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	names := map[string]bool{ifName: true}
	for other := range n.attachments {
		names[other.IfName] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// limit notes how long the connections of n may wait, and what becomes of them then.
func (a *Agent) limit(n *netns, late attach.Late) {
	if late.Policy == attach.Hold { // its timeout is that of ADD
		late = attach.Late{Policy: attach.Queue}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n.policy = late
}

// addresses are those of a netns, with those that it is about to have.
func (a *Agent) addresses(n *netns, at attach.Attachment) []netip.Addr {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := slices.Clone(at.IPs)
	for _, other := range n.attachments {
		all = append(all, other.IPs...)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// decide asks what becomes of an attachment in n.
func (a *Agent) decide(ctx context.Context, n *netns, at attach.Attachment, live bool) (attach.Decision, error) {
	interfaces := a.interfaces(n, at.IfName)
	at.IPs = a.addresses(n, at)
	return a.source.Decide(ctx, at, interfaces, live)
}

// Status describes the attachments, by pod.
func (a *Agent) Status() attach.Status {
	s := a.Summary()
	s.Attachments = []attach.AttachmentStatus{}
	for _, v := range a.views() {
		at := v.status()
		at.Open, at.Bytes = v.open()
		s.Attachments = append(s.Attachments, at)
	}
	slices.SortFunc(s.Attachments, func(x, y attach.AttachmentStatus) int {
		return slices.Compare([]string{x.Pod, x.Attachment}, []string{y.Pod, y.Attachment})
	})
	return s
}

// Summary is the status but for the attachments.
func (a *Agent) Summary() attach.Status {
	s := attach.Status{Upstream: a.upstream.Status()}
	if a.Ready != nil {
		if err := a.Ready(); err != nil {
			s.NotReady = err.Error()
		}
	}
	return s
}

// view is what there is to say of an attachment. The kernel is asked about it without holding mu.
type view struct {
	record  attach.Record
	policy  attach.Late
	trouble string
	traffic
}

// traffic is where to ask for the connections of a netns.
type traffic struct {
	gate     *gate.Gate
	acceptor Acceptor
}

// traffic is for who holds Agent.mu.
func (n *netns) traffic() traffic { return traffic{n.gate, n.acceptor} }

func (a *Agent) views() []view {
	a.mu.Lock()
	defer a.mu.Unlock()
	views := make([]view, 0, len(a.byID))
	for id, n := range a.byID {
		views = append(views, n.view(id))
	}
	return views
}

// view is for who holds Agent.mu.
func (n *netns) view(id attach.ID) view {
	return view{*n.attachments[id], n.policy, n.trouble, n.traffic()}
}

// status is all that costs nothing to find out.
func (v view) status() attach.AttachmentStatus {
	r := v.record
	s := attach.AttachmentStatus{Pod: r.Pod.String(), Attachment: r.ID.String(), State: r.State, Netns: r.Netns}
	if r.Installed != nil {
		s.Backend = r.Installed.Backend
		if !r.Installed.SYNGate {
			s.Notes = append(s.Notes, "no SYN gate: this kernel lacks the socket match; refuses connections while sluiced is down")
		}
	}
	if r.State == attach.Captured && v.policy.Policy == attach.Direct && v.policy.Timeout > 0 {
		s.Notes = append(s.Notes, fmt.Sprintf("direct: goes around the upstream when that is late by %s", v.policy.Timeout))
	}
	if v.trouble != "" {
		s.Notes = append(s.Notes, v.trouble)
	}
	var err error
	if s.Waiting, err = v.waiting(); err != nil {
		s.Notes = append(s.Notes, err.Error())
	}
	return s
}

// waiting is how many connections wait: to be accepted, and for the upstream.
func (t traffic) waiting() (n int, err error) {
	if t.acceptor != nil {
		n = t.acceptor.Waiting()
	}
	if t.gate == nil {
		return n, nil
	}
	queued, err := t.gate.Queued()
	if errors.Is(err, os.ErrClosed) {
		err = nil // since the look at it
	}
	return n + queued, err
}

// open is how many connections are open, and what they have carried. What came through a gate goes on when capture has
// ended.
func (t traffic) open() (n int, bytes uint64) {
	if t.acceptor == nil {
		return 0, 0
	}
	c := t.acceptor.Counts()
	return c.Open, c.Bytes
}
