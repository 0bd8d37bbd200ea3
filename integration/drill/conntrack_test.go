package drill

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// The entries that fill a table are marked, so that the kernel can take them out all at once.
const fillMark = 0xf111

// ctaMarkMask is CTA_MARK_MASK of linux/netfilter/nfnetlink_conntrack.h, which package nl lacks.
const ctaMarkMask = 21

// NativeEndian sets a variable of package nl at its first call, without a lock.
var _ = nl.NativeEndian()

// The status of an entry that the kernel keeps when the table is full (linux/netfilter/nf_conntrack_common.h). Every
// entry is confirmed: the kernel refuses to take that away.
const seenReply, assured, confirmed = 1 << 1, 1 << 2, 1 << 3

// fillTable enters UDP connections into the conntrack of a netns, many with each call: conntrack(8) takes half a minute
// of processor time for the 262,144 of them that a table has room for by default. The kernel refuses the last of them,
// since the load has some entries.
func fillTable(h *testbed.Host, count int) error {
	const source, port = "\xc0\x00\x02\x00", 0xabcd // found in the message, and replaced
	message := newEntry([]byte(source), port)
	sources, ports := offsets(message, []byte(source)), offsets(message, []byte{port >> 8, port & 0xff})
	if len(sources) != 2 || len(ports) != 2 { // in the original tuple and in the reply
		return fmt.Errorf("the source is at %v and the port at %v of a request; want two of each", sources, ports)
	}
	return ctnetlink(h, func(send func([]byte) error) error {
		var batch []byte
		for i := range count {
			for _, at := range sources {
				message[at+3] = byte(i >> 16)
			}
			for _, at := range ports {
				binary.BigEndian.PutUint16(message[at:], uint16(i))
			}
			batch = append(batch, message...)
			if len(batch) < 64<<10 && i < count-1 {
				continue
			}
			if err := send(batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
		return nil
	})
}

// emptyTable takes those connections out again, and no others.
func emptyTable(h *testbed.Host) error {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_DELETE, 0)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(nl.CTA_MARK, nl.BEUint32Attr(fillMark)))
	req.AddData(nl.NewRtAttr(ctaMarkMask, nl.BEUint32Attr(^uint32(0))))
	return ctnetlink(h, func(send func([]byte) error) error { return send(req.Serialize()) })
}

// newEntry is the request to enter one connection.
func newEntry(source []byte, port uint16) []byte {
	destination := []byte{192, 0, 2, 255}
	const destinationPort = 9
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_CREATE)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	req.AddData(tuple(nl.CTA_TUPLE_ORIG, source, destination, port, destinationPort))
	req.AddData(tuple(nl.CTA_TUPLE_REPLY, destination, source, destinationPort, port))
	req.AddData(nl.NewRtAttr(nl.CTA_STATUS, nl.BEUint32Attr(seenReply|assured|confirmed)))
	req.AddData(nl.NewRtAttr(nl.CTA_TIMEOUT, nl.BEUint32Attr(600)))
	req.AddData(nl.NewRtAttr(nl.CTA_MARK, nl.BEUint32Attr(fillMark)))
	return req.Serialize()
}

func tuple(which int, source, destination []byte, sourcePort, destinationPort uint16) *nl.RtAttr {
	t := nl.NewRtAttr(unix.NLA_F_NESTED|which, nil)
	ip := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
	ip.AddRtAttr(nl.CTA_IP_V4_SRC, source)
	ip.AddRtAttr(nl.CTA_IP_V4_DST, destination)
	proto := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP})
	proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(sourcePort))
	proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(destinationPort))
	return t
}

// ctnetlink calls f with a function that sends requests to the conntrack of h. Their answers are not read.
func ctnetlink(h *testbed.Host, f func(send func([]byte) error) error) error {
	return h.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer unix.Close(fd) //nolint:errcheck // the kernel has handled each request before sendto returns
		return f(func(request []byte) error {
			kernel := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
			return os.NewSyscallError("sendto", unix.Sendto(fd, request, 0, kernel))
		})
	})
}

// offsets are where part begins in message.
func offsets(message, part []byte) []int {
	var found []int
	for at := 0; ; {
		i := bytes.Index(message[at:], part)
		if i < 0 {
			return found
		}
		found = append(found, at+i)
		at += i + len(part)
	}
}
