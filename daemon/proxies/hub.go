// Package proxies hands the listening sockets of pods to proxies on the node, which accept on them themselves: there is
// no relay then, and connections wait for a proxy that is late in the kernel. docs/proxies.md has the protocol.
package proxies

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// Returning is how long a proxy may take to come to another sluiced when its own hangs: twice as long as it waits for a
// word (docs/proxies.md).
const Returning = 10 * time.Second

// maxProxies is how many may be connected at a time.
const maxProxies = 32

// Hub is where proxies come for listeners.
type Hub struct {
	path string
	node string
	log  *slog.Logger
	// labels are those of a pod, as far as they are known.
	labels func(attach.Pod) map[string]string

	mu      sync.Mutex
	offers  map[string]*offer // by netns
	proxies map[*proxy]struct{}
	left    map[netip.Addr]time.Time // when the proxies with these addresses went
	since   time.Time                // since when there is a proxy, or none
	there   bool
}

// New makes a hub for the socket at path, without listeners and proxies. labels may be nil.
func New(path, node string, labels func(attach.Pod) map[string]string, log *slog.Logger) *Hub {
	if labels == nil {
		labels = func(attach.Pod) map[string]string { return nil }
	}
	return &Hub{
		path: path, node: node, labels: labels, log: log,
		offers: map[string]*offer{}, proxies: map[*proxy]struct{}{}, left: map[netip.Addr]time.Time{}, since: time.Now(),
	}
}

// offer is the listeners of one gate.
type offer struct {
	id      string
	pod     attach.Pod
	ips     []netip.Addr
	gate    *gate.Gate
	cookies []uint64 // of the sockets
}

// Pod is whose listeners are handed out.
type Pod struct {
	hub *Hub
	id  string
	pod attach.Pod
	ips []netip.Addr

	mu    sync.Mutex
	offer *offer // nil while it is not served
}

// For makes a pod, by the netns that it is in.
func (h *Hub) For(id attach.NetnsID, name attach.Pod, ips []netip.Addr) *Pod {
	return &Pod{hub: h, id: id.String(), pod: name, ips: ips}
}

// Serve offers the listeners of g to every proxy until accepting ends. If that is for the end of ctx, it takes them
// back from the proxies; else these keep them, for the daemon that goes on with them.
func (p *Pod) Serve(_, accepting context.Context, g *gate.Gate) {
	cookies, err := g.Cookies()
	if err != nil {
		p.hub.log.Error("listeners cannot be handed out", "pod", p.pod.String(), "err", err)
		return
	}
	o := &offer{id: p.id, pod: p.pod, ips: p.ips, gate: g, cookies: cookies}
	p.begin(accepting, o)
	<-accepting.Done()
	p.end(o)
	if errors.Is(context.Cause(accepting), context.Canceled) {
		p.hub.take(o)
	}
}

// begin makes o what is offered, unless another was to take its place before it got here.
func (p *Pod) begin(accepting context.Context, o *offer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if accepting.Err() == nil {
		p.offer = o
		p.hub.put(o)
	}
}

func (p *Pod) end(o *offer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.offer == o {
		p.offer = nil
	}
}

// Waiting is none: who is accepted is with a proxy.
func (p *Pod) Waiting() int { return 0 }

// Expire finds none.
func (p *Pod) Expire(time.Duration, func(error)) int { return 0 }

// Counts asks the kernel. What connections have carried that have ended is not known.
func (p *Pod) Counts() gate.Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.offer == nil {
		return gate.Counts{}
	}
	c, err := p.offer.gate.Counts()
	if err != nil {
		p.hub.log.Warn("counting connections", "pod", p.pod.String(), "err", err)
	}
	return c
}

func (h *Hub) put(o *offer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.offers[o.id] = o
	h.wake()
}

func (h *Hub) take(o *offer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.offers[o.id] == o {
		delete(h.offers, o.id)
	}
	h.wake()
}

// wake makes every proxy look at the offers. It is for who holds mu.
func (h *Hub) wake() {
	for p := range h.proxies {
		p.look()
	}
}

// Owner is whose listeners are handed out.
type Owner interface {
	// Returned takes over listeners that a proxy has from a daemon before this one, if they are wanted.
	Returned(netns string, files []*os.File)
	// Reconsider brings the pods in line with the addresses of proxies that have changed.
	Reconsider(context.Context)
}

// Run serves proxies on l until ctx ends. They keep what they hold.
func (h *Hub) Run(ctx context.Context, l net.Listener, owner Owner) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	var serving sync.WaitGroup
	defer serving.Wait()
	from := unixsock.RootOnly{Listener: l, Log: h.log}
	for {
		c, err := from.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, net.ErrClosed) {
				return fmt.Errorf("proxy socket %s: %w", h.path, err)
			}
			h.log.Warn("accepting a proxy", "err", err) // out of descriptors, most likely
			select {
			case <-time.After(pingInterval):
			case <-ctx.Done():
			}
			continue
		}
		conn := c.(*net.UnixConn)
		p := newProxy(h, conn)
		if !h.enter(p) {
			h.log.Warn("proxy turned away: too many are connected", "most", maxProxies)
			p.refuse(fmt.Errorf("no more than %d proxies", maxProxies))
			continue
		}
		serving.Go(func() {
			err := p.serve(ctx, owner)
			h.leave(p)
			if ctx.Err() == nil {
				h.log.Warn("proxy has gone", "proxy", p.name, "err", err)
			}
		})
	}
}

func (h *Hub) enter(p *proxy) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.proxies) >= maxProxies {
		return false
	}
	h.proxies[p] = struct{}{}
	return true
}

func (h *Hub) leave(p *proxy) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.proxies, p)
	for _, a := range p.addresses {
		h.left[a] = time.Now()
	}
	h.judge()
}

// remembered is for how long a proxy that has gone is taken for one that is about to come again: it may still have
// listeners.
const remembered = time.Minute

// Addresses are those that proxies with a network of their own connect from.
func (h *Hub) Addresses() []netip.Addr {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []netip.Addr
	for p := range h.proxies {
		all = append(all, p.addresses...)
	}
	for a, since := range h.left {
		if time.Since(since) > remembered {
			delete(h.left, a)
			continue
		}
		all = append(all, a)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// judge notes whether there is a proxy that answers. It is for who holds mu.
func (h *Hub) judge() {
	there := false
	for p := range h.proxies {
		there = there || p.greeted && !p.hangs
	}
	if there == h.there {
		return
	}
	if there {
		h.log.Info("a proxy is there", "late", time.Since(h.since).Round(time.Millisecond).String())
	} else {
		h.log.Warn("no proxy is there: connections wait")
	}
	h.there, h.since = there, time.Now()
}

// Status is for people.
func (h *Hub) Status() attach.UpstreamStatus {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := attach.UpstreamStatus{Address: h.path, Protocol: "sockets", Ready: h.there, Since: h.since}
	for p := range h.proxies {
		if p.greeted {
			s.Proxies = append(s.Proxies, p.status())
		}
	}
	slices.SortFunc(s.Proxies, func(x, y attach.ProxyStatus) int { return x.Since.Compare(y.Since) })
	switch {
	case s.Ready:
	case len(s.Proxies) > 0:
		s.Reason = "no proxy that is connected answers"
	default:
		s.Reason = "no proxy is connected"
	}
	return s
}
