// Package proxies hands the listening sockets of pods to proxies on the node, which accept on them themselves. There is
// no relay then, and connections wait in the kernel for a proxy that is late. docs/proxies.md has the protocol.
//
// Three locks, taken in this order: Handout.mu guards the offer of one pod, Hub.mu which offers and proxies there are,
// and proxy.mu the state of one proxy. They are held for moments, Handout.mu also while the kernel counts the pod's
// connections. Nothing is sent to a proxy or received from one under them.
package proxies

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
	"time"

	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/daemon/throttle"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// ReturnTimeout is how long a proxy may take to connect to another sluiced when its own hangs: twice the time without a
// message after which a proxy closes its connection (docs/proxies.md).
const ReturnTimeout = 10 * time.Second

const (
	// maxProxies bounds how many proxies are connected at a time.
	maxProxies = 32
	// acceptRetry is the pause after an accept that failed, most likely for want of descriptors.
	acceptRetry = time.Second
	// addressTTL is how long the addresses of a proxy that has gone are kept: it may come back, and still hold
	// listeners.
	addressTTL = time.Minute
)

// Hub offers listeners to proxies.
type Hub struct {
	path   string
	node   string
	log    *slog.Logger
	lines  throttle.Lines // a proxy can come and go at any rate
	labels func(attach.Pod) map[string]string

	mu      sync.Mutex        // see the package comment
	offers  map[string]*offer // by netns
	proxies map[*proxy]struct{}
	gone    map[netip.Addr]time.Time // addresses of proxies that have gone, and when
	ready   bool                     // a proxy answers
	since   time.Time                // when ready last changed
}

// New makes a hub for the socket at path. labels returns the labels of a pod as far as they are known; it may be nil.
func New(path, node string, labels func(attach.Pod) map[string]string, log *slog.Logger) *Hub {
	if labels == nil {
		labels = func(attach.Pod) map[string]string { return nil }
	}
	return &Hub{
		path: path, node: node, labels: labels, log: log, since: time.Now(),
		offers: map[string]*offer{}, proxies: map[*proxy]struct{}{}, gone: map[netip.Addr]time.Time{},
	}
}

// add offers o to every proxy, in place of an earlier offer for the same netns.
func (h *Hub) add(o *offer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.offers[o.id] = o
	h.wakeLocked()
}

// withdraw takes o back from every proxy.
func (h *Hub) withdraw(o *offer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.offers[o.id] == o {
		delete(h.offers, o.id)
	}
	h.wakeLocked()
}

// wakeLocked makes every proxy compare its listeners with the offers.
func (h *Hub) wakeLocked() {
	for p := range h.proxies {
		p.wakeUp()
	}
}

// Refresh tells every proxy about pods whose descriptions have changed. Proxies are told within ten seconds without
// it.
func (h *Hub) Refresh() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wakeLocked()
}

// Tell is Refresh, and returns when the proxies have read the descriptions, or at the end of ctx.
func (h *Hub) Tell(ctx context.Context) {
	h.mu.Lock()
	proxies := slices.Collect(maps.Keys(h.proxies))
	h.mu.Unlock()
	var reading []<-chan struct{}
	for _, p := range proxies {
		told := make(chan struct{})
		select {
		case p.asked <- told:
			reading = append(reading, told)
		case <-ctx.Done():
		}
	}
	for _, told := range reading {
		select {
		case <-told:
		case <-ctx.Done():
		}
	}
}

// currentOffers returns the offers by netns.
func (h *Hub) currentOffers() map[string]*offer {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.offers)
}

func (h *Hub) isOffered(netns string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.offers[netns] != nil
}

// Owner has the endpoints whose listeners are handed out.
type Owner interface {
	// Returned takes over listeners that a proxy holds of an earlier daemon, if they are wanted, or closes them.
	Returned(netns string, files []*os.File)
	// Reconsider brings the rules of pods in line with the addresses of proxies, which have changed.
	Reconsider(context.Context)
}

// Run serves proxies on l until ctx ends. They keep the listeners that they hold.
func (h *Hub) Run(ctx context.Context, l net.Listener, owner Owner) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	var serving sync.WaitGroup
	defer serving.Wait()
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			h.serve(ctx, c.(*net.UnixConn), owner, &serving)
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("proxy socket %s: %w", h.path, err)
		default:
			h.log.Warn("a proxy cannot be accepted yet", "proxySocket", h.path, "err", err)
			_ = pause.For(ctx, acceptRetry) // the next accept fails once ctx has ended
		}
	}
}

// serve talks to the proxy at the other end of conn in a goroutine of serving.
func (h *Hub) serve(ctx context.Context, conn *net.UnixConn, owner Owner, serving *sync.WaitGroup) {
	p := newProxy(h, conn)
	if !h.enter(p) {
		if count, due := h.lines.Due("refused"); due {
			h.log.Warn("proxy refused: too many are connected", "count", count)
		}
		p.refuse(fmt.Errorf("no more than %d proxies", maxProxies))
		return
	}
	serving.Go(func() {
		err := p.serve(ctx, owner)
		h.leave(p)
		if ctx.Err() != nil {
			return
		}
		if count, due := h.lines.Due("gone"); due {
			h.log.Warn("proxy has gone", "proxy", p.status().Name, "count", count, "err", err)
		}
	})
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
	for _, a := range p.ownAddresses() {
		h.gone[a] = time.Now()
	}
	h.updateReadyLocked()
}

// Addresses returns the addresses from which proxies with a network of their own connect.
func (h *Hub) Addresses() []netip.Addr {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []netip.Addr
	for p := range h.proxies {
		all = append(all, p.ownAddresses()...)
	}
	for a, since := range h.gone {
		if time.Since(since) > addressTTL {
			delete(h.gone, a)
			continue
		}
		all = append(all, a)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// updateReady records whether a proxy answers. Proxies call it when their state has changed.
func (h *Hub) updateReady() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.updateReadyLocked()
}

func (h *Hub) updateReadyLocked() {
	ready := false
	for p := range h.proxies {
		ready = ready || p.answers()
	}
	if ready == h.ready {
		return
	}
	if count, due := h.lines.Due(fmt.Sprintf("ready: %t", ready)); due {
		if ready {
			h.log.Info("a proxy is there", "late", time.Since(h.since).Round(time.Millisecond).String(), "count", count)
		} else {
			h.log.Warn("no proxy is there: connections wait", "count", count)
		}
	}
	h.ready, h.since = ready, time.Now()
}

// Status describes the proxies.
func (h *Hub) Status() attach.UpstreamStatus {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := attach.UpstreamStatus{Address: h.path, Protocol: "sockets", Ready: h.ready, Since: h.since}
	for p := range h.proxies {
		if p.hasGreeted() {
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
