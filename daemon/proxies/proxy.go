package proxies

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	// patience bounds what a proxy may take for its hello, for reading what it is told, and for letting go of the
	// listeners of a pod.
	patience = 5 * time.Second
	// pingInterval is how often a proxy is asked whether it is well; silence is how long it may take to answer.
	pingInterval, silence = time.Second, 3 * time.Second
	// maxHeld is more than a node has pods, maxID longer than the longest id of a netns, maxName enough for people.
	maxHeld, maxID, maxName = 10_000, 64, 100
)

// proxy is one that is connected.
type proxy struct {
	hub  *Hub
	conn *net.UnixConn
	wake chan struct{}

	// Guarded by hub.mu.
	name        string
	labels      []string
	addresses   []netip.Addr // that it connects from, unless they are the node's
	since       time.Time
	greeted     bool
	hangs       bool
	asked       time.Time // when it was asked for its state; zero when it has answered
	connections int
	holds       map[string]*holding // by netns
}

// holding is the listeners of one pod that a proxy has.
type holding struct {
	cookies []uint64
	// kept is until when listeners that the proxy came with are left to it, while nobody here offers them.
	kept time.Time
	// leaving is since when the proxy is to let go of them; zero if it is not.
	leaving time.Time
}

func newProxy(h *Hub, conn *net.UnixConn) *proxy {
	return &proxy{hub: h, conn: conn, wake: make(chan struct{}, 1), since: time.Now(), holds: map[string]*holding{}}
}

func (p *proxy) look() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// refuse says why, and hangs up.
func (p *proxy) refuse(why error) {
	_ = p.conn.SetWriteDeadline(time.Now().Add(patience)) // a closed connection shows at the next call
	_ = send(p.conn, message{Kind: kindError, Error: why.Error()}, nil)
	_ = p.conn.Close() // everything was said
}

// serve talks to the proxy until it goes, breaks the protocol, or ctx ends; the error says which.
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
		cancel(p.hear())
	}()
	tell := p.tell(ctx)
	cancel(tell)
	<-done
	return context.Cause(ctx)
}

// greet takes the proxy's hello, and what it holds.
func (p *proxy) greet(ctx context.Context, owner Owner) error {
	if err := p.conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	buffer := make([]byte, maxMessage)
	hello, files, err := receive(p.conn, buffer)
	if err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	addresses, err := addressesIn(files)
	unixsock.Close(files)
	switch {
	case err != nil:
		return fmt.Errorf("hello: %w", err)
	case hello.Kind != kindHello || hello.Version < version:
		return fmt.Errorf("want a hello of version %d or later, not %q of version %d", version, hello.Kind, hello.Version)
	case hello.Held > maxHeld:
		return fmt.Errorf("held: %d are more than %d", hello.Held, maxHeld)
	}
	for range hello.Held {
		m, files, err := receive(p.conn, buffer)
		if err == nil && (m.Kind != kindHeld || m.ID == "" || len(m.ID) > maxID || len(files) == 0) {
			unixsock.Close(files)
			err = fmt.Errorf("want a %q with an id and its sockets, not %q", kindHeld, m.Kind)
		}
		if err != nil {
			return err
		}
		if err := p.comesWith(m.ID, files, owner); err != nil {
			return err
		}
	}
	if err := send(p.conn, message{Kind: kindHello, Version: version, Node: p.hub.node}, nil); err != nil {
		return err
	}
	if p.moveIn(addresses) {
		owner.Reconsider(ctx)
	}
	p.hub.mu.Lock()
	defer p.hub.mu.Unlock()
	p.name, p.labels, p.greeted = printable(hello.Name), hello.Labels, true
	p.hub.log.Info("proxy connected", "proxy", p.name, "held", hello.Held)
	p.hub.judge()
	return nil
}

// moveIn notes the proxy's addresses, and tells whether some are new. Before its own connections to pods are known by
// them it must not have inbound listeners: they would come back to it.
func (p *proxy) moveIn(addresses []netip.Addr) (news bool) {
	known := p.hub.Addresses()
	p.hub.mu.Lock()
	defer p.hub.mu.Unlock()
	p.addresses = addresses
	return slices.ContainsFunc(addresses, func(a netip.Addr) bool { return !slices.Contains(known, a) })
}

// printable keeps what is shown from doing something to a terminal.
func printable(name string) string {
	name = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, name)
	return strings.ToValidUTF8(name[:min(len(name), maxName)], "")
}

// addressesIn are those of the network namespace that came along, if one did and it is not the daemon's own, which is the
// node's.
func addressesIn(files []*os.File) ([]netip.Addr, error) {
	if len(files) == 0 {
		return nil, nil
	}
	mine, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return nil, err
	}
	theirs, err := files[0].Stat()
	if err != nil || os.SameFile(mine, theirs) {
		return nil, err
	}
	var all []netip.Addr
	err = ns.WithNetNSPath(fmt.Sprintf("/proc/self/fd/%d", files[0].Fd()), func(ns.NetNS) error {
		addrs, err := net.InterfaceAddrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() {
				all = append(all, p.Addr())
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("the addresses of the proxy: %w", err)
	}
	return all[:min(len(all), maxAddresses)], nil
}

// maxAddresses is more than a pod has.
const maxAddresses = 16

// comesWith notes what the proxy has from a daemon before this one.
func (p *proxy) comesWith(id string, files []*os.File, owner Owner) error {
	cookies, err := gate.Cookies(files)
	if err != nil {
		unixsock.Close(files)
		return fmt.Errorf("what the proxy holds of netns %s: %w", id, err)
	}
	p.hub.mu.Lock()
	p.holds[id] = &holding{cookies: cookies, kept: time.Now().Add(patience)}
	offered := p.hub.offers[id] != nil
	p.hub.mu.Unlock()
	if offered {
		unixsock.Close(files)
	} else {
		owner.Returned(id, files)
	}
	return nil
}

// hear takes what the proxy says, until it says something wrong or nothing more.
func (p *proxy) hear() error {
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
		if err := p.heard(m); err != nil {
			return err
		}
	}
}

func (p *proxy) heard(m message) error {
	p.hub.mu.Lock()
	defer p.hub.mu.Unlock()
	switch m.Kind {
	case kindState:
		p.asked, p.hangs, p.connections = time.Time{}, false, m.Connections
		p.hub.judge()
	case kindDetached:
		if held := p.holds[m.ID]; held == nil || held.leaving.IsZero() {
			return fmt.Errorf("it has detached %q, which it was not told to", m.ID)
		}
		delete(p.holds, m.ID)
		p.look() // there may be other listeners for the same netns
	default:
		return fmt.Errorf("%q is not for a proxy to say now", m.Kind)
	}
	return nil
}

// tell says to the proxy what it is to hold and what not, whenever that changes, and asks it how it is.
func (p *proxy) tell(ctx context.Context) error {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	if err := p.ask(); err != nil {
		return err
	}
	for {
		if err := p.sync(); err != nil {
			return err
		}
		select {
		case <-p.wake:
		case <-tick.C:
			if err := p.ask(); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// ask asks for the proxy's state, unless it still has to answer.
func (p *proxy) ask() error {
	p.hub.mu.Lock()
	waiting := !p.asked.IsZero()
	if !waiting {
		p.asked = time.Now()
	} else if hangs := time.Since(p.asked) > silence; hangs && !p.hangs {
		p.hangs = true
		p.hub.log.Warn("proxy does not answer", "proxy", p.name)
		p.hub.judge()
	}
	p.hub.mu.Unlock()
	if waiting {
		return nil
	}
	return p.say(message{Kind: kindPing}, nil)
}

func (p *proxy) say(m message, files []*os.File) error {
	if err := p.conn.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	return send(p.conn, m, files)
}

// sync brings what the proxy holds in line with what is offered. The error is that it does not let go.
func (p *proxy) sync() error {
	detach, attach, err := p.due()
	if err != nil {
		return err
	}
	for _, id := range detach {
		if err := p.say(message{Kind: kindDetach, ID: id}, nil); err != nil {
			return err
		}
	}
	for _, o := range attach {
		if err := p.say(p.describe(o), o.gate.Files()); err != nil && !errors.Is(err, os.ErrClosed) { // which is taken back soon
			return err
		}
	}
	return nil
}

// due is what there is to say, and notes it as said.
func (p *proxy) due() (detach []string, attach []*offer, err error) {
	p.hub.mu.Lock()
	defer p.hub.mu.Unlock()
	for id, held := range p.holds {
		o := p.hub.offers[id]
		switch {
		case !held.leaving.IsZero():
			if time.Since(held.leaving) > patience {
				return nil, nil, fmt.Errorf("it did not let go of netns %s within %s", id, patience)
			}
		case o != nil && slices.Equal(o.cookies, held.cookies):
		case o == nil && time.Now().Before(held.kept):
		default:
			held.leaving = time.Now()
			detach = append(detach, id)
		}
	}
	for id, o := range p.hub.offers {
		if p.holds[id] == nil {
			p.holds[id] = &holding{cookies: o.cookies}
			attach = append(attach, o)
		}
	}
	return detach, attach, nil
}

func (p *proxy) describe(o *offer) message {
	m := message{Kind: kindAttach, ID: o.id, Pod: &pod{Namespace: o.pod.Namespace, Name: o.pod.Name, UID: o.pod.UID, IPs: []string{}}}
	for _, ip := range o.ips {
		m.Pod.IPs = append(m.Pod.IPs, ip.String())
	}
	for _, l := range o.gate.Listeners {
		direction := "outbound"
		if l.Inbound() {
			direction = "inbound"
		}
		m.Listeners = append(m.Listeners, listener{Direction: direction})
	}
	if len(p.labels) > 0 {
		m.Pod.Labels = map[string]string{}
		all := p.hub.labels(o.pod)
		for _, key := range p.labels {
			if v, ok := all[key]; ok {
				m.Pod.Labels[key] = v
			}
		}
	}
	return m
}

// status is for who holds hub.mu.
func (p *proxy) status() attach.ProxyStatus {
	return attach.ProxyStatus{Name: p.name, Since: p.since, Hangs: p.hangs, Pods: len(p.holds), Connections: p.connections}
}
