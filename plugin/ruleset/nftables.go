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

func nftFamily(f Family) nftables.TableFamily {
	if f == IPv6 {
		return nftables.TableFamilyIPv6
	}
	return nftables.TableFamilyIPv4
}

// nftHooks gives the chains that stand for iptables' built-in ones the same hooks and priorities.
var nftHooks = map[string]map[string]struct {
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
}{
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
}

func (nftablesBackend) apply(_ context.Context, f Family, tables []table) error {
	return replaceTables(f, tables, tables)
}

func (nftablesBackend) remove(_ context.Context, f Family, tables []table) error {
	return replaceTables(f, tables, nil)
}

// replaceTables deletes the tables of old that exist and adds those of fresh, in one transaction.
func replaceTables(f Family, old, fresh []table) error {
	conn, err := nftables.New(nftables.AsLasting()) // a lasting socket stays in the netns in which it was opened
	if err != nil {
		return fmt.Errorf("opening nftables: %w", err)
	}
	// The library waits for each of the many answers with the help of a goroutine. This goroutine is locked to its
	// thread (ns.Do), so each answer would cost two switches of threads here; transact runs on another.
	done := make(chan error)
	go func() { done <- transact(conn, f, old, fresh) }()
	if err := errors.Join(<-done, conn.CloseLasting()); err != nil {
		return fmt.Errorf("nftables %s: %w", f, err)
	}
	return nil
}

func transact(conn *nftables.Conn, f Family, old, fresh []table) error {
	have, err := conn.ListTablesOfFamily(nftFamily(f))
	if err != nil {
		return fmt.Errorf("listing tables: %w", err)
	}
	for _, t := range old {
		// Only existing tables, not add-then-delete: closing the socket waits until deleted tables are freed, a
		// grace period of RCU (nft_rcv_nl_event, net/netfilter/nf_tables_api.c), which takes 10 ms or more.
		if slices.ContainsFunc(have, func(h *nftables.Table) bool { return h.Name == nftTablePrefix+t.name }) {
			conn.DelTable(nftTable(f, t))
		}
	}
	for _, t := range fresh {
		addTable(conn, f, t)
	}
	return conn.Flush()
}

func nftTable(f Family, t table) *nftables.Table {
	return &nftables.Table{Family: nftFamily(f), Name: nftTablePrefix + t.name}
}

func addTable(conn *nftables.Conn, f Family, t table) {
	nt := conn.AddTable(nftTable(f, t))
	for _, c := range t.chains {
		conn.AddChain(&nftables.Chain{Table: nt, Name: chainPrefix + c.name})
	}
	for _, c := range t.chains {
		for _, r := range c.rules {
			conn.AddRule(nftRule(f, nt, chainPrefix+c.name, r))
		}
		if c.hook == "" {
			continue
		}
		h := nftHooks[t.name][c.hook]
		base := conn.AddChain(&nftables.Chain{
			Table: nt, Name: c.hook, Type: h.kind, Hooknum: h.hook, Priority: h.priority,
		})
		conn.AddRule(nftRule(f, nt, base.Name, rule{c.via, target(c.name), c.why}))
	}
}

func (nftablesBackend) check(_ context.Context, f Family, tables []table) ([]string, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("opening nftables: %w", err)
	}
	var drift []string
	for _, t := range tables {
		nt := nftTable(f, t)
		for _, c := range t.chains {
			d, err := checkChain(conn, f, nt, chainPrefix+c.name, c.rules)
			if err != nil {
				return nil, err
			}
			drift = append(drift, d...)
			if c.hook == "" {
				continue
			}
			if d, err = checkChain(conn, f, nt, c.hook, []rule{{c.via, target(c.name), c.why}}); err != nil {
				return nil, err
			}
			drift = append(drift, d...)
		}
	}
	return drift, nil
}

func checkChain(conn *nftables.Conn, f Family, nt *nftables.Table, chain string, rules []rule) ([]string, error) {
	where := fmt.Sprintf("%s table %s chain %s", f, nt.Name, chain)
	have, err := conn.GetRules(nt, &nftables.Chain{Table: nt, Name: chain})
	if errors.Is(err, unix.ENOENT) {
		return []string{where + ": missing"}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", where, err)
	}
	// Rules are compared as expressions, and reported as iptables would write them.
	got := make([]string, len(have))
	for i, h := range have {
		got[i] = fmt.Sprintf("a rule that is not ours, handle %d", h.Handle)
		for _, r := range rules {
			if reflect.DeepEqual(h.Exprs, readable(nftRule(f, nt, chain, r).Exprs)) {
				got[i] = appendRule(f, chain, r.match, r.target)
			}
		}
	}
	want := make([]string, len(rules))
	for i, r := range rules {
		want[i] = appendRule(f, chain, r.match, r.target)
	}
	return diff(where, got, want), nil
}

// readable leaves out the socket expression, which google/nftables v0.3.0 writes but skips when it reads a rule.
// The comparison of its result stays, so a rule without the socket match still differs.
func readable(e []expr.Any) []expr.Any {
	return slices.DeleteFunc(e, func(x expr.Any) bool { _, isSocket := x.(*expr.Socket); return isSocket })
}

// nftRule translates one rule. The rule's reason becomes the comment that `nft list` shows.
func nftRule(f Family, nt *nftables.Table, chain string, r rule) *nftables.Rule {
	return &nftables.Rule{
		Table: nt, Chain: &nftables.Chain{Table: nt, Name: chain},
		Exprs:    append(nftMatch(f, r.match), nftTarget(f, r.target)...),
		UserData: userdata.AppendString(nil, userdata.TypeComment, r.why),
	}
}

// reg is the register that every match loads into: no match needs two values at once.
const reg = 1

func nftMatch(f Family, m match) []expr.Any {
	var e []expr.Any
	add := func(x ...expr.Any) { e = append(e, x...) }
	equal := func(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data} }
	if m.in != "" {
		add(&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg}, equal(nftInterface(m.in)))
	}
	if m.out != "" {
		add(&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg}, equal(nftInterface(m.out)))
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
	if m.proto != "" {
		number := map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}[m.proto]
		add(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}, equal([]byte{number}))
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
	if m.syn {
		const flags, fin, syn, rst, ack = 13, 1, 2, 4, 16 // RFC 9293, section 3.1
		add(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
			&expr.Bitwise{
				SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{fin | syn | rst | ack}, Xor: []byte{0},
			},
			equal([]byte{syn}))
	}
	if m.invalid {
		add(nftBit(expr.CtKeySTATE, expr.CtStateBitINVALID)...)
	}
	if m.dnat {
		const ipsDstNAT = 1 << 5 // IPS_DST_NAT, linux/netfilter/nf_conntrack_common.h
		add(nftBit(expr.CtKeySTATUS, ipsDstNAT)...)
	}
	if m.direct {
		add(nftBit(expr.CtKeySTATE, expr.CtStateBitNEW)...)
		add(&expr.Ct{Key: expr.CtKeyMARK, Register: reg}, equal(binaryutil.NativeEndian.PutUint32(DirectMark)))
	}
	if m.socket {
		// Both values of `transparent`, 0 and 1, match; without a socket the expression ends the rule. The key
		// `wildcard` ends it for a socket in TIME_WAIT too, and the SYN of a connection that reuses a port meets such a
		// socket before the listener. Without a listener that SYN is answered with an ACK, and the next is dropped.
		add(&expr.Socket{Key: expr.SocketKeyTransparent, Register: reg},
			&expr.Cmp{Op: expr.CmpOpLte, Register: reg, Data: []byte{1}})
	}
	return e
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

// nftBit matches if a bit of a conntrack key is set.
func nftBit(key expr.CtKey, bit uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: key, Register: reg},
		&expr.Bitwise{
			SourceRegister: reg, DestRegister: reg, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(bit), Xor: make([]byte, 4),
		},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: make([]byte, 4)},
	}
}

// nftInterface pads a name to the IFNAMSIZ bytes that the kernel compares.
func nftInterface(name string) []byte {
	return append([]byte(name), strings.Repeat("\x00", unix.IFNAMSIZ-len(name))...)
}

func nftTarget(f Family, t target) []expr.Any {
	switch t {
	case targetReturn:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}
	case targetDrop:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}
	case targetReject:
		code := map[Family]uint8{IPv4: 3, IPv6: 4}[f] // port unreachable: RFC 792, RFC 4443
		return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code}}
	case targetOutbound, targetInbound:
		const protoSpecified = 2 // NF_NAT_RANGE_PROTO_SPECIFIED, linux/netfilter/nf_nat.h
		return []expr.Any{
			&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, redirects[t])},
			&expr.Redir{RegisterProtoMin: reg, RegisterProtoMax: reg, Flags: protoSpecified},
		}
	default:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chainPrefix + string(t)}}
	}
}
