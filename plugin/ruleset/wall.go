package ruleset

import (
	"encoding/binary"
	"net"
	"slices"

	"golang.org/x/sys/unix"
)

// The wall is in nftables, whichever backend has the other rules. It consists of three tables.
//
// The table wall of the family inet sees each packet that the netns' stack sends or forwards, after every other rule.
// A TCP segment that goes out through a CNI interface passes if its destination is excluded, or by a mark of its
// conntrack entry: letOut, which a connection to an excluded destination gets and one that sluiced lets go direct, or
// fromOutside. In which state conntrack thinks the connection to be does not matter: without a mark the segment stays
// in the pod. Each packet that passes is marked.
//
// The table of the link (Linux 5.16) sees each frame on its way to a CNI interface, those of packet sockets too: they
// do not pass the stack. A frame passes if it has that mark, a route, the interface's own source address and no tag. A
// packet socket can set a mark, but no route. A macvlan or VLAN interface in a nested container has both, but another
// address or a tag. Other frames pass only if they plainly carry no TCP.
//
// The table refuse rejects packets other than TCP that must not be sent, so that the sender
// learns of it at once. It is in nftables because there a packet meets the chains of all programs: dockerd puts its
// rules first into the chain FORWARD of iptables, and they accept.
//
// The table wall also finds out which packets stay in the pod, for the backend's rules: those that go to a bridge. nat
// must know it before the kernel routes the packet.
//
// Both families are in one table because each rule costs time in ADD and whenever the rules are verified.

// Cause says why packets were stopped.
type Cause string

// The causes. The first three would have left the pod around the upstream, and name the likely sender.
const (
	CausePod    Cause = "pod"    // a socket in the pod's netns, of a connection that was not let out
	CauseNested Cause = "nested" // a container nested in the pod
	CausePacket Cause = "packet" // a packet socket, or a network stack of its own, such as gVisor's
	CauseQUIC   Cause = "quic"   // QUIC is rejected
	CauseOther  Cause = "other"  // neither TCP nor QUIC, and rejected by Ruleset.Other
)

// Causes are all causes.
var Causes = []Cause{CausePod, CauseNested, CausePacket, CauseQUIC, CauseOther}

// causeExpired counts packets that passed because the ruleset had expired. It is none of Causes.
const causeExpired Cause = "expired"

// chains of the wall that other tables do not have.
const (
	chainLeaving = "LEAVING"
	chainStop    = "STOP"
)

const whyExpired = "the capture has expired"

// wall describes the tables of the wall. interfaces are the CNI interfaces that exist.
func (r Ruleset) wall(extent Wall, interfaces []Interface) []table {
	switch extent {
	case WallFull:
		return append(r.wall(WallRouted, nil), r.egress(interfaces))
	case WallRouted:
		return []table{r.routedWall(), r.refusals()}
	default:
		return nil
	}
}

func (r Ruleset) routedWall() table {
	return table{family: inet, name: "wall", lasts: r.ExpiresAfter, chains: []chain{
		r.stop(),
		r.captureWall(),
		r.outbound(inet),
		r.leaving(),
		r.leavingPod(),
		r.arriving(),
		fromGate(),
		r.sent(),
	}}
}

// refusals rejects packets other than TCP that must not be sent.
func (r Ruleset) refusals() table {
	quic, other := targetReject, targetReject
	quic.cause, other.cause = CauseQUIC, CauseOther
	via := match{notProto: "tcp"}
	rules := r.others(inet, quic, other)
	if r.ExpiresAfter > 0 {
		rules = append([]rule{{match{expired: true}, targetReturn, whyExpired}}, rules...)
	}
	return table{family: inet, name: "refuse", lasts: r.ExpiresAfter, chains: []chain{
		{name: chainCapture, rules: rules},
		r.outbound(inet),
		r.fromPod(via, true),
		r.fromElsewhere(chainForward, via, nil, true),
	}}
}

// walled are the interfaces that the wall stands at.
func (r Ruleset) walled() []string {
	return slices.DeleteFunc(slices.Clone(r.Interfaces), func(name string) bool {
		return slices.Contains(r.ExcludeInterfaces, name)
	})
}

// leavingPod sees packets after all address translation.
func (r Ruleset) leavingPod() chain {
	c := chain{name: chainPostrouting, hook: chainPostrouting}
	c.rules = []rule{{match{out: "lo"}, targetReturn, "from the pod to itself"}}
	for _, name := range r.walled() {
		leaves := target{verb: verbGoto, chain: chainLeaving}
		c.rules = append(c.rules, rule{match{out: name}, leaves, "through a CNI interface"})
	}
	// Of other packets as well: the frames of a VLAN interface meet the table of the link too.
	unpass := rule{match{}, target{verb: verbUnpass}, "a mark that the sender has set counts for nothing"}
	c.rules = append(c.rules, unpass)
	return c
}

// leaving lets packets pass that may leave, whatever mark they have, and stops the others. The most frequent ones come
// first.
func (r Ruleset) leaving() chain {
	const detour = "a source route: it may end at a captured destination"
	c := chain{name: chainLeaving}
	if r.ExpiresAfter > 0 {
		pass := targetPass
		pass.cause = causeExpired
		c.rules = []rule{
			{
				match{expired: true, proto: "tcp", state: ctOriginal}, target{verb: verbLetOut},
				"the connection goes on if the pod is captured later",
			},
			{match{expired: true}, pass, whyExpired},
		}
	}
	c.rules = append(c.rules, []rule{
		// The packets of IGMP have another option.
		{match{family: IPv4, notProto: "igmp", detour: true}, jump(chainStop), detour},
		{match{family: IPv6, detour: true}, jump(chainStop), detour},
		{
			match{proto: "tcp", state: ctOriginal, notSYN: true, letOut: true}, targetPass,
			"its connection was let out",
		},
		// No SYN: conntrack may take it for the second of a simultaneous open, whose first came from outside. Then nat
		// is not asked.
		{
			match{proto: "tcp", state: ctReply, notSYN: true, answers: true}, targetPass,
			"an answer to a connection from outside",
		},
		// Only with state NEW: the entry outlives the connection, and its port may get another user.
		{match{proto: "tcp", syn: true, state: ctNew, letOut: true}, targetPass, "sluiced lets it go direct"},
	}...)
	if r.KeepOlder {
		c.rules = append(c.rules, rule{
			match{proto: "tcp", notSYN: true}, targetPass, "its connection may be older than the capture",
		})
	}
	c.rules = append(c.rules,
		rule{match{}, jump(chainOutbound), "returns if the destination is excluded"},
		rule{
			match{proto: "tcp", state: ctOriginal}, target{verb: verbLetOut},
			"excluded: the connection goes on if the rules change",
		},
		rule{match{}, targetPass, "excluded"},
	)
	return c
}

// captureWall also drops what refusals has not rejected, such as a packet of a raw socket that goes to no connection.
func (r Ruleset) captureWall() chain {
	c := chain{name: chainCapture, rules: r.others(inet, jump(chainStop), jump(chainStop))}
	for _, header := range []match{
		{proto: "ah"},
		{family: IPv6, proto: "mobility"}, {family: IPv6, proto: "hip"}, {family: IPv6, proto: "shim6"},
	} {
		c.rules = append(c.rules, rule{header, jump(chainStop), "TCP may follow this header"})
	}
	c.rules = append(c.rules, rule{match{notProto: "tcp"}, targetReturn, "no TCP"})
	if len(r.ExcludePorts)+len(r.IncludePorts) > 0 {
		// nftables takes other bytes of some fragments for their ports: of IPv6 a part of the flow label.
		for _, f := range []Family{IPv4, IPv6} {
			fragment := match{family: f, proto: "tcp", fragment: true}
			c.rules = append(c.rules, rule{fragment, jump(chainStop), "it may not show its ports"})
		}
	}
	// The ports that are not captured return, and all else is stopped.
	c.rules = append(c.rules, r.excludedPorts()...)
	for _, p := range complement(r.IncludePorts) {
		c.rules = append(c.rules, rule{match{proto: "tcp", dports: p}, targetReturn, "a port that is not included"})
	}
	last := rule{match{}, jump(chainStop), "captured, and not redirected: it would bypass the proxy"}
	if r.ExpiresAfter > 0 {
		last = rule{match{}, targetDrop, "held until the pod's labels are known: the client sends the SYN again"}
	}
	c.rules = append(c.rules, last)
	return c
}

// complement returns the ports from 1 that are in none of the ranges. If there are no ranges, it returns none.
func complement(ranges []PortRange) (rest []PortRange) {
	if len(ranges) == 0 {
		return nil
	}
	sorted := slices.SortedFunc(slices.Values(ranges), func(a, b PortRange) int { return int(a.First) - int(b.First) })
	next := 1 // the first port that is in none of the ranges before
	for _, p := range sorted {
		if int(p.First) > next {
			rest = append(rest, PortRange{uint16(next), p.First - 1})
		}
		next = max(next, int(p.Last)+1)
	}
	if next <= 65535 {
		rest = append(rest, PortRange{uint16(next), 65535})
	}
	return rest
}

func (r Ruleset) stop() chain {
	return chain{name: chainStop, rules: []rule{
		{match{forwarded: true}, target{verb: verbStop, cause: CauseNested}, "sent by a nested container"},
		{match{}, target{verb: verbStop, cause: CausePod}, "sent by a socket in the pod's netns"},
	}}
}

// arriving sees packets before their destination is translated and before they are routed.
func (r Ruleset) arriving() chain {
	c := chain{name: chainPrerouting, hook: chainPrerouting}
	c.rules = []rule{{match{in: "lo"}, targetReturn, "from the pod to itself"}}
	for _, name := range r.walled() {
		begins := match{in: name, proto: "tcp", state: ctNew}
		c.rules = append(c.rules,
			rule{begins, target{verb: verbAnswer}, "from outside: answers may leave"},
			rule{match{in: name}, targetReturn, "from outside"},
		)
	}
	c.rules = append(c.rules,
		rule{match{fromBridge: true}, target{verb: verbKnowFrom}, "nested containers are behind bridges"},
		rule{match{}, target{verb: verbOutside}, "a mark that the sender has set counts for nothing"},
		rule{match{toKnown: true}, target{verb: verbInside}, "to a nested container"},
	)
	return c
}

// sent sees packets of the netns' own sockets, before their destination is translated.
func (r Ruleset) sent() chain {
	c := chain{name: chainOutput, hook: chainOutput}
	for _, port := range r.openPorts() {
		c.rules = append(c.rules, rule{match{proto: "tcp", sport: port}, jump(chainGate), "from the gate"})
	}
	c.rules = append(c.rules,
		rule{match{out: "lo"}, targetReturn, "from the pod to itself"},
		rule{match{}, target{verb: verbOutside}, "a mark that the sender has set counts for nothing"},
		rule{match{toBridge: true}, target{verb: verbKnowTo}, "to a nested container: they are behind bridges"},
	)
	return c
}

// fromGate drops segments of connections whose conntrack entry was lost. Not translated back, such a segment would be
// answered with a reset. The next segment of the app makes a new entry.
func fromGate() chain {
	const why = "the conntrack entry of its connection was lost"
	return chain{name: chainGate, rules: []rule{
		{match{proto: "tcp", state: ctOriginal}, targetDrop, why},
		{match{proto: "tcp", state: ctInvalid}, targetDrop, why},
	}}
}

// egress describes the table of the link. The kernel refuses a hook at an interface that does not exist.
func (r Ruleset) egress(interfaces []Interface) table {
	var rules []rule
	if r.ExpiresAfter > 0 {
		rules = []rule{{match{expired: true}, target{verb: verbAccept, cause: causeExpired}, whyExpired}}
	}
	rules = append(append(rules, r.plain()...),
		rule{match{routed: true}, target{verb: verbStop, cause: CausePod}, "the stack's rules have not let it pass"},
		rule{match{}, target{verb: verbStop, cause: CausePacket}, "sent by a packet socket, or by a stack of its own"},
	)
	t := table{family: link, name: "wall", lasts: r.ExpiresAfter, chains: []chain{{name: chainEgress, rules: rules}}}
	for _, i := range interfaces {
		if !slices.Contains(r.walled(), i.Name) {
			continue
		}
		c := chain{name: chainEgress + "_" + i.Name, hook: chainEgress, at: i.Name}
		for _, frame := range i.frames() {
			passes := match{passed: true, routed: true, frame: frame}
			c.rules = append(c.rules, rule{passes, targetAccept, "the stack's rules have let it pass"})
		}
		c.rules = append(c.rules, rule{match{}, jump(chainEgress), "another frame"})
		t.chains = append(t.chains, c)
	}
	return t
}

// frames are tests of which one holds for each frame that the netns' own stack sends through i: the source address is
// that of the interface, and IP follows without a tag. For an interface without such an address there is no test.
func (i Interface) frames() [][]frameTest {
	mac, err := net.ParseMAC(i.MAC)
	if err != nil {
		return [][]frameTest{nil}
	}
	var tests [][]frameTest
	for _, t := range []uint16{etherIPv4, etherIPv6} {
		tests = append(tests, []frameTest{{offset: sizeMAC, value: slices.Concat(mac, be16(t))}})
	}
	return tests
}

// sizeMAC is the length of an Ethernet address, and so the offset of the source address in a frame.
const sizeMAC = 6

// Offsets in a frame, in bytes. A VLAN tag moves all but the first by 4.
const (
	offsetType = 12 // the EtherType
	offsetIP   = 14 // the IP header

	offsetIPv4Fragment = offsetIP + 6
	offsetIPv4Protocol = offsetIP + 9
	offsetIPv4Dst      = offsetIP + 16
	offsetIPv4UDP      = offsetIP + 20 // without options
	offsetIPv6Next     = offsetIP + 6
	offsetIPv6UDP      = offsetIP + 40 // without extension headers
	sizeVLANTag        = 4
)

// EtherTypes of frames that carry IP.
const (
	etherIPv4 = unix.ETH_P_IP
	etherIPv6 = unix.ETH_P_IPV6
	etherVLAN = unix.ETH_P_8021Q
)

// harmless are the EtherTypes that pods use and that carry no IP: ARP, 802.1X, LLDP and PTP. All others may carry it,
// such as an 802.3 frame with a SNAP header, which has its length there.
var harmless = []uint16{unix.ETH_P_ARP, unix.ETH_P_PAE, unix.ETH_P_LLDP, unix.ETH_P_1588}

// plain accepts frames that did not pass the rules of the stack but plainly carry no TCP. It looks at bytes of the
// frame and not at the kernel's notion of its protocol, since a packet socket can set that to any value.
func (r Ruleset) plain() (rules []rule) {
	// A tag with VLAN identifier 0 only has a priority: the frame belongs to no VLAN.
	untagged := []frameTest{
		{offset: offsetType, value: be16(etherVLAN)},
		{offset: offsetType + 2, mask: []byte{0x0f, 0xff}, value: []byte{0, 0}},
	}
	for _, tag := range []struct {
		size  uint32
		tests []frameTest
	}{{0, nil}, {sizeVLANTag, untagged}} {
		for _, t := range harmless {
			is := frameTest{offset: offsetType + tag.size, value: be16(t)}
			rules = append(rules, rule{
				match{frame: append(slices.Clone(tag.tests), is)}, targetAccept, "no IP, such as ARP",
			})
		}
		for _, k := range r.plainIP() {
			tests := slices.Clone(tag.tests)
			for _, t := range k.tests {
				t.offset += tag.size
				tests = append(tests, t)
			}
			rules = append(rules, rule{match{frame: tests}, targetAccept, k.why})
		}
	}
	return rules
}

// plainIP lists the kinds of IP packets that a packet socket may send. An IPv6 extension header, an IPv4 option or a
// fragment could hide TCP or UDP, so it may send none of these where it matters.
func (r Ruleset) plainIP() (kinds []struct {
	tests []frameTest
	why   string
}) {
	add := func(why string, tests ...frameTest) {
		kinds = append(kinds, struct {
			tests []frameTest
			why   string
		}{tests, why})
	}
	at := func(offset uint32, value ...byte) frameTest { return frameTest{offset: offset, value: value} }
	not := func(offset uint32, value ...byte) frameTest {
		return frameTest{offset: offset, not: true, value: value}
	}
	ipv4, ipv6 := at(offsetType, be16(etherIPv4)...), at(offsetType, be16(etherIPv6)...)
	noOptions := at(offsetIP, 0x45) // version 4, header of 20 bytes
	noFragment := frameTest{offset: offsetIPv4Fragment, mask: []byte{0x3f, 0xff}, value: []byte{0, 0}}
	udpIPv4, udpIPv6 := at(offsetIPv4Protocol, unix.IPPROTO_UDP), at(offsetIPv6Next, unix.IPPROTO_UDP)
	add("DHCP: plugins of other networks renew leases with it", ipv4, noOptions, noFragment, udpIPv4,
		at(offsetIPv4Dst, 255, 255, 255, 255), at(offsetIPv4UDP, 0, 68, 0, 67))
	if r.Other != "" && r.Other != OtherAllow {
		return kinds
	}
	add("IPv4, neither TCP nor UDP nor an authentication header", ipv4, not(offsetIPv4Protocol, unix.IPPROTO_TCP),
		not(offsetIPv4Protocol, unix.IPPROTO_UDP), not(offsetIPv4Protocol, unix.IPPROTO_AH))
	noTCP := []frameTest{ipv6}
	for _, header := range []byte{
		unix.IPPROTO_HOPOPTS, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ROUTING, unix.IPPROTO_FRAGMENT,
		unix.IPPROTO_AH, unix.IPPROTO_DSTOPTS, 135, 139, 140, // mobility, HIP, shim6
	} {
		noTCP = append(noTCP, not(offsetIPv6Next, header))
	}
	add("IPv6, neither TCP nor UDP nor an extension header", noTCP...)
	if !r.RejectQUIC || !r.capturesPort(QUICPort) {
		add("UDP", ipv4, udpIPv4)
		add("UDP", ipv6, udpIPv6)
		return kinds
	}
	add("UDP to another port than that of QUIC", ipv4, noOptions, noFragment, udpIPv4,
		not(offsetIPv4UDP+2, be16(QUICPort)...))
	add("UDP to another port than that of QUIC", ipv6, udpIPv6, not(offsetIPv6UDP+2, be16(QUICPort)...))
	return kinds
}

func be16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }
