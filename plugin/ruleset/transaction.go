package ruleset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// commit makes the changes that add adds to a connection, in one transaction in the netns of the calling thread.
//
// Package nftables only renders the messages: its version 0.3.0 asks for an acknowledgement of each, and reads them one
// by one, which takes longer than the transaction. Its option for tests is the way to the finished messages.
func commit(add func(*nftables.Conn) error) error {
	var batch []netlink.Message
	conn, err := nftables.New(nftables.WithTestDial(func(m []netlink.Message) ([]netlink.Message, error) {
		batch = append(batch, m...)
		return nil, io.EOF // no answer
	}))
	if err == nil {
		err = add(conn)
	}
	if err == nil {
		err = conn.Flush()
	}
	if err != nil || len(batch) == 0 {
		return err
	}
	return send(batch)
}

// send sends a batch, and reads the kernel's answers up to the first error, or the acknowledgement of the last change.
func send(batch []netlink.Message) error {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("opening a netlink socket: %w", err)
	}
	defer unix.Close(s)            //nolint:errcheck // the answers were read
	last := uint32(len(batch) - 2) // the end of the batch comes after it, and gets no answer
	var data []byte
	for i := range batch {
		h := &batch[i].Header
		h.Sequence, h.PID = uint32(i), 0
		h.Flags &^= netlink.Acknowledge | netlink.Echo // errors are reported all the same
		if h.Sequence == last {
			h.Flags |= netlink.Acknowledge
		}
		m, err := batch[i].MarshalBinary()
		if err != nil {
			return fmt.Errorf("rendering the %s: %w", subject(batch[i]), err)
		}
		data = append(data, m...)
	}
	// A batch is one datagram: with the default of 208 KiB a ruleset of some hundred CIDRs would be too large.
	if unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, len(data)) != nil {
		_ = unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_SNDBUF, len(data)) // too small a buffer: sending fails
	}
	// The first error counts. Those that follow from it may be lost.
	if err := unix.SetsockoptInt(s, unix.SOL_NETLINK, unix.NETLINK_NO_ENOBUFS, 1); err != nil {
		return fmt.Errorf("setting an option of a netlink socket: %w", err)
	}
	if err := unix.Sendto(s, data, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("sending a transaction of %d bytes: %w", len(data), err)
	}
	for {
		seq, err := answer(s)
		switch {
		case err != nil && seq <= last:
			return fmt.Errorf("%s: %w", subject(batch[seq]), err)
		case err != nil:
			return err
		case seq == last:
			return nil
		}
	}
}

// answer reads one answer: the sequence number of the message that it is about, and the error that it reports. The
// kernel has queued all answers when it returns from sending.
func answer(s int) (seq uint32, err error) {
	var a [unix.NLMSG_HDRLEN + unix.SizeofNlMsgerr]byte // the rest repeats the message
	n, _, err := unix.Recvfrom(s, a[:], unix.MSG_DONTWAIT)
	switch {
	case err != nil:
		return ^uint32(0), fmt.Errorf("reading the kernel's answer: %w", err)
	case n < len(a) || binary.NativeEndian.Uint16(a[4:]) != unix.NLMSG_ERROR:
		return ^uint32(0), errors.New("reading the kernel's answer: it is not an acknowledgement")
	}
	seq = binary.NativeEndian.Uint32(a[unix.NLMSG_HDRLEN+12:])
	if errno := -int32(binary.NativeEndian.Uint32(a[unix.NLMSG_HDRLEN:])); errno != 0 {
		return seq, unix.Errno(errno)
	}
	return seq, nil
}

// subject names the object that a message of a batch is about.
func subject(m netlink.Message) string {
	kind := map[netlink.HeaderType]string{
		unix.NFT_MSG_NEWTABLE: "table", unix.NFT_MSG_DELTABLE: "deleted table", unix.NFT_MSG_NEWCHAIN: "chain",
		unix.NFT_MSG_NEWRULE: "rule", unix.NFT_MSG_NEWSET: "set", unix.NFT_MSG_NEWSETELEM: "set",
		unix.NFT_MSG_NEWOBJ: "counter",
	}[m.Header.Type&0xff]
	const sizeOfHeader = 4 // struct nfgenmsg
	attributes, err := netlink.NewAttributeDecoder(m.Data[sizeOfHeader:])
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || kind == "" || err != nil {
		return "transaction"
	}
	// The name of the table is the first attribute of each kind. That of the object is the second, for a rule the name
	// of its chain; a chain has its handle between them (linux/netfilter/nf_tables.h).
	var table, name, why string
	for attributes.Next() {
		switch t := attributes.Type(); {
		case t == unix.NFTA_RULE_TABLE:
			table = attributes.String()
		case kind == "chain" && t == unix.NFTA_CHAIN_NAME, kind != "chain" && t == unix.NFTA_RULE_CHAIN:
			name = " " + attributes.String()
		case kind == "rule" && t == unix.NFTA_RULE_USERDATA:
			if comment, ok := userdata.GetString(attributes.Bytes(), userdata.TypeComment); ok {
				why = fmt.Sprintf(" (%s)", comment)
			}
		}
	}
	if kind == "rule" {
		name = " in chain" + name
	}
	if kind == "table" || kind == "deleted table" {
		return kind + " " + table
	}
	return fmt.Sprintf("table %s: %s%s%s", table, kind, name, why)
}
