package escape

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// settings are the part of a pod's configuration that says what is captured.
type settings struct {
	includePorts, excludePorts []ports // empty includePorts: all
	includeCIDRs, excludeCIDRs []netip.Prefix
	quic                       string // reject or allow
	inbound                    []ports
}

type ports struct{ first, last uint16 }

// connection is a connection as the link sees it: the end in the pod, and the end outside. All fragments of a packet
// but the first are a connection of their own, without ports.
type connection struct {
	inside, outside netip.AddrPort
	fragment        uint32
}

// model says which frames may leave a captured pod's link.
type model struct {
	// settings are those that the rules may have at this moment: two while rules are replaced.
	settings []settings
	// fromOutside has the connections that the outside has sent segments of; letOut has those that went to a
	// destination that was not captured. They may go on when the settings change.
	fromOutside, letOut map[connection]bool
	// arrived has the segments that the outside has sent. The pod may send one on, with one end translated: it was
	// addressed so, or it answers a packet of a nested container that had forged the address of its source.
	arrived map[segment]bool
}

// segment is a segment by one of its ends, and its sequence numbers.
type segment struct {
	end     netip.AddrPort
	numbers string
}

// forget makes m forget all connections.
func (m *model) forget() {
	m.fromOutside, m.letOut, m.arrived = map[connection]bool{}, map[connection]bool{}, map[segment]bool{}
}

// arrive notes a packet that goes to the pod.
func (m *model) arrive(p packet) {
	if p.proto == unix.IPPROTO_TCP && p.hasPorts {
		m.fromOutside[connection{inside: p.dst, outside: p.src}] = true
		m.arrived[segment{p.src, p.numbers}], m.arrived[segment{p.dst, p.numbers}] = true, true
	}
}

// mayLeave is the model.
func (m *model) mayLeave(p packet) bool {
	may := m.mayLeaveWhole(p)
	if p.fragment != 0 && p.hasPorts {
		fragments := connection{netip.AddrPortFrom(p.src.Addr(), 0), netip.AddrPortFrom(p.dst.Addr(), 0), p.fragment}
		m.letOut[fragments] = m.letOut[fragments] || may
	}
	return may
}

func (m *model) mayLeaveWhole(p packet) bool {
	c := connection{inside: p.src, outside: p.dst}
	if p.final.IsValid() {
		c.outside = netip.AddrPortFrom(p.final, p.dst.Port())
	}
	if p.later {
		c.fragment = p.fragment
	}
	switch captured := m.captures(p); {
	case p.proto == unix.IPPROTO_UDP:
		quic := !slices.ContainsFunc(m.settings, func(s settings) bool { return s.quic != "reject" })
		return !quic || !captured || p.dst.Port() != 443
	case p.proto != unix.IPPROTO_TCP:
		return true
	case !captured:
		m.letOut[c] = m.letOut[c] || p.hasPorts
		return true
	case m.letOut[c], m.arrived[segment{p.src, p.numbers}], m.arrived[segment{p.dst, p.numbers}]:
		return true
	default:
		return m.fromOutside[c] && !p.beginsConnection()
	}
}

// captures reports whether all settings capture p's destination. One without a port may go to any.
func (m *model) captures(p packet) bool {
	return !slices.ContainsFunc(m.settings, func(s settings) bool {
		return !s.captures(p.dst.Addr(), p) && (!p.final.IsValid() || !s.captures(p.final, p))
	})
}

func (s settings) captures(to netip.Addr, p packet) bool {
	in := func(cidrs []netip.Prefix) bool {
		return slices.ContainsFunc(cidrs, func(c netip.Prefix) bool { return c.Contains(to) })
	}
	on := func(list []ports) bool {
		port := p.dst.Port()
		return slices.ContainsFunc(list, func(r ports) bool { return r.first <= port && port <= r.last })
	}
	return !in(s.excludeCIDRs) && (len(s.includeCIDRs) == 0 || in(s.includeCIDRs)) &&
		(!p.hasPorts || !on(s.excludePorts) && (len(s.includePorts) == 0 || on(s.includePorts)))
}
