package ruleset

import (
	"net/netip"
)

// Family is an address family; each has its own tables in the kernel.
type Family int

// The families that are captured.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

func (f Family) String() string { return map[Family]string{IPv4: "IPv4", IPv6: "IPv6"}[f] }

func (f Family) has(a netip.Addr) bool { return a.Is4() == (f == IPv4) }

// The one description of the rules, which the backends translate.

type table struct {
	name   string // nat, filter or mangle
	chains []chain
}

type chain struct {
	name  string // without the prefix that a backend may give it
	hook  string // the built-in chain that jumps here; "" if only own chains do
	via   match  // what that jump is limited to
	why   string
	rules []rule
}

type rule struct {
	match  match
	target target
	why    string
}

// match is a conjunction; a zero field does not limit.
type match struct {
	proto    string // tcp or udp
	in, out  string // interface
	src, dst netip.Prefix
	dstLocal bool // the destination is an address of this netns
	dports   PortRange
	syn      bool // the first segment of a connection
	invalid  bool // conntrack can make nothing of it
	dnat     bool // conntrack rewrote the destination: it was redirected
	direct   bool // entered into conntrack with DirectMark, and not answered yet
	socket   bool // a socket in this netns would take it
}

// target is what happens to a packet that matches: one of the constants, or the name of a chain.
type target string

const (
	targetReturn   target = "RETURN"
	targetDrop     target = "DROP"
	targetReject   target = "REJECT" // with port-unreachable
	targetOutbound target = "REDIRECT to the outbound port"
	targetInbound  target = "REDIRECT to the inbound port"
)

// redirects are the targets that redirect, and the ports they redirect to.
var redirects = map[target]uint16{targetOutbound: OutboundPort, targetInbound: InboundPort}

// Names of the chains, in whichever table.
const (
	chainOutput     = "OUTPUT"
	chainPrerouting = "PREROUTING"
	chainForward    = "FORWARD"
	chainInput      = "INPUT"
	chainOutbound   = "OUTBOUND"
	chainCapture    = "CAPTURE"
)

// tables describes r for one family, in the order in which the tables go in: what guards the port is
// there before anything is redirected to it. Without synGate, for kernels that lack the socket match,
// a SYN that finds no listener is refused by the kernel instead of dropped.
func (r Ruleset) tables(f Family, synGate bool) []table {
	return []table{
		{name: "mangle", chains: []chain{r.inputChain(synGate)}},
		{name: "filter", chains: []chain{
			r.captureFilter(),
			r.outbound(f),
			r.fromPod(""),
			r.fromElsewhere(chainForward, "", nil),
		}},
		{name: "nat", chains: []chain{
			r.captureNAT(),
			r.outbound(f),
			r.fromPod("tcp"),
			r.fromElsewhere(chainPrerouting, "tcp", r.inbound(f)),
		}},
	}
}

// inputChain guards the capture ports. Without `syn`, connections that a dead daemon held would hang
// instead of getting their reset.
func (r Ruleset) inputChain(synGate bool) chain {
	why := "redirected, and somebody listens: let it in"
	if !synGate {
		why = "redirected: let it in (no socket match in this kernel, so no SYN gate)"
	}
	c := chain{
		name: chainInput, hook: chainInput, via: match{proto: "tcp", syn: true},
		why: "new connections",
	}
	guard := func(port uint16) {
		to := match{proto: "tcp", dports: PortRange{port, port}}
		redirected := to
		redirected.dnat, redirected.socket = true, synGate
		c.rules = append(c.rules,
			rule{redirected, targetReturn, why},
			rule{to, targetDrop, "made to the port directly: no way in; or nobody listens: the SYN is sent again"},
		)
	}
	guard(OutboundPort)
	if len(r.InboundPorts) > 0 {
		guard(InboundPort)
	}
	return c
}

func (r Ruleset) fromPod(proto string) chain {
	c := chain{
		name: chainOutput, hook: chainOutput, via: match{proto: proto},
		why:   "what the pod sends",
		rules: []rule{{match{out: "lo"}, targetReturn, "localhost and the pod's own addresses"}},
	}
	for _, name := range r.ExcludeInterfaces {
		c.rules = append(c.rules, rule{match{out: name}, targetReturn, "excluded interface"})
	}
	c.rules = append(c.rules, rule{match{}, chainOutbound, "the rest leaves the pod"})
	return c
}

// fromElsewhere sees what arrives from outside, and from containers nested in the pod: each has a netns of
// its own behind a bridge in this one, so its packets never pass OUTPUT here.
func (r Ruleset) fromElsewhere(hook, proto string, inbound []rule) chain {
	c := chain{name: hook, hook: hook, via: match{proto: proto}, why: "what the pod itself does not send"}
	for _, name := range r.ExcludeInterfaces {
		c.rules = append(c.rules, rule{match{in: name}, targetReturn, "excluded interface"})
	}
	c.rules = append(c.rules, inbound...)
	for _, name := range r.Interfaces {
		c.rules = append(c.rules, rule{match{in: name}, targetReturn, "from outside, to the pod"})
	}
	c.rules = append(c.rules,
		rule{match{dstLocal: true}, targetReturn, "to the pod itself"},
		rule{match{}, chainOutbound, "the rest leaves the pod"},
	)
	return c
}

// inbound redirects connections from outside to InboundPorts.
func (r Ruleset) inbound(f Family) []rule {
	if len(r.InboundPorts) == 0 {
		return nil
	}
	var rules []rule
	for _, name := range r.Interfaces {
		for _, p := range r.ExcludeSources {
			if f.has(p.Addr()) {
				rules = append(rules, rule{match{src: p, in: name}, targetReturn, "the node or the proxy itself"})
			}
		}
		for _, p := range r.InboundPorts {
			rules = append(rules, rule{
				match{in: name, proto: "tcp", dports: p, syn: true, dstLocal: true}, targetInbound, "captured, inbound",
			})
		}
	}
	return rules
}

// outbound lets excluded destinations go and hands the included ones to the capture chain.
func (r Ruleset) outbound(f Family) chain {
	c := chain{name: chainOutbound}
	if up := r.Upstream; up.IsValid() && f.has(up.Addr()) {
		c.rules = append(c.rules, rule{
			match{proto: "tcp", dst: netip.PrefixFrom(up.Addr(), up.Addr().BitLen()), dports: PortRange{up.Port(), up.Port()}},
			targetReturn, "the upstream itself, for pods that use it explicitly",
		})
	}
	for _, p := range r.ExcludeCIDRs {
		if f.has(p.Addr()) {
			c.rules = append(c.rules, rule{match{dst: p}, targetReturn, "excluded CIDR"})
		}
	}
	if len(r.IncludeCIDRs) == 0 {
		c.rules = append(c.rules, rule{match{}, chainCapture, "every other destination"})
	}
	for _, p := range r.IncludeCIDRs {
		if f.has(p.Addr()) {
			c.rules = append(c.rules, rule{match{dst: p}, chainCapture, "included CIDR"})
		}
	}
	return c
}

// captureNAT redirects what begins with a SYN. Of a connection that was open before there were rules, conntrack
// takes the next segment for the first (nf_conntrack_tcp_loose); redirected, it would be answered with a reset.
func (r Ruleset) captureNAT() chain {
	return r.capture(nil, rule{match{syn: true}, targetOutbound, "captured"})
}

func (r Ruleset) captureFilter() chain {
	var first []rule
	if r.RejectQUIC && r.capturesPort(QUICPort) {
		first = append(first, rule{
			match{proto: "udp", dports: PortRange{QUICPort, QUICPort}}, targetReject,
			"QUIC: refused, so that clients take TCP at once",
		})
	}
	if r.Direct {
		first = append(first, rule{match{proto: "tcp", syn: true, direct: true}, targetReturn, "sluiced lets it go direct"})
	}
	first = append(first, rule{match{proto: "tcp", syn: true, dnat: true}, targetReturn, "redirected, on its way to the gate"})
	return r.capture(first,
		rule{match{syn: true}, targetDrop, "not redirected, as to conntrack it belongs to who had the port before: it would leak"},
		rule{match{invalid: true}, targetDrop, "conntrack calls it INVALID: it would skip nat and leak"},
	)
}

// capture does what acts say to the TCP that the port lists capture and that also matches them.
func (r Ruleset) capture(first []rule, acts ...rule) chain {
	c := chain{name: chainCapture, rules: first}
	for _, p := range r.ExcludePorts {
		c.rules = append(c.rules, rule{match{proto: "tcp", dports: p}, targetReturn, "excluded port"})
	}
	ports := r.IncludePorts
	if len(ports) == 0 {
		ports = []PortRange{{}} // does not limit
	}
	for _, p := range ports {
		for _, act := range acts {
			act.match.proto, act.match.dports = "tcp", p
			c.rules = append(c.rules, act)
		}
	}
	return c
}
