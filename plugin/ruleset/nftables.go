package ruleset

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// nftablesBackend speaks netlink itself and needs no binary on the node. It makes a table sluice-TABLE for each
// table of the description, so that removing or replacing one is a single operation.
type nftablesBackend struct{}

const nftTablePrefix = "sluice-"

func (nftablesBackend) name() string { return BackendNFTables }

// nftablesWorks returns an error if the kernel has no nftables.
func nftablesWorks() error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nftables: %w", err)
	}
	if _, err := conn.ListTablesOfFamily(nftables.TableFamilyIPv4); err != nil {
		return fmt.Errorf("nftables is the only backend on this node, and the kernel does not serve it: %w", err)
	}
	return nil
}

// lacksNFT reports whether err is that of a kernel without nf_tables, or without a part of it.
func lacksNFT(err error) bool {
	lacking := []error{unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EOPNOTSUPP, unix.EINVAL}
	return slices.ContainsFunc(lacking, func(l error) bool { return errors.Is(err, l) })
}

func nftFamily(f Family) nftables.TableFamily {
	return map[Family]nftables.TableFamily{
		IPv4: nftables.TableFamilyIPv4, IPv6: nftables.TableFamilyIPv6,
		inet: nftables.TableFamilyINet, link: nftables.TableFamilyNetdev,
	}[f]
}

type nftHook struct {
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
}

// nftHooks gives the chains that stand for iptables' built-in ones the same hooks and priorities. The wall's chains are
// the last before a packet leaves, and come right before nat where it arrives.
var nftHooks = map[string]map[string]nftHook{
	"mangle": {
		chainInput: {nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityMangle},
	},
	"filter": {
		chainOutput:  {nftables.ChainTypeFilter, nftables.ChainHookOutput, nftables.ChainPriorityFilter},
		chainForward: {nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter},
	},
	"nat": {
		chainOutput:     {nftables.ChainTypeNAT, nftables.ChainHookOutput, nftables.ChainPriorityNATDest},
		chainPrerouting: {nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest},
	},
	"refuse": {
		chainOutput:  {nftables.ChainTypeFilter, nftables.ChainHookOutput, beforeFilter},
		chainForward: {nftables.ChainTypeFilter, nftables.ChainHookForward, beforeFilter},
	},
	"wall": {
		chainOutput:      {nftables.ChainTypeFilter, nftables.ChainHookOutput, beforeNAT},
		chainPrerouting:  {nftables.ChainTypeFilter, nftables.ChainHookPrerouting, beforeNAT},
		chainPostrouting: {nftables.ChainTypeFilter, nftables.ChainHookPostrouting, last},
		chainEgress:      {nftables.ChainTypeFilter, nftables.ChainHookEgress, nftables.ChainPriorityFilter},
	},
}

var (
	beforeNAT    = new(*nftables.ChainPriorityNATDest - 10)
	beforeFilter = new(*nftables.ChainPriorityFilter - 10)
	last         = nftables.ChainPriorityConntrackHelper
)

func (nftablesBackend) apply(_ context.Context, _ Family, tables []table) error {
	return replaceTables(tables, tables)
}

func (nftablesBackend) remove(_ context.Context, _ Family, tables []table) error {
	return replaceTables(tables, nil)
}

// replaceTables deletes the tables of old that exist and adds those of fresh, in one transaction.
func replaceTables(old, fresh []table) error {
	stale, err := existing(old)
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	err = commit(func(conn *nftables.Conn) error {
		for _, t := range stale {
			conn.DelTable(t)
		}
		for _, t := range fresh {
			if err := addTable(conn, t); err != nil {
				return fmt.Errorf("%s table %s: %w", t.family, nftTablePrefix+t.name, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("nftables: replacing tables: %w", err)
	}
	return nil
}

// existing returns those of the tables that exist. Only these are deleted, in place of an add-then-delete: closing the
// socket waits until deleted tables are freed, a grace period of RCU (nft_rcv_nl_event, net/netfilter/nf_tables_api.c),
// which takes 10 ms or more.
func existing(tables []table) (found []*nftables.Table, err error) {
	if len(tables) == 0 {
		return nil, nil
	}
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("opening nftables: %w", err)
	}
	have, err := conn.ListTables()
	if err != nil {
		return nil, fmt.Errorf("listing tables: %w", err)
	}
	for _, t := range tables {
		nt := nftTable(t)
		is := func(h *nftables.Table) bool { return h.Name == nt.Name && h.Family == nt.Family }
		if slices.ContainsFunc(have, is) {
			found = append(found, nt)
		}
	}
	return found, nil
}

func nftTable(t table) *nftables.Table {
	return &nftables.Table{Family: nftFamily(t.family), Name: nftTablePrefix + t.name}
}

// knownBridges is the set of the bridges that packets have come from or gone to.
const knownBridges = "bridges"

// knowsBridges reports whether t has that set.
func knowsBridges(t table) bool { return t.name == "wall" && t.family != link }

func addTable(conn *nftables.Conn, t table) error {
	nt := conn.CreateTable(nftTable(t)) // fails if it exists: its rules would stay
	if knowsBridges(t) {
		set := &nftables.Set{
			Table: nt, Name: knownBridges, KeyType: nftables.TypeIFIndex, Dynamic: true, Size: 1 << 10,
			ID: 1, // in the transaction; package nftables would count in a variable without a lock
		}
		if err := conn.AddSet(set, nil); err != nil {
			return err
		}
	}
	if t.lasts > 0 {
		if err := conn.AddSet(nftLasting(nt, t.lasts)); err != nil {
			return err
		}
	}
	chains := nftChains(t)
	for _, cause := range causesOf(chains) {
		conn.AddObj(&nftables.NamedObj{
			Table: nt, Name: string(cause), Type: nftables.ObjTypeCounter, Obj: &expr.Counter{},
		})
	}
	for _, c := range chains {
		if c.hook == "" {
			conn.AddChain(&nftables.Chain{Table: nt, Name: c.name}) // before the rules that jump to it
		}
	}
	for _, c := range chains {
		if c.hook != "" {
			h := nftHooks[t.name][c.hook]
			conn.AddChain(&nftables.Chain{
				Table: nt, Name: c.name, Type: h.kind, Hooknum: h.hook, Priority: h.priority, Device: c.at,
			})
		}
		for _, r := range c.rules {
			conn.AddRule(nftRule(nt, t.family, c.name, r))
		}
	}
	return nil
}

// lasting is the set whose one element the kernel removes when the ruleset expires. Unlike a match of the time it does
// not depend on the clock of the node, which may be set while the node starts.
const lasting = "lasting"

// notExpired is that element.
var notExpired = binaryutil.NativeEndian.PutUint32(1)

func nftLasting(nt *nftables.Table, lasts time.Duration) (*nftables.Set, []nftables.SetElement) {
	set := &nftables.Set{
		Table: nt, Name: lasting, KeyType: nftables.TypeMark, HasTimeout: true,
		ID: 2, // as for knownBridges
	}
	return set, []nftables.SetElement{{Key: notExpired, Timeout: lasts}}
}

// causesOf are the causes by which the rules of chains count packets.
func causesOf(chains []chain) []Cause {
	found := map[Cause]bool{}
	for _, c := range chains {
		for _, r := range c.rules {
			found[r.target.cause] = true
		}
	}
	return slices.DeleteFunc(append(slices.Clone(Causes), causeExpired), func(c Cause) bool { return !found[c] })
}

// nftChains are the chains of t as this backend makes them: those at a hook are base chains of their own, which stand
// for the built-in chains of iptables and jump to the others.
func nftChains(t table) (all []chain) {
	for _, c := range t.chains {
		if c.hook == "" || c.why != "" {
			all = append(all, chain{name: chainPrefix + c.name, rules: c.rules})
		}
		switch {
		case c.hook == "":
		case c.why != "":
			all = append(all, chain{name: c.hook, hook: c.hook, rules: []rule{{c.via, jump(c.name), c.why}}})
		default:
			all = append(all, c)
		}
	}
	return all
}

func (nftablesBackend) check(_ context.Context, _ Family, tables []table) ([]string, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("opening nftables: %w", err)
	}
	return checkTables(conn, tables)
}

// checkTables compares the rules of the netns of conn with tables.
func checkTables(conn *nftables.Conn, tables []table) ([]string, error) {
	bases, err := conn.ListChains()
	if err != nil {
		return nil, fmt.Errorf("listing chains: %w", err)
	}
	drift, err := checkFlags(conn, tables)
	if err != nil {
		return nil, err
	}
	for _, t := range tables {
		d, err := checkCounters(conn, t)
		if err != nil {
			return nil, err
		}
		drift = append(drift, d...)
		for _, c := range nftChains(t) {
			if c.hook != "" && slices.ContainsFunc(bases, func(b *nftables.Chain) bool { return isAstray(b, t, c) }) {
				drift = append(drift, fmt.Sprintf("%s table %s chain %s: not at its hook", t.family, nftTable(t).Name,
					c.name))
			}
			d, err := checkChain(conn, t, c.name, c.rules)
			if err != nil {
				return nil, err
			}
			drift = append(drift, d...)
		}
	}
	return drift, nil
}

// checkFlags names the tables that have a flag: one that is dormant has no effect.
func checkFlags(conn *nftables.Conn, tables []table) (drift []string, err error) {
	have, err := conn.ListTables()
	if err != nil {
		return nil, fmt.Errorf("listing tables: %w", err)
	}
	for _, t := range tables {
		nt := nftTable(t)
		for _, h := range have {
			if h.Name == nt.Name && h.Family == nt.Family && h.Flags != 0 {
				drift = append(drift, fmt.Sprintf("%s table %s: it has flags, such as dormant", t.family, nt.Name))
			}
		}
	}
	return drift, nil
}

// checkCounters reports counters of t that are not sluice's: a pod could make reading them slow. The rules refer to
// those that are, so the kernel keeps them.
func checkCounters(conn *nftables.Conn, t table) (drift []string, err error) {
	want := len(causesOf(t.chains))
	if want == 0 {
		return nil, nil
	}
	nt := nftTable(t)
	have, err := conn.GetObjects(nt)
	if err != nil {
		return nil, fmt.Errorf("listing the counters of %s table %s: %w", t.family, nt.Name, err)
	}
	if len(have) > want {
		drift = append(drift, fmt.Sprintf("%s table %s: %d counters instead of %d", t.family, nt.Name, len(have), want))
	}
	return drift, nil
}

// isAstray reports whether b has the name of the base chain c of t, and is not at its hook.
func isAstray(b *nftables.Chain, t table, c chain) bool {
	nt, h := nftTable(t), nftHooks[t.name][c.hook]
	if b.Table.Name != nt.Name || b.Table.Family != nt.Family || b.Name != c.name {
		return false
	}
	return b.Type != h.kind || b.Hooknum == nil || *b.Hooknum != *h.hook ||
		b.Priority == nil || *b.Priority != *h.priority
}

// tooMany is how many rules more than sluice's are not looked at one by one: a pod could make checking slow.
const tooMany = 100

func checkChain(conn *nftables.Conn, t table, chain string, rules []rule) ([]string, error) {
	f, nt := t.family, nftTable(t)
	where := fmt.Sprintf("%s table %s chain %s", f, nt.Name, chain)
	have, err := conn.GetRules(nt, &nftables.Chain{Table: nt, Name: chain})
	if errors.Is(err, unix.ENOENT) {
		return []string{where + ": missing"}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", where, err)
	}
	if len(have) > len(rules)+tooMany {
		return []string{fmt.Sprintf("%s: %d rules instead of %d", where, len(have), len(rules))}, nil
	}
	// Rules are compared as expressions, and reported as iptables would write them.
	want, wanted := make([]string, len(rules)), make([][]expr.Any, len(rules))
	for i, r := range rules {
		want[i], wanted[i] = text(f, chain, r), readable(nftRule(nt, f, chain, r).Exprs)
	}
	got := make([]string, len(have))
	for i, h := range have {
		got[i] = fmt.Sprintf("a rule that is not ours, handle %d", h.Handle)
		exprs := readable(h.Exprs)
		is := func(wanted []expr.Any) bool { return reflect.DeepEqual(exprs, wanted) }
		if i < len(rules) && is(wanted[i]) { // in its place, as nearly all are
			got[i] = want[i]
		} else if n := slices.IndexFunc(wanted, is); n >= 0 {
			got[i] = want[n]
		}
	}
	return diff(where, got, want), nil
}

// text writes a rule for people: as iptables would if it can express it, and else by its reason.
func text(f Family, chain string, r rule) string {
	if f == link || f == inet || r.target.isOfWall() || r.match.isOfWall() {
		return fmt.Sprintf("%s: %s", chain, r.why)
	}
	return appendRule(f, chain, r.match, r.target)
}

// readable leaves out the differences between a rule as it was written and as google/nftables v0.3.0 reads it: it skips
// the socket expression, so only the comparison of its result stays, and it reads the IDs that sets had in the
// transaction.
func readable(all []expr.Any) []expr.Any {
	var kept []expr.Any
	for _, e := range all {
		switch e := e.(type) {
		case *expr.Socket:
		case *expr.Ct: // its source register is not read
			if e.SourceRegister {
				e = &expr.Ct{Key: e.Key}
			}
			kept = append(kept, e)
		case *expr.Lookup:
			kept = append(kept, &expr.Lookup{SourceRegister: e.SourceRegister, SetName: e.SetName, Invert: e.Invert})
		case *expr.Dynset:
			kept = append(kept, &expr.Dynset{SrcRegKey: e.SrcRegKey, SetName: e.SetName, Operation: e.Operation})
		default:
			kept = append(kept, e)
		}
	}
	return kept
}

// nftRule translates one rule. The rule's reason becomes the comment that `nft list` shows.
func nftRule(nt *nftables.Table, f Family, chain string, r rule) *nftables.Rule {
	return &nftables.Rule{
		Table: nt, Chain: &nftables.Chain{Table: nt, Name: chain},
		Exprs:    append(nftMatch(f, r.match), nftTarget(f, r.target)...),
		UserData: userdata.AppendString(nil, userdata.TypeComment, r.why),
	}
}

// Registers of 16 bytes. No match needs two values at once; DNAT has an address and a port.
const reg, regPort = 1, 2

// Keys that google/nftables has no names for (linux/netfilter/nf_tables.h).
const (
	metaKeyIIFKIND expr.MetaKey = 26
	metaKeyOIFKIND expr.MetaKey = 27
)

// nftMatch puts first what tells the most packets of established connections apart: each expression costs time.
func nftMatch(f Family, m match) []expr.Any {
	var e []expr.Any
	add := func(x ...expr.Any) { e = append(e, x...) }
	compare := func(op expr.CmpOp, data []byte) expr.Any { return &expr.Cmp{Op: op, Register: reg, Data: data} }
	equal := func(data []byte) expr.Any { return compare(expr.CmpOpEq, data) }
	meta := func(key expr.MetaKey) expr.Any { return &expr.Meta{Key: key, Register: reg} }
	if f == inet && m.only() != 0 {
		f = m.only()
		add(meta(expr.MetaKeyNFPROTO), equal([]byte{byte(nftFamily(f))}))
	}
	if m.expired {
		add(&expr.Immediate{Register: reg, Data: notExpired},
			&expr.Lookup{SourceRegister: reg, SetName: lasting, Invert: true})
	}
	if m.in != "" {
		add(meta(expr.MetaKeyIIFNAME), equal(nftInterface(m.in)))
	}
	if m.out != "" {
		add(meta(expr.MetaKeyOIFNAME), equal(nftInterface(m.out)))
	}
	if m.forwarded {
		add(meta(expr.MetaKeyIIF), compare(expr.CmpOpNeq, make([]byte, 4)))
	}
	if m.fromBridge {
		add(meta(metaKeyIIFKIND), equal(nftInterface("bridge")))
	}
	if m.toBridge {
		add(meta(metaKeyOIFKIND), equal(nftInterface("bridge")))
	}
	if m.src.IsValid() {
		add(nftAddress(m.src, map[Family]uint32{IPv4: 12, IPv6: 8}[f])...)
	}
	if m.dst.IsValid() {
		add(nftAddress(m.dst, map[Family]uint32{IPv4: 16, IPv6: 24}[f])...)
	}
	if m.dstLocal {
		add(&expr.Fib{Register: reg, FlagDADDR: true, ResultADDRTYPE: true},
			equal(binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)))
	}
	if m.toKnown {
		add(&expr.Fib{Register: reg, FlagDADDR: true, FlagMARK: true, ResultOIF: true},
			&expr.Lookup{SourceRegister: reg, SetName: knownBridges})
	}
	if m.detour {
		add(nftDetour(f)...)
	}
	if m.proto != "" {
		add(meta(expr.MetaKeyL4PROTO), equal([]byte{nftProtocols[m.proto]}))
	}
	if m.notProto != "" {
		add(meta(expr.MetaKeyL4PROTO), compare(expr.CmpOpNeq, []byte{nftProtocols[m.notProto]}))
	}
	if m.fragment {
		add(nftFragment(f)...)
	}
	if m.sport != 0 {
		add(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2},
			equal(binary.BigEndian.AppendUint16(nil, m.sport)))
	}
	if m.dports != (PortRange{}) {
		add(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
		first := binary.BigEndian.AppendUint16(nil, m.dports.First)
		last := binary.BigEndian.AppendUint16(nil, m.dports.Last)
		if m.dports.First == m.dports.Last {
			add(equal(first))
		} else {
			add(&expr.Range{Op: expr.CmpOpEq, Register: reg, FromData: first, ToData: last})
		}
	}
	if m.state != "" {
		add(nftState(m.state)...)
	}
	if m.syn || m.notSYN {
		op := map[bool]expr.CmpOp{true: expr.CmpOpEq, false: expr.CmpOpNeq}[m.syn]
		const flags, fin, syn, rst, ack = 13, 1, 2, 4, 16 // RFC 9293, section 3.1
		add(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
			&expr.Bitwise{
				SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{fin | syn | rst | ack}, Xor: []byte{0},
			},
			compare(op, []byte{syn}))
	}
	if m.dnat {
		const ipsDstNAT = 1 << 5 // IPS_DST_NAT, linux/netfilter/nf_conntrack_common.h
		add(nftBit(&expr.Ct{Key: expr.CtKeySTATUS, Register: reg}, ipsDstNAT)...)
	}
	if m.letOut {
		add(nftBit(&expr.Ct{Key: expr.CtKeyMARK, Register: reg}, letOut)...)
	}
	if m.answers {
		add(nftBit(&expr.Ct{Key: expr.CtKeyMARK, Register: reg}, fromOutside)...)
	}
	if m.inside {
		add(nftBit(meta(expr.MetaKeyMARK), inside)...)
	}
	if m.passed {
		add(nftBit(meta(expr.MetaKeyMARK), passed)...)
	}
	if m.routed { // without a route the expression ends the rule; every value matches
		add(meta(expr.MetaKeyRTCLASSID), compare(expr.CmpOpGte, make([]byte, 4)))
	}
	for _, t := range m.frame {
		add(nftFrame(t)...)
	}
	if m.socket {
		// Both values of `transparent`, 0 and 1, match; without a socket the expression ends the rule. The key
		// `wildcard` ends it for a socket in TIME_WAIT too, and the SYN of a connection that reuses a port meets such a
		// socket before the listener. Without a listener that SYN is answered with an ACK, and the next is dropped.
		add(&expr.Socket{Key: expr.SocketKeyTransparent, Register: reg}, compare(expr.CmpOpLte, []byte{1}))
	}
	return e
}

// nftProtocols are the numbers of protocols, and of headers at which the kernel stops to look for a protocol.
var nftProtocols = map[string]byte{
	"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "icmpv6": unix.IPPROTO_ICMPV6, "igmp": unix.IPPROTO_IGMP,
	"ah": unix.IPPROTO_AH, "mobility": 135, "hip": 139, "shim6": 140,
}

// nftDetour matches an IPv4 header with options, since a source route is one, and an IPv6 routing header.
func nftDetour(f Family) []expr.Any {
	if f == IPv6 {
		return nftHas(unix.IPPROTO_ROUTING)
	}
	const withoutOptions = 5 // words of 4 bytes
	return []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 0, Len: 1},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{0x0f}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: []byte{withoutOptions}},
	}
}

// nftFragment matches an IPv4 header with an offset or the flag for more fragments, and an IPv6 fragment header.
func nftFragment(f Family) []expr.Any {
	if f == IPv6 {
		return nftHas(unix.IPPROTO_FRAGMENT)
	}
	return []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 6, Len: 2},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 2, Mask: []byte{0x3f, 0xff}, Xor: []byte{0, 0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: []byte{0, 0}},
	}
}

// nftHas matches packets with an IPv6 extension header.
func nftHas(header uint8) []expr.Any {
	return []expr.Any{
		&expr.Exthdr{
			DestRegister: reg, Type: header, Len: 1, Flags: unix.NFT_EXTHDR_F_PRESENT, Op: expr.ExthdrOpIpv6,
		},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{1}},
	}
}

func nftState(s ctState) []expr.Any {
	directions := map[ctState]byte{ctOriginal: 0, ctReply: 1} // enum ip_conntrack_dir
	if d, ok := directions[s]; ok {
		return []expr.Any{
			&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{d}},
		}
	}
	bits := map[ctState]uint32{
		ctNew: expr.CtStateBitNEW, ctRelated: expr.CtStateBitRELATED, ctInvalid: expr.CtStateBitINVALID,
		ctUntracked: expr.CtStateBitUNTRACKED,
	}
	return nftBit(&expr.Ct{Key: expr.CtKeySTATE, Register: reg}, bits[s])
}

func nftFrame(t frameTest) []expr.Any {
	size := uint32(len(t.value))
	e := []expr.Any{&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseLLHeader, Offset: t.offset, Len: size}}
	if t.mask != nil {
		e = append(e, &expr.Bitwise{
			SourceRegister: reg, DestRegister: reg, Len: size, Mask: t.mask, Xor: make([]byte, size),
		})
	}
	op := expr.CmpOpEq
	if t.not {
		op = expr.CmpOpNeq
	}
	return append(e, &expr.Cmp{Op: op, Register: reg, Data: t.value})
}

// nftAddress matches an address at an offset, in bytes, in the IP header.
func nftAddress(p netip.Prefix, offset uint32) []expr.Any {
	size := uint32(p.Addr().BitLen() / 8)
	e := []expr.Any{&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size}}
	if p.Bits() < p.Addr().BitLen() {
		e = append(e, &expr.Bitwise{
			SourceRegister: reg, DestRegister: reg, Len: size,
			Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen()), Xor: make([]byte, size),
		})
	}
	return append(e, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: p.Addr().AsSlice()})
}

// nftBit matches if a bit is set in the value of 4 bytes, in the order of the host, that load loads.
func nftBit(load expr.Any, bit uint32) []expr.Any {
	return []expr.Any{
		load, nftMask(bit, 0),
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: make([]byte, 4)},
	}
}

// nftMask keeps the bits of mask and then inverts those of xor.
func nftMask(mask, xor uint32) expr.Any {
	return &expr.Bitwise{
		SourceRegister: reg, DestRegister: reg, Len: 4,
		Mask: binaryutil.NativeEndian.PutUint32(mask), Xor: binaryutil.NativeEndian.PutUint32(xor),
	}
}

// nftInterface pads a name to the IFNAMSIZ bytes that the kernel compares.
func nftInterface(name string) []byte {
	return append([]byte(name), strings.Repeat("\x00", unix.IFNAMSIZ-len(name))...)
}

// nftCount counts a packet in the counter of its table that has the name of the cause.
func nftCount(c Cause) expr.Any {
	return &expr.Objref{Type: int(nftables.ObjTypeCounter), Name: string(c)}
}

func nftTarget(f Family, t target) []expr.Any {
	mark := func(bit, value uint32) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg}, nftMask(^bit, value),
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg, SourceRegister: true},
		}
	}
	entryMark := func(bit uint32) []expr.Any {
		return []expr.Any{
			&expr.Ct{Key: expr.CtKeyMARK, Register: reg}, nftMask(^bit, bit),
			&expr.Ct{Key: expr.CtKeyMARK, Register: reg, SourceRegister: true},
		}
	}
	know := func(key expr.MetaKey) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: key, Register: reg},
			&expr.Dynset{SrcRegKey: reg, SetName: knownBridges, Operation: unix.NFT_DYNSET_OP_ADD},
		}
	}
	var count []expr.Any
	if t.cause != "" {
		count = []expr.Any{nftCount(t.cause)}
	}
	port := binary.BigEndian.AppendUint16(nil, t.to.Port())
	switch t.verb {
	case verbReturn:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}
	case verbAccept:
		return append(count, &expr.Verdict{Kind: expr.VerdictAccept})
	case verbDrop:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}
	case verbStop:
		return append(count, &expr.Verdict{Kind: expr.VerdictDrop})
	case verbReject:
		if f == inet {
			return append(count, &expr.Reject{
				Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH,
			})
		}
		code := map[Family]uint8{IPv4: 3, IPv6: 4}[f] // port unreachable: RFC 792, RFC 4443
		return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code}}
	case verbGoto:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chainPrefix + t.chain}}
	case verbRedirect:
		const protoSpecified = 2 // NF_NAT_RANGE_PROTO_SPECIFIED
		return []expr.Any{
			&expr.Immediate{Register: reg, Data: port},
			&expr.Redir{RegisterProtoMin: reg, RegisterProtoMax: reg, Flags: protoSpecified},
		}
	case verbDNAT:
		return []expr.Any{
			&expr.Immediate{Register: reg, Data: t.to.Addr().AsSlice()},
			&expr.Immediate{Register: regPort, Data: port},
			&expr.NAT{
				Type: expr.NATTypeDestNAT, Family: uint32(nftFamily(f)), RegAddrMin: reg, RegAddrMax: reg,
				RegProtoMin: regPort, RegProtoMax: regPort, Specified: true,
			},
		}
	case verbLetOut:
		return entryMark(letOut)
	case verbAnswer:
		return entryMark(fromOutside)
	case verbPass:
		return slices.Concat(count, mark(passed, passed), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}})
	case verbUnpass:
		return mark(passed, 0)
	case verbInside:
		return mark(inside, inside)
	case verbOutside:
		return mark(inside, 0)
	case verbKnowFrom:
		return know(expr.MetaKeyIIF)
	case verbKnowTo:
		return append(know(expr.MetaKeyOIF), mark(inside, inside)...)
	default:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chainPrefix + t.chain}}
	}
}
