package proxies

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// offer is the listeners of one gate, as they are offered to proxies.
type offer struct {
	id      string // of the netns
	pod     attach.Pod
	ips     []netip.Addr
	gate    *gate.Gate
	cookies []uint64 // of the listeners
}

// message describes o for a proxy that has asked for these labels of pods.
func (o *offer) message(keys []string, labels map[string]string) message {
	m := message{Kind: kindAttach, ID: o.id, Pod: &podDescription{
		Namespace: o.pod.Namespace, Name: o.pod.Name, UID: o.pod.UID, IPs: []string{},
	}}
	for _, ip := range o.ips {
		m.Pod.IPs = append(m.Pod.IPs, ip.String())
	}
	for _, l := range o.gate.Listeners {
		direction := "outbound"
		if l.Inbound {
			direction = "inbound"
		}
		m.Listeners = append(m.Listeners, listener{Direction: direction})
	}
	if len(keys) > 0 {
		m.Pod.Labels = map[string]string{}
		for _, key := range keys {
			if v, ok := labels[key]; ok {
				m.Pod.Labels[key] = v
			}
		}
	}
	return m
}

// Handout is the acceptor of one pod whose listeners proxies get.
type Handout struct {
	hub *Hub
	id  string
	pod attach.Pod
	ips []netip.Addr
	log *slog.Logger

	mu    sync.Mutex // see the package comment
	offer *offer     // nil while the pod is not served
}

// For makes the acceptor of one endpoint.
func (h *Hub) For(s endpoint.Served) *Handout {
	return &Handout{hub: h, id: s.Netns.String(), pod: s.Pod, ips: s.IPs, log: h.log.With("pod", s.Pod.String())}
}

// Serve offers the listeners of g to every proxy until accepting ends. If the gate is handed over, the proxies keep the
// listeners, for the daemon that goes on with it. Otherwise they have to close them.
func (p *Handout) Serve(_, accepting context.Context, g *gate.Gate) {
	cookies, err := g.Cookies()
	if err != nil {
		p.log.Error("listeners cannot be handed out", "err", err)
		return
	}
	o := &offer{id: p.id, pod: p.pod, ips: p.ips, gate: g, cookies: cookies}
	p.begin(accepting, o)
	<-accepting.Done()
	p.end(o)
	if !errors.Is(context.Cause(accepting), endpoint.ErrHandedOver) {
		p.hub.withdraw(o)
	}
}

// begin offers o, unless accepting at its gate has already ended.
func (p *Handout) begin(accepting context.Context, o *offer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if accepting.Err() == nil {
		p.offer = o
		p.hub.add(o)
	}
}

func (p *Handout) end(o *offer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.offer == o {
		p.offer = nil
	}
}

// Counts asks the kernel. The bytes of connections that have ended are not known.
func (p *Handout) Counts() sockdiag.Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.offer == nil {
		return sockdiag.Counts{}
	}
	c, err := p.offer.gate.Counts()
	if err != nil {
		p.log.Warn("connections cannot be counted", "err", err)
	}
	return c
}
