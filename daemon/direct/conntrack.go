package direct

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// exemption is how long the kernel remembers the entry, in seconds, until the first segment is sent; from then on it is
// kept as that of any other connection.
const exemption = 10

// flow is a connection as conntrack knows it.
type flow struct{ src, dst netip.AddrPort }

// enter has the conntrack of this netns know f, with no translation of addresses. The error is EEXIST if it knows f
// already.
func (f flow) enter() error {
	err := f.ask(nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		tuple(nl.CTA_TUPLE_ORIG, f.src, f.dst),
		tuple(nl.CTA_TUPLE_REPLY, f.dst, f.src),
		nl.NewRtAttr(nl.CTA_MARK, nl.BEUint32Attr(ruleset.DirectMark)),
		nl.NewRtAttr(nl.CTA_TIMEOUT, nl.BEUint32Attr(exemption)),
	)
	if err != nil {
		return fmt.Errorf("entering it into conntrack: %w", err)
	}
	return nil
}

// forget takes f out again.
func (f flow) forget() error {
	err := f.ask(nl.IPCTNL_MSG_CT_DELETE, 0, tuple(nl.CTA_TUPLE_ORIG, f.src, f.dst))
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("taking it out of conntrack: %w", err)
	}
	return nil
}

// ask makes a request of ctnetlink (linux/netfilter/nfnetlink_conntrack.h). What package netlink has for it replaces
// entries that are there, and goes through all of them to delete one.
func (f flow) ask(what, flags int, attributes ...*nl.RtAttr) error {
	family := uint8(unix.AF_INET6)
	if f.src.Addr().Is4() {
		family = unix.AF_INET
	}
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|what, flags|unix.NLM_F_ACK)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	for _, a := range attributes {
		req.AddData(a)
	}
	_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

func tuple(which int, from, to netip.AddrPort) *nl.RtAttr {
	src, dst := nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	if from.Addr().Is4() {
		src, dst = nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	}
	t := nl.NewRtAttr(unix.NLA_F_NESTED|which, nil)
	ip := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
	ip.AddRtAttr(src, from.Addr().AsSlice())
	ip.AddRtAttr(dst, to.Addr().AsSlice())
	proto := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_TCP})
	proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(from.Port()))
	proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(to.Port()))
	return t
}
