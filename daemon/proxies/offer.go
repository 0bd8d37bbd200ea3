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
	ips     func() []netip.Addr
	trust   func() attach.PodTrust
	gate    *gate.Gate
	cookies []uint64 // of the listeners
}

// describe describes the pod of o for a proxy that has asked for these labels of pods.
func (o *offer) describe(keys []string, labels map[string]string) *podDescription {
	trust := o.trust()
	d := podDescription{
		Namespace: o.pod.Namespace, Name: o.pod.Name, UID: o.pod.UID, IPs: []string{},
		Trust: trust.State, TLS: trust.TLS, Nested: trust.Nested, Containers: trust.Containers,
	}
	if d.Containers != nil {
		d.Nested = attach.Pass // for a proxy that does not know the states of containers
	}
	for _, ip := range o.ips() {
		d.IPs = append(d.IPs, ip.String())
	}
	if len(keys) > 0 {
		d.Labels = map[string]string{}
		for _, key := range keys {
			if v, ok := labels[key]; ok {
				d.Labels[key] = v
			}
		}
	}
	return &d
}

// message hands the listeners of o over.
func (o *offer) message(pod *podDescription) message {
	m := message{Kind: kindAttach, ID: o.id, Pod: pod}
	for _, l := range o.gate.Listeners {
		direction := "outbound"
		if l.Inbound {
			direction = "inbound"
		}
		m.Listeners = append(m.Listeners, listener{Direction: direction})
	}
	return m
}

// Handout is the acceptor of one pod whose listeners proxies get.
type Handout struct {
	hub *Hub
	id  string
	pod attach.Pod
	// ips and trust are asked whenever proxies are told about the pod.
	ips   func() []netip.Addr
	trust func() attach.PodTrust
	log   *slog.Logger

	mu    sync.Mutex // see the package comment
	offer *offer     // nil while the pod is not served
}

// For makes the acceptor of one endpoint. trust returns how the pod's TLS is to be treated now.
func (h *Hub) For(s endpoint.Served, trust func() attach.PodTrust) *Handout {
	return &Handout{
		hub: h, id: s.Netns.String(), pod: s.Pod, ips: s.Addresses, trust: trust,
		log: h.log.With("pod", s.Pod.String()),
	}
}

// Serve offers the listeners of g to every proxy until accepting ends. If the gate is handed over, the proxies keep the
// listeners, for the daemon that goes on with it. Otherwise they have to close them.
func (p *Handout) Serve(_, accepting context.Context, g *gate.Gate) {
	cookies, err := g.Cookies()
	if err != nil {
		p.log.Error("listeners cannot be handed out", "err", err)
		return
	}
	o := &offer{id: p.id, pod: p.pod, ips: p.ips, trust: p.trust, gate: g, cookies: cookies}
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
