package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// exemptTimeout is how long the kernel keeps an exempt flow that has sent nothing yet, in seconds. Once the first
// segment is sent, the kernel keeps the entry as long as that of any other connection.
const exemptTimeout = 10

// The first call sets a variable of package nl, without a lock. Here it is made before any goroutine starts.
var _ = nl.NativeEndian()

// Flow is a TCP connection by its addresses and ports.
type Flow struct{ Source, Destination netip.AddrPort }

// Exempt enters f into the conntrack of the calling thread's netns, without address translation and with the mark that
// the rules let out. It needs CAP_NET_ADMIN over the netns. The error is EEXIST if conntrack has an entry for f.
func (f Flow) Exempt() error {
	_, err := f.request(nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		tuple(nl.CTA_TUPLE_ORIG, f.Source, f.Destination),
		tuple(nl.CTA_TUPLE_REPLY, f.Destination, f.Source),
		nl.NewRtAttr(nl.CTA_MARK, nl.BEUint32Attr(ruleset.DirectMark)),
		nl.NewRtAttr(nl.CTA_TIMEOUT, nl.BEUint32Attr(exemptTimeout)),
	)
	if err != nil {
		return fmt.Errorf("creating a conntrack entry: %w", err)
	}
	return nil
}

// Forget deletes the entry of f. An entry that does not exist is no error.
func (f Flow) Forget() error {
	_, err := f.request(nl.IPCTNL_MSG_CT_DELETE, 0, tuple(nl.CTA_TUPLE_ORIG, f.Source, f.Destination))
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("deleting a conntrack entry: %w", err)
	}
	return nil
}

// request sends one request to ctnetlink (linux/netfilter/nfnetlink_conntrack.h). The calls of package netlink do not
// serve: ConntrackCreate replaces existing entries, and ConntrackDeleteFilters dumps the whole table to delete one.
func (f Flow) request(message, flags int, attributes ...*nl.RtAttr) (replies [][]byte, err error) {
	family := uint8(unix.AF_INET6)
	if f.Source.Addr().Is4() {
		family = unix.AF_INET
	}
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|message, flags|unix.NLM_F_ACK)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	for _, a := range attributes {
		req.AddData(a)
	}
	return req.Execute(unix.NETLINK_NETFILTER, 0)
}

// Original returns the flow whose answers are f: its source is the client, and its destination the one before nat. It
// looks in the conntrack of the calling thread's netns.
func (f Flow) Original() (Flow, error) {
	replies, err := f.request(nl.IPCTNL_MSG_CT_GET, 0, tuple(nl.CTA_TUPLE_REPLY, f.Source, f.Destination))
	if err != nil {
		return Flow{}, fmt.Errorf("looking up a conntrack entry: %w", err)
	}
	if len(replies) != 1 || len(replies[0]) < nl.SizeofNfgenmsg {
		return Flow{}, errors.New("looking up a conntrack entry: the kernel's answer is not one entry")
	}
	return parseTuple(attribute(replies[0][nl.SizeofNfgenmsg:], nl.CTA_TUPLE_ORIG))
}

// attribute returns the value of the first attribute of one of these kinds, or nil.
func attribute(attributes []byte, kinds ...uint16) []byte {
	all, err := nl.ParseRouteAttr(attributes)
	if err != nil {
		return nil
	}
	for _, a := range all {
		if slices.Contains(kinds, a.Attr.Type&nl.NLA_TYPE_MASK) {
			return a.Value
		}
	}
	return nil
}

// parseTuple is the inverse of tuple.
func parseTuple(t []byte) (Flow, error) {
	ip, proto := attribute(t, nl.CTA_TUPLE_IP), attribute(t, nl.CTA_TUPLE_PROTO)
	from, ok := netip.AddrFromSlice(attribute(ip, nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC))
	to, ok2 := netip.AddrFromSlice(attribute(ip, nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST))
	sport, dport := attribute(proto, nl.CTA_PROTO_SRC_PORT), attribute(proto, nl.CTA_PROTO_DST_PORT)
	if !ok || !ok2 || len(sport) < 2 || len(dport) < 2 {
		return Flow{}, errors.New("looking up a conntrack entry: the kernel's answer lacks an address or a port")
	}
	return Flow{
		Source:      netip.AddrPortFrom(from, binary.BigEndian.Uint16(sport)),
		Destination: netip.AddrPortFrom(to, binary.BigEndian.Uint16(dport)),
	}, nil
}

func tuple(kind int, from, to netip.AddrPort) *nl.RtAttr {
	src, dst := nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	if from.Addr().Is4() {
		src, dst = nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	}
	t := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
	ip := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
	ip.AddRtAttr(src, from.Addr().AsSlice())
	ip.AddRtAttr(dst, to.Addr().AsSlice())
	proto := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_TCP})
	proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(from.Port()))
	proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(to.Port()))
	return t
}
