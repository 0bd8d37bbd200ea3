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

// String returns IPv4 or IPv6.
func (f Family) String() string { return map[Family]string{IPv4: "IPv4", IPv6: "IPv6"}[f] }

func (f Family) has(a netip.Addr) bool { return a.Is4() == (f == IPv4) }

// The types below describe the rules once; each backend translates them.

type table struct {
	name   string // nat, filter or mangle
	chains []chain
}

type chain struct {
	name  string // without the prefix that a backend may give it
	hook  string // the built-in chain that jumps here; "" if only sluice's own chains do
	via   match  // limits that jump
	why   string // the reason for the jump
	rules []rule
}

type rule struct {
	match  match
	target target
	why    string // its reason; the backends write it as a comment
}

// match is a conjunction of conditions; a zero field matches every packet.
type match struct {
	proto    string // tcp or udp
	in, out  string // interface
	src, dst netip.Prefix
	dstLocal bool // the destination is an address of this netns
	dports   PortRange
	syn      bool // the first segment of a connection
	invalid  bool // conntrack state INVALID
	dnat     bool // conntrack rewrote the destination: the packet was redirected
	direct   bool // sluiced entered it into conntrack with DirectMark, and it has no answer yet
	socket   bool // a socket in this netns would receive it
}

// target is the action for a packet that matches: one of the constants, or a jump to the chain of that name.
type target string

const (
	targetReturn   target = "RETURN"
	targetDrop     target = "DROP"
	targetReject   target = "REJECT" // with port-unreachable
	targetOutbound target = "REDIRECT to the outbound port"
	targetInbound  target = "REDIRECT to the inbound port"
)

// redirects maps the targets that redirect to their ports.
var redirects = map[target]uint16{targetOutbound: OutboundPort, targetInbound: InboundPort}

// Names of the chains; a name has the same meaning in every table.
const (
	chainOutput     = "OUTPUT"
	chainPrerouting = "PREROUTING"
	chainForward    = "FORWARD"
	chainInput      = "INPUT"
	chainOutbound   = "OUTBOUND"
	chainCapture    = "CAPTURE"
)

// tables describes r for one family, in the order in which the tables are installed: the guard of the
// capture ports is in place before the first connection is redirected to them. synGate is false for
// kernels that lack the socket match: they refuse a SYN that finds no listener instead of dropping it.
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

// inputChain guards the capture ports. It sees SYNs only: if it dropped later segments too, the connections
// of a daemon that died would hang instead of getting their reset.
func (r Ruleset) inputChain(synGate bool) chain {
	whyReturn := "redirected, and a socket listens: let it in"
	whyDrop := "not redirected: no direct connections to this port; or no listener: the client sends the SYN again"
	if !synGate {
		whyReturn = "redirected: let it in (no socket match in this kernel, so no SYN gate)"
		whyDrop = "not redirected: no direct connections to this port"
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
			rule{redirected, targetReturn, whyReturn},
			rule{to, targetDrop, whyDrop},
		)
	}
	guard(OutboundPort)
	if len(r.InboundPorts) > 0 {
		guard(InboundPort)
	}
	return c
}

// fromPod handles packets that the pod itself sends.
func (r Ruleset) fromPod(proto string) chain {
	c := chain{
		name: chainOutput, hook: chainOutput, via: match{proto: proto},
		why:   "packets that the pod itself sends",
		rules: []rule{{match{out: "lo"}, targetReturn, "localhost and the pod's own addresses"}},
	}
	for _, name := range r.ExcludeInterfaces {
		c.rules = append(c.rules, rule{match{out: name}, targetReturn, "excluded interface"})
	}
	c.rules = append(c.rules, rule{match{}, chainOutbound, "the rest leaves the pod"})
	return c
}

// fromElsewhere handles packets that arrive from outside, and from containers nested in the pod. A nested
// container has a netns of its own behind a bridge in this one, so its packets never pass OUTPUT here.
func (r Ruleset) fromElsewhere(hook, proto string, inbound []rule) chain {
	c := chain{name: hook, hook: hook, via: match{proto: proto}, why: "packets from outside and from nested containers"}
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
				fromNode := match{src: p, in: name}
				rules = append(rules, rule{fromNode, targetReturn, "from the node or the proxy: not captured"})
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

// outbound returns excluded destinations and passes the included ones to the capture chain.
func (r Ruleset) outbound(f Family) chain {
	c := chain{name: chainOutbound}
	if up := r.Upstream; up.IsValid() && f.has(up.Addr()) {
		itself := netip.PrefixFrom(up.Addr(), up.Addr().BitLen())
		c.rules = append(c.rules, rule{
			match{proto: "tcp", dst: itself, dports: PortRange{up.Port(), up.Port()}},
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

// captureNAT redirects connections by their SYN alone. If a connection is older than the rules, conntrack takes its
// next segment for the first one (nf_conntrack_tcp_loose); redirected, that segment would be answered with a reset.
func (r Ruleset) captureNAT() chain {
	return r.capture(nil, rule{match{syn: true}, targetOutbound, "captured"})
}

// captureFilter rejects QUIC and drops captured TCP that nat did not redirect.
func (r Ruleset) captureFilter() chain {
	var first []rule
	if r.RejectQUIC && r.capturesPort(QUICPort) {
		first = append(first, rule{
			match{proto: "udp", dports: PortRange{QUICPort, QUICPort}}, targetReject,
			"QUIC: rejected, so that clients fall back to TCP at once",
		})
	}
	if r.Direct {
		direct := match{proto: "tcp", syn: true, direct: true}
		first = append(first, rule{direct, targetReturn, "sluiced has marked it to go direct"})
	}
	redirected := match{proto: "tcp", syn: true, dnat: true}
	first = append(first, rule{redirected, targetReturn, "redirected, on its way to the gate"})
	return r.capture(first,
		rule{
			match{syn: true}, targetDrop,
			"SYN that conntrack takes for an older connection: nat skipped it, it would leak",
		},
		rule{match{invalid: true}, targetDrop, "conntrack state INVALID: it would skip nat and leak"},
	)
}

// capture has the rules of first, then each of acts for the ports that the port lists capture. An act's own match
// still holds; capture adds TCP and the port to it.
func (r Ruleset) capture(first []rule, acts ...rule) chain {
	c := chain{name: chainCapture, rules: first}
	for _, p := range r.ExcludePorts {
		c.rules = append(c.rules, rule{match{proto: "tcp", dports: p}, targetReturn, "excluded port"})
	}
	ports := r.IncludePorts
	if len(ports) == 0 {
		ports = []PortRange{{}} // matches every port
	}
	for _, p := range ports {
		for _, act := range acts {
			act.match.proto, act.match.dports = "tcp", p
			c.rules = append(c.rules, act)
		}
	}
	return c
}
