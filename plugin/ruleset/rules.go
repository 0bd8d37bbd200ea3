package ruleset

import (
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Family is an address family; each has its own tables in the kernel.
type Family int

// The families that are captured.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Only nftables has tables of these families: inet sees packets of IPv4 and IPv6, and link sees frames on their way to
// a network interface.
const (
	inet Family = 10
	link Family = 2
)

// String returns IPv4, IPv6, inet or link.
func (f Family) String() string {
	return map[Family]string{IPv4: "IPv4", IPv6: "IPv6", inet: "inet", link: "link"}[f]
}

func (f Family) has(a netip.Addr) bool { return f == inet || f == familyOf(a) }

func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// The types below describe the rules once; each backend translates them.

type table struct {
	family Family
	name   string // nat, filter, mangle or wall
	chains []chain
	lasts  time.Duration // until the rules expire, if a match has expired
}

type chain struct {
	name  string // without the prefix that a backend may give it
	hook  string // the built-in chain that jumps here; "" if only sluice's own chains do
	via   match  // limits that jump
	why   string // the reason for the jump; "" if the chain is at the hook itself, as nftables has it
	at    string // in a table of the family link, the interface of the hook
	rules []rule
}

type rule struct {
	match  match
	target target
	why    string // its reason; the backends write it as a comment
}

// match is a conjunction of conditions; a zero field matches every packet.
type match struct {
	proto    string // a key of nftProtocols; of iptables tcp, udp and icmpv6
	notProto string // such a key too
	in, out  string // interface
	src, dst netip.Prefix
	dstLocal bool // the destination is an address of this netns
	sport    uint16
	dports   PortRange
	syn      bool // the first segment of a connection
	notSYN   bool // any other segment
	state    ctState
	dnat     bool // conntrack rewrote the destination: the packet was redirected
	inside   bool // the packet's mark has the bit inside
	letOut   bool // the mark of the conntrack entry has the bit letOut
	socket   bool // a socket in this netns would receive it

	// Only the rules of the wall have the conditions below, so only nftables renders them.

	family     Family // of the packet, in a table of the family inet
	answers    bool   // the mark of the conntrack entry has the bit fromOutside
	detour     bool   // of the family given, with a source route: the packet may end elsewhere
	fragment   bool   // of the family given, and a fragment, which conntrack did not put together with the others
	passed     bool   // the packet's mark has the bit passed
	routed     bool   // the stack of a netns has routed the packet: packet sockets send without a route
	forwarded  bool   // the packet came in through an interface
	fromBridge bool   // it came in through a bridge
	toBridge   bool   // it goes out through a bridge
	toKnown    bool   // its route leads out through one of the known bridges
	expired    bool   // the ruleset has expired
	frame      []frameTest
}

// frameTest compares bytes of a frame with a value.
type frameTest struct {
	offset uint32 // from the begin of the link-layer header
	mask   []byte // nil compares all bits
	not    bool   // the bytes must differ
	value  []byte
}

// ctState is a state or a direction of conntrack.
type ctState string

const (
	ctNew       ctState = "NEW"       // the connection has no answer yet
	ctRelated   ctState = "RELATED"   // an ICMP error about a connection
	ctInvalid   ctState = "INVALID"   // conntrack does not know the connection, and the packet begins none
	ctUntracked ctState = "UNTRACKED" // not tracked: IPv6 neighbour discovery and multicast listener discovery
	ctOriginal  ctState = "ORIGINAL"  // from the end that began the connection
	ctReply     ctState = "REPLY"     // from the other end
)

// target is the action for a packet that matches.
type target struct {
	verb  verb
	chain string         // of verbJump and verbGoto
	to    netip.AddrPort // where the connection is sent; of verbRedirect the port only
	cause Cause          // the wall counts the packet by it, unless it is empty
}

type verb string

const (
	verbReturn   verb = "RETURN"
	verbAccept   verb = "ACCEPT"
	verbDrop     verb = "DROP"
	verbReject   verb = "REJECT" // with port-unreachable; counts too in nftables
	verbJump     verb = "JUMP"
	verbRedirect verb = "REDIRECT"
	verbDNAT     verb = "DNAT"

	// Only the wall has these.

	verbGoto     verb = "GOTO"   // jumps, and does not come back
	verbStop     verb = "STOP"   // counts and drops
	verbLetOut   verb = "LETOUT" // sets letOut in the mark of the conntrack entry
	verbAnswer   verb = "ANSWER" // sets fromOutside there
	verbPass     verb = "PASS"   // sets passed in the packet's mark, and returns
	verbUnpass   verb = "UNPASS" // clears it
	verbInside   verb = "INSIDE" // sets inside in the packet's mark
	verbOutside  verb = "OUTSIDE"
	verbKnowFrom verb = "KNOWFROM" // adds the interface that the packet came in through to the known bridges
	verbKnowTo   verb = "KNOWTO"   // adds the interface that it goes out through, and sets inside
)

var (
	targetReturn = target{verb: verbReturn}
	targetAccept = target{verb: verbAccept}
	targetDrop   = target{verb: verbDrop}
	targetPass   = target{verb: verbPass}
	targetReject = target{verb: verbReject}
)

// isOfWall reports whether only nftables renders m.
func (m match) isOfWall() bool {
	return m.family != 0 || m.passed || m.answers || m.detour || m.fragment || m.routed || m.forwarded ||
		m.fromBridge || m.toBridge || m.toKnown || m.expired || m.frame != nil || m.sport != 0 || m.notSYN
}

// isOfWall reports whether only nftables renders t.
func (t target) isOfWall() bool {
	return slices.Contains([]verb{
		verbGoto, verbStop, verbLetOut, verbAnswer, verbPass, verbUnpass, verbInside, verbOutside, verbKnowFrom,
		verbKnowTo,
	}, t.verb)
}

// only is the one family whose packets m matches, or 0 if it matches those of both.
func (m match) only() Family {
	switch {
	case m.family != 0:
		return m.family
	case m.src.IsValid():
		return familyOf(m.src.Addr())
	case m.dst.IsValid():
		return familyOf(m.dst.Addr())
	}
	return 0
}

func jump(chain string) target { return target{verb: verbJump, chain: chain} }

// Names of the chains; a name has the same meaning in every table.
const (
	chainOutput      = "OUTPUT"
	chainPrerouting  = "PREROUTING"
	chainForward     = "FORWARD"
	chainInput       = "INPUT"
	chainPostrouting = "POSTROUTING"
	chainEgress      = "EGRESS"
	chainOutbound    = "OUTBOUND"
	chainCapture     = "CAPTURE"
	chainGate        = "GATE"
)

// facts are the properties of a netns and its kernel that the rules depend on.
type facts struct {
	// synGate is false for kernels that lack the socket match: they refuse a SYN that finds no listener instead of
	// dropping it.
	synGate bool
	// wall is false for kernels without nftables. Rules of the filter table then stand in for the wall.
	wall bool
	// interfaces are the CNI interfaces that exist.
	interfaces []Interface
}

// Interface is a CNI interface with one global address of each family, or the zero value.
type Interface struct {
	Name string     `json:"name"`
	MAC  string     `json:"mac,omitempty"` // as net.HardwareAddr writes it; empty unless it is an Ethernet address
	IPv4 netip.Addr `json:"ipv4,omitzero"`
	IPv6 netip.Addr `json:"ipv6,omitzero"`
}

// String returns the name and the addresses.
func (i Interface) String() string {
	words := []string{i.Name}
	if i.MAC != "" {
		words = append(words, i.MAC)
	}
	for _, a := range []netip.Addr{i.IPv4, i.IPv6} {
		if a.IsValid() {
			words = append(words, "with", a.String())
		}
	}
	return strings.Join(words, " ")
}

func (i Interface) addr(f Family) netip.Addr {
	if f == IPv4 {
		return i.IPv4
	}
	return i.IPv6
}

// tables describes the part of r that a backend renders, for one family, in the order in which the tables are
// installed: the guard of the capture ports is in place before the first connection is redirected to them.
func (r Ruleset) tables(f Family, k facts) []table {
	guard := table{family: f, name: "mangle", chains: []chain{r.inputChain(k.synGate)}}
	nat := table{family: f, name: "nat", chains: []chain{
		r.gate(f, k.interfaces),
		r.captureNAT(),
		r.outbound(f),
		r.fromPod(match{proto: "tcp"}, k.wall),
		r.fromElsewhere(chainPrerouting, match{proto: "tcp"}, r.inbound(f), k.wall),
	}}
	if k.wall {
		return []table{guard, nat}
	}
	return []table{guard, r.filter(f), nat}
}

// filter stands in for the wall: it rejects the packets other than TCP that must not be sent, and drops captured TCP
// that nat did not redirect.
func (r Ruleset) filter(f Family) table {
	return table{family: f, name: "filter", chains: []chain{
		r.captureFilter(f),
		r.outbound(f),
		r.fromPod(match{}, false),
		r.fromElsewhere(chainForward, match{}, nil, false),
	}}
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
	for _, port := range r.openPorts() {
		to := match{proto: "tcp", dports: PortRange{port, port}}
		redirected := to
		redirected.dnat, redirected.socket = true, synGate
		c.rules = append(c.rules,
			rule{redirected, targetReturn, whyReturn},
			rule{to, targetDrop, whyDrop},
		)
	}
	return c
}

// openPorts are the capture ports that the pod's listeners have.
func (r Ruleset) openPorts() []uint16 {
	ports := r.CapturePorts()
	switch {
	case r.ExpiresAfter > 0: // nothing is redirected, so the ports are the app's
		return nil
	case len(r.InboundPorts) == 0:
		return []uint16{ports.Outbound}
	}
	return []uint16{ports.Outbound, ports.Inbound}
}

// fromPod handles packets that the pod itself sends. Without the wall no packet is known to stay inside.
func (r Ruleset) fromPod(via match, wall bool) chain {
	c := chain{
		name: chainOutput, hook: chainOutput, via: via,
		why:   "packets that the pod itself sends",
		rules: []rule{{match{out: "lo"}, targetReturn, "localhost and the pod's own addresses"}},
	}
	for _, name := range r.ExcludeInterfaces {
		c.rules = append(c.rules, rule{match{out: name}, targetReturn, "excluded interface"})
	}
	if wall {
		c.rules = append(c.rules, rule{match{inside: true}, targetReturn, "to a nested container"})
	}
	c.rules = append(c.rules, rule{match{}, jump(chainOutbound), "the rest leaves the pod"})
	return c
}

// fromElsewhere handles packets that arrive from outside, and from containers nested in the pod. A nested
// container has a netns of its own behind a bridge in this one, so its packets never pass OUTPUT here.
func (r Ruleset) fromElsewhere(hook string, via match, inbound []rule, wall bool) chain {
	c := chain{name: hook, hook: hook, via: via, why: "packets from outside and from nested containers"}
	for _, name := range r.ExcludeInterfaces {
		c.rules = append(c.rules, rule{match{in: name}, targetReturn, "excluded interface"})
	}
	c.rules = append(c.rules, inbound...)
	for _, name := range r.Interfaces {
		c.rules = append(c.rules, rule{match{in: name}, targetReturn, "from outside, to the pod"})
	}
	if hook == chainPrerouting {
		c.rules = append(c.rules, rule{match{dstLocal: true}, targetReturn, "to the pod itself"})
	}
	if wall {
		// Bridged frames come here too if the sysctl bridge-nf-call-iptables is 1, as kubeadm wants it.
		toInside := match{inside: true}
		c.rules = append(c.rules, rule{toInside, targetReturn, "from one nested container to another"})
	}
	c.rules = append(c.rules, rule{match{}, jump(chainOutbound), "the rest leaves the pod"})
	return c
}

// inbound redirects connections from outside to InboundPorts; see captureNAT.
func (r Ruleset) inbound(f Family) []rule {
	if len(r.InboundPorts) == 0 {
		return nil
	}
	to := target{verb: verbRedirect, to: netip.AddrPortFrom(netip.Addr{}, r.CapturePorts().Inbound)}
	var rules []rule
	for _, name := range r.Interfaces {
		for _, p := range r.ExcludeSources {
			if f.has(p.Addr()) {
				fromNode := match{src: p, in: name}
				rules = append(rules, rule{fromNode, targetReturn, "from the node or the proxy: not captured"})
			}
		}
		for _, p := range r.InboundPorts {
			captured := match{in: name, proto: "tcp", dports: p, syn: r.KeepOlder, dstLocal: true}
			rules = append(rules, rule{captured, to, "captured, inbound"})
		}
	}
	return rules
}

// outbound returns excluded destinations and passes the included ones to the capture chain.
func (r Ruleset) outbound(f Family) chain {
	c := chain{name: chainOutbound}
	if up := r.Upstream; up.IsValid() && f.has(up.Addr()) {
		c.rules = append(c.rules, rule{
			match{proto: "tcp", dst: only(up.Addr()), dports: PortRange{up.Port(), up.Port()}},
			targetReturn, "the upstream itself, for pods that use it explicitly",
		})
	}
	for _, p := range r.ExcludeCIDRs {
		if f.has(p.Addr()) {
			c.rules = append(c.rules, rule{match{dst: p}, targetReturn, "excluded CIDR"})
		}
	}
	if len(r.IncludeCIDRs) == 0 {
		c.rules = append(c.rules, rule{match{}, jump(chainCapture), "every other destination"})
	}
	for _, p := range r.IncludeCIDRs {
		if f.has(p.Addr()) {
			c.rules = append(c.rules, rule{match{dst: p}, jump(chainCapture), "included CIDR"})
		}
	}
	return c
}

// only is the prefix of one address.
func only(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// captureNAT sends captured connections to the gate. nat sees the first packet of a connection that conntrack does not
// know: a SYN, or a later segment of a connection whose entry was lost. The latter gets a new entry with the same
// translation, so the connection goes on. A connection that is older than the rules would be reset by that.
func (r Ruleset) captureNAT() chain {
	if r.ExpiresAfter > 0 {
		return r.capture(nil) // the wall holds them
	}
	return r.capture(nil, rule{match{syn: r.KeepOlder}, jump(chainGate), "captured"})
}

// gate sends a connection to the listener. The destination becomes an address of the interface through which the packet
// would leave. REDIRECT would make it 127.0.0.1, to which there is no route from a socket that is bound to an interface
// (SO_BINDTODEVICE): its SYN would leave through that interface, addressed to 127.0.0.1, and be lost.
func (r Ruleset) gate(f Family, interfaces []Interface) chain {
	c, port := chain{name: chainGate}, r.CapturePorts().Outbound
	for _, i := range interfaces {
		if a := i.addr(f); a.IsValid() {
			to := target{verb: verbDNAT, to: netip.AddrPortFrom(a, port)}
			leaves := match{proto: "tcp", out: i.Name}
			c.rules = append(c.rules, rule{leaves, to, "to the gate, by that interface's address"})
		}
	}
	to := target{verb: verbRedirect, to: netip.AddrPortFrom(netip.Addr{}, port)}
	why := "to the gate, from a nested container or without an address"
	c.rules = append(c.rules, rule{match{proto: "tcp"}, to, why})
	return c
}

func (r Ruleset) captureFilter(f Family) chain {
	port := r.CapturePorts().Outbound
	direct := match{proto: "tcp", syn: true, state: ctNew, letOut: true}
	toGate := match{proto: "tcp", dports: PortRange{port, port}, syn: true, dnat: true}
	return r.capture(
		append(r.others(f, targetReject, targetReject),
			rule{direct, targetReturn, "sluiced has marked it to go direct"},
			rule{toGate, targetReturn, "redirected, on its way to the gate"},
		),
		rule{
			match{syn: true}, targetDrop,
			"SYN that conntrack takes for an older connection: nat skipped it, it would leak",
		},
		rule{match{state: ctInvalid}, targetDrop, "conntrack state INVALID: it would skip nat and leak"},
	)
}

// others applies the targets to captured packets other than TCP, as far as they must not be sent.
func (r Ruleset) others(f Family, quic, other target) []rule {
	var rules []rule
	if r.RejectQUIC && r.capturesPort(QUICPort) {
		toQUIC := match{proto: "udp", dports: PortRange{QUICPort, QUICPort}}
		rules = append(rules, rule{toQUIC, quic, "QUIC: rejected, so that clients fall back to TCP at once"})
	}
	if r.Other == "" || r.Other == OtherAllow {
		return rules
	}
	rules = append(rules,
		rule{match{notProto: "tcp", state: ctReply}, targetReturn, "the answer to a packet from outside"},
		rule{match{notProto: "tcp", state: ctRelated}, targetReturn, "an ICMP error about a connection"},
	)
	if f != IPv4 {
		neighbours := match{proto: "icmpv6", state: ctUntracked}
		rules = append(rules, rule{neighbours, targetReturn, "neighbour discovery: IPv6 does not work without it"})
	}
	for _, a := range r.Resolvers {
		if f.has(a) && r.Other == OtherDNS {
			dns := match{proto: "udp", dst: only(a), dports: PortRange{53, 53}}
			rules = append(rules, rule{dns, targetReturn, "DNS, to a resolver of the pod"})
		}
	}
	return append(rules, rule{match{notProto: "tcp"}, other, "neither TCP nor let out: rejected"})
}

// excludedPorts returns excluded destination ports.
func (r Ruleset) excludedPorts() (rules []rule) {
	for _, p := range r.ExcludePorts {
		rules = append(rules, rule{match{proto: "tcp", dports: p}, targetReturn, "excluded port"})
	}
	return rules
}

// capture has the rules of first, then each of acts for the ports that the port lists capture. An act's own match
// still holds; capture adds TCP and the port to it.
func (r Ruleset) capture(first []rule, acts ...rule) chain {
	c := chain{name: chainCapture, rules: slices.Concat(first, r.excludedPorts())}
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
