package proxies

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/printable"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	// proxyTimeout bounds how long a proxy may take for its hello, to read a message, and to close the listeners of a
	// pod.
	proxyTimeout = 5 * time.Second
	// pingInterval is the time between pings. A proxy that takes longer than pingTimeout to answer one hangs.
	pingInterval, pingTimeout = time.Second, 3 * time.Second
	// describeInterval is the time between comparisons of the pods' descriptions with those that the proxy has.
	describeInterval = 10 * time.Second
	// maxHeld is more than a node has pods, maxID longer than the longest id of a netns, and maxAddresses more than a
	// pod has. maxName bounds a proxy's name in bytes.
	maxHeld, maxID, maxAddresses, maxName = 10_000, 64, 16, 100
)

// proxy is one connected proxy.
type proxy struct {
	hub  *Hub
	conn *net.UnixConn
	wake chan struct{} // receives when the offers or the listeners held may differ
	// asked receives channels to be closed when the proxy has read the descriptions of pods as they are then.
	asked chan chan<- struct{}

	labels []string // of pods, for which the proxy has asked; set by greet, read by the same goroutine

	mu          sync.Mutex // see the package comment
	name        string
	addresses   []netip.Addr // from which it connects, unless they are the node's
	since       time.Time    // when it connected
	greeted     bool
	hangs       bool
	pinged      time.Time // when the ping was sent that it has not answered; zero if it has answered
	connections int
	held        map[string]*held // by netns
	// acks are closed with the answers to the pings that were sent, in their order; nil for one that is only a
	// ping.
	acks []chan<- struct{}
}

// held is the listeners of one pod that a proxy has.
type held struct {
	cookies []uint64
	// told is the description of the pod that the proxy has from this daemon; nil for none.
	told *podDescription
	// keepUntil: until then, the proxy keeps listeners that it brought along, although nothing is offered for their
	// netns.
	keepUntil time.Time
	// detached is when the proxy was told to close them; zero if it was not.
	detached time.Time
}

func newProxy(h *Hub, conn *net.UnixConn) *proxy {
	return &proxy{
		hub: h, conn: conn, wake: make(chan struct{}, 1), since: time.Now(), held: map[string]*held{},
		asked: make(chan chan<- struct{}),
	}
}

func (p *proxy) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// refuse tells the proxy why, and hangs up.
func (p *proxy) refuse(why error) {
	_ = p.conn.SetWriteDeadline(time.Now().Add(proxyTimeout)) // a closed connection shows at the next call
	_ = send(p.conn, message{Kind: kindError, Error: why.Error()}, nil)
	_ = p.conn.Close() // everything was sent
}

// serve talks to the proxy until it goes, breaks the protocol, or ctx ends. The error says which.
func (p *proxy) serve(ctx context.Context, owner Owner) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() { _ = p.conn.Close() })
	defer stop()
	if err := p.greet(ctx, owner); err != nil {
		p.refuse(err)
		return err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		cancel(p.receiveAll())
	}()
	cancel(p.sendAll(ctx))
	<-done
	return context.Cause(ctx)
}

// greet receives the proxy's hello and the listeners that it holds, and answers.
func (p *proxy) greet(ctx context.Context, owner Owner) error {
	if err := p.conn.SetDeadline(time.Now().Add(proxyTimeout)); err != nil {
		return err
	}
	buffer := make([]byte, maxMessage)
	hello, files, err := receive(p.conn, buffer)
	if err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	addresses, err := addressesOf(files)
	unixsock.Close(files)
	switch {
	case err != nil:
		return fmt.Errorf("hello: %w", err)
	case hello.Kind != kindHello || hello.Version < version:
		return fmt.Errorf("want a hello of version %d or later, not %q of version %d",
			version, hello.Kind, hello.Version)
	case hello.Held > maxHeld:
		return fmt.Errorf("held: %d are more than %d", hello.Held, maxHeld)
	}
	for range hello.Held {
		if err := p.receiveHeld(buffer, owner); err != nil {
			return err
		}
	}
	if err := send(p.conn, message{Kind: kindHello, Version: version, Node: p.hub.node}, nil); err != nil {
		return err
	}
	if p.recordAddresses(addresses) {
		owner.Reconsider(ctx) // before it gets an inbound listener: its own connections would come back to it
	}
	p.labels = hello.Labels
	p.recordHello(hello)
	p.hub.updateReady()
	return nil
}

// receiveHeld receives listeners that the proxy has of an earlier daemon.
func (p *proxy) receiveHeld(buffer []byte, owner Owner) error {
	m, files, err := receive(p.conn, buffer)
	if err != nil {
		return err
	}
	if m.Kind != kindHeld || m.ID == "" || len(m.ID) > maxID || len(files) == 0 {
		unixsock.Close(files)
		return fmt.Errorf("want a %q with an id and its sockets, not %q", kindHeld, m.Kind)
	}
	cookies, err := gate.Cookies(files)
	if err != nil {
		unixsock.Close(files)
		return fmt.Errorf("the listeners held of netns %s: %w", m.ID, err)
	}
	p.recordHeld(m.ID, &held{cookies: cookies, keepUntil: time.Now().Add(proxyTimeout)})
	if p.hub.isOffered(m.ID) {
		unixsock.Close(files)
	} else {
		owner.Returned(m.ID, files)
	}
	return nil
}

func (p *proxy) recordHeld(id string, h *held) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[id] = h
}

func (p *proxy) recordHello(hello message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.name, p.greeted = printable.Text(hello.Name, maxName), true
	if count, due := p.hub.lines.Due("connected"); due {
		p.hub.log.Info("proxy connected", "proxy", p.name, "held", hello.Held, "count", count)
	}
}

// recordAddresses reports whether some of the addresses are new to the hub.
func (p *proxy) recordAddresses(addresses []netip.Addr) (news bool) {
	known := p.hub.Addresses()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.addresses = addresses
	return slices.ContainsFunc(addresses, func(a netip.Addr) bool { return !slices.Contains(known, a) })
}

// addressesOf returns the addresses of the netns that the proxy has sent along, unless it is the daemon's own, which is
// the node's.
func addressesOf(files []*os.File) ([]netip.Addr, error) {
	if len(files) == 0 {
		return nil, nil
	}
	own, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return nil, err
	}
	sent, err := files[0].Stat()
	if err != nil || os.SameFile(own, sent) {
		return nil, err
	}
	addresses, err := netns.Addresses(fmt.Sprintf("/proc/self/fd/%d", files[0].Fd()))
	if err != nil {
		return nil, fmt.Errorf("the addresses of the proxy: %w", err)
	}
	var all []netip.Addr
	for _, a := range addresses {
		if a.IsGlobalUnicast() { // on a loopback interface too: a proxy may connect from there
			all = append(all, a.Addr)
		}
	}
	return all[:min(len(all), maxAddresses)], nil
}

// receiveAll handles the proxy's messages until the connection ends or a message breaks the protocol.
func (p *proxy) receiveAll() error {
	if err := p.conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	buffer := make([]byte, maxMessage)
	for {
		m, files, err := receive(p.conn, buffer)
		unixsock.Close(files)
		if err != nil {
			return err
		}
		switch m.Kind {
		case kindState:
			p.recordState(m)
			p.hub.updateReady()
		case kindDetached:
			if err := p.recordDetached(m.ID); err != nil {
				return err
			}
			p.wakeUp() // other listeners may be offered for the same netns
		default:
			return fmt.Errorf("a proxy may not send %q now", m.Kind)
		}
	}
}

func (p *proxy) recordState(m message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pinged, p.hangs, p.connections = time.Time{}, false, m.Connections
	if len(p.acks) > 0 {
		if p.acks[0] != nil {
			close(p.acks[0])
		}
		p.acks = p.acks[1:]
	}
}

func (p *proxy) recordDetached(id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h := p.held[id]; h == nil || h.detached.IsZero() {
		return fmt.Errorf("the proxy has detached %q, which it was not told to", id)
	}
	delete(p.held, id)
	return nil
}

// sendAll tells the proxy which listeners to take and to close, and about their pods, whenever that changes, and pings
// it, until ctx ends.
func (p *proxy) sendAll(ctx context.Context) error {
	tick, describe := time.NewTicker(pingInterval), time.NewTicker(describeInterval)
	defer tick.Stop()
	defer describe.Stop()
	if err := p.ping(); err != nil {
		return err
	}
	for changed := true; ; {
		if err := p.sync(); err != nil {
			return err
		}
		if changed {
			if err := p.tell(); err != nil {
				return err
			}
		}
		changed = false
		select {
		case <-p.wake:
			changed = true
		case told := <-p.asked:
			if err := errors.Join(p.tell(), p.pingFor(told)); err != nil {
				return err
			}
		case <-describe.C: // labels and policies change without a wake
			changed = true
		case <-tick.C:
			if err := p.ping(); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// ping asks for the proxy's state, unless it still has to answer an earlier ping.
func (p *proxy) ping() error {
	due, newlyHangs := p.duePing()
	if newlyHangs {
		p.hub.log.Warn("proxy does not answer", "proxy", p.status().Name)
		p.hub.updateReady()
	}
	if !due {
		return nil
	}
	return p.pingFor(nil)
}

// pingFor sends a ping, and has a channel closed when the proxy has answered it: it reads messages in their order.
func (p *proxy) pingFor(answered chan<- struct{}) error {
	p.mu.Lock()
	p.acks = append(p.acks, answered)
	p.mu.Unlock()
	return p.send(message{Kind: kindPing}, nil)
}

func (p *proxy) duePing() (due, newlyHangs bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pinged.IsZero() {
		p.pinged = time.Now()
		return true, false
	}
	newlyHangs = !p.hangs && time.Since(p.pinged) > pingTimeout
	p.hangs = p.hangs || newlyHangs
	return false, newlyHangs
}

func (p *proxy) send(m message, files []*os.File) error {
	if err := p.conn.SetWriteDeadline(time.Now().Add(proxyTimeout)); err != nil {
		return err
	}
	return send(p.conn, m, files)
}

// sync brings the listeners that the proxy holds in line with the offers. It fails if the proxy does not close
// listeners that it was told to close.
func (p *proxy) sync() error {
	detach, offers, err := p.due(p.hub.currentOffers())
	if err != nil {
		return err
	}
	for _, id := range detach {
		if err := p.send(message{Kind: kindDetach, ID: id}, nil); err != nil {
			return err
		}
	}
	for _, o := range offers {
		pod := p.describe(o)
		p.recordTold(o.id, pod)
		err := p.send(o.message(pod), o.gate.Files())
		if err != nil && !errors.Is(err, os.ErrClosed) { // a closed gate's offer is about to be withdrawn
			return err
		}
	}
	return nil
}

// due returns the messages to send, and records them as sent.
func (p *proxy) due(offers map[string]*offer) (detach []string, attach []*offer, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, h := range p.held {
		o := offers[id]
		switch {
		case !h.detached.IsZero():
			if time.Since(h.detached) > proxyTimeout {
				return nil, nil, fmt.Errorf("the proxy did not close the listeners of netns %s within %s",
					id, proxyTimeout)
			}
		case o != nil && slices.Equal(o.cookies, h.cookies):
		case o == nil && time.Now().Before(h.keepUntil):
		default:
			h.detached = time.Now()
			detach = append(detach, id)
		}
	}
	for id, o := range offers {
		if p.held[id] == nil {
			p.held[id] = &held{cookies: o.cookies}
			attach = append(attach, o)
		}
	}
	return detach, attach, nil
}

// describe describes the pod of an offer as the proxy has asked for it.
func (p *proxy) describe(o *offer) *podDescription { return o.describe(p.labels, p.hub.labels(o.pod)) }

// tell describes the pods whose listeners the proxy holds, as far as the descriptions have changed.
func (p *proxy) tell() error {
	for id, o := range p.hub.currentOffers() {
		pod := p.describe(o)
		if !p.recordTold(id, pod) {
			continue
		}
		if err := p.send(message{Kind: kindPod, ID: id, Pod: pod}, nil); err != nil {
			return err
		}
	}
	return nil
}

// recordTold records the description of a pod that the proxy is told. It reports whether that is news for a proxy that
// holds the listeners of the pod.
func (p *proxy) recordTold(id string, pod *podDescription) (news bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.held[id]
	if h == nil || !h.detached.IsZero() || reflect.DeepEqual(h.told, pod) {
		return false
	}
	h.told = pod
	return true
}

func (p *proxy) ownAddresses() []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.addresses
}

func (p *proxy) hasGreeted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.greeted
}

// answers reports whether the proxy has greeted and does not hang.
func (p *proxy) answers() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.greeted && !p.hangs
}

func (p *proxy) status() attach.ProxyStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	return attach.ProxyStatus{
		Name: p.name, Since: p.since, Hangs: p.hangs, Pods: len(p.held), Connections: p.connections,
	}
}
