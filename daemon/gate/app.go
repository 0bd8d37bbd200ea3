package gate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// AppState is what has become of the other end of a captured connection.
type AppState int

// The states of an app's socket.
const (
	AppUnknown AppState = iota // not in the pod's own netns, or gone
	AppOpen                    // some process holds it, even if one direction is shut
	AppClosed                  // no process does
)

// diag asks the kernel for sockets in one netns, by sock_diag(7).
type diag struct {
	mu   sync.Mutex
	file *os.File
}

// openDiag is for a thread in the netns.
func openDiag() (*diag, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("sock_diag: %w", err)
	}
	return &diag{file: os.NewFile(uintptr(fd), "sock_diag")}, nil
}

// inetDiagReq is struct inet_diag_req_v2 behind a struct nlmsghdr (linux/inet_diag.h).
type inetDiagReq struct {
	header           unix.NlMsghdr
	family, protocol uint8
	ext, pad         uint8
	states           uint32
	id               inetDiagSockID
}

type inetDiagSockID struct {
	sport, dport [2]byte // in network byte order, as the addresses
	src, dst     [16]byte
	iface        uint32
	cookie       [2]uint32
}

// inetDiagMsg is the beginning of struct inet_diag_msg behind its header.
type inetDiagMsg struct {
	header                        unix.NlMsghdr
	family, state, timer, retrans uint8
	id                            inetDiagSockID
	expires, rqueue, wqueue, uid  uint32
	inode                         uint32
}

// linux/sock_diag.h.
const (
	sockDiagByFamily = 20 // SOCK_DIAG_BY_FAMILY
	sockDestroy      = 21 // SOCK_DESTROY
)

// AppState looks up the socket from which src was connected to dst. An app that has closed its socket sends
// the same FIN as one that has only shut its sending side down; the kernel knows which it was.
func (g *Gate) AppState(src, dst netip.AddrPort) AppState {
	state, err := g.diag.lookup(src, dst)
	if err != nil {
		return AppUnknown
	}
	return state
}

// about asks for the socket at src that is connected to dst, or for the listener there.
func about(kind, flags uint16, src, dst netip.AddrPort) *inetDiagReq {
	req := inetDiagReq{
		header: unix.NlMsghdr{Len: uint32(unsafe.Sizeof(inetDiagReq{})), Type: kind, Flags: unix.NLM_F_REQUEST | flags},
		family: unix.AF_INET, protocol: unix.IPPROTO_TCP, states: ^uint32(0),
		id: inetDiagSockID{cookie: [2]uint32{^uint32(0), ^uint32(0)}}, // INET_DIAG_NOCOOKIE
	}
	if src.Addr().Is6() {
		req.family = unix.AF_INET6
	}
	binary.BigEndian.PutUint16(req.id.sport[:], src.Port())
	binary.BigEndian.PutUint16(req.id.dport[:], dst.Port())
	copy(req.id.src[:], src.Addr().AsSlice())
	copy(req.id.dst[:], dst.Addr().AsSlice())
	return &req
}

func (d *diag) lookup(src, dst netip.AddrPort) (AppState, error) {
	req := about(sockDiagByFamily, 0, src, dst)
	var reply inetDiagMsg
	n, err := d.converse(
		unsafe.Slice((*byte)(unsafe.Pointer(req)), unsafe.Sizeof(*req)),
		unsafe.Slice((*byte)(unsafe.Pointer(&reply)), unsafe.Sizeof(reply)),
	)
	switch {
	case err != nil:
		return AppUnknown, err
	case reply.header.Type != sockDiagByFamily || n < int(unsafe.Sizeof(reply)):
		return AppUnknown, nil // NLMSG_ERROR: no such socket
	case reply.inode == 0:
		return AppClosed, nil
	default:
		return AppOpen, nil
	}
}

// nlmsgErr is struct nlmsgerr behind its header, as far as it matters (linux/netlink.h).
type nlmsgErr struct {
	header unix.NlMsghdr
	errno  int32
}

// destroy closes the listener at an address, whoever has it (tcp_abort in net/ipv4/tcp.c). That there is none is no error.
func (d *diag) destroy(at netip.AddrPort) error {
	req := about(sockDestroy, unix.NLM_F_ACK, at, netip.AddrPort{})
	var reply nlmsgErr
	n, err := d.converse(
		unsafe.Slice((*byte)(unsafe.Pointer(req)), unsafe.Sizeof(*req)),
		unsafe.Slice((*byte)(unsafe.Pointer(&reply)), unsafe.Sizeof(reply)),
	)
	switch {
	case err != nil:
		return fmt.Errorf("SOCK_DESTROY: %w", err)
	case n < int(unsafe.Sizeof(reply)) || reply.header.Type != unix.NLMSG_ERROR:
		return errors.New("SOCK_DESTROY: a malformed answer")
	case reply.errno != 0 && unix.Errno(-reply.errno) != unix.ENOENT:
		return fmt.Errorf("SOCK_DESTROY: %w", unix.Errno(-reply.errno))
	}
	return nil
}

// Counts asks the kernel for the connections that came through g, that somebody has accepted and still has, and what they
// have carried.
func (g *Gate) Counts() (Counts, error) {
	var c Counts
	ports := []uint16{ruleset.OutboundPort}
	if slices.ContainsFunc(g.Listeners, (*Listener).Inbound) {
		ports = append(ports, ruleset.InboundPort)
	}
	for _, port := range ports {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			if err := g.diag.dump(family, port, &c); err != nil {
				return c, err
			}
		}
	}
	waiting, err := g.Queued()
	c.Open = max(c.Open-waiting, 0) // those in the accept queues are established too
	return c, err
}

// alive are the states of connections in which somebody still has the socket (net/tcp_states.h).
const alive = 1<<1 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11 // ESTABLISHED, FIN_WAIT1 and 2, CLOSE_WAIT, LAST_ACK, CLOSING

// dump adds the connections of one family that came to a port to c.
func (d *diag) dump(family uint8, port uint16, c *Counts) error {
	req := inetDiagReq{
		header: unix.NlMsghdr{
			Len: uint32(unsafe.Sizeof(inetDiagReq{})), Type: sockDiagByFamily, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP,
		},
		family: family, protocol: unix.IPPROTO_TCP, states: alive, ext: 1 << (inetDiagInfo - 1),
	}
	binary.BigEndian.PutUint16(req.id.sport[:], port)
	d.mu.Lock()
	defer d.mu.Unlock()
	raw, err := d.file.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		say := unsafe.Slice((*byte)(unsafe.Pointer(&req)), unsafe.Sizeof(req))
		if err = unix.Sendto(int(fd), say, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err == nil {
			err = hearDump(int(fd), c)
		}
	})
	return errors.Join(cerr, err)
}

// buffers are for what the kernel dumps: no smaller, says netlink(7).
var buffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

func hearDump(fd int, c *Counts) error {
	buffer := buffers.Get().(*[32 << 10]byte)
	defer buffers.Put(buffer)
	hear := buffer[:]
	for {
		n, _, err := unix.Recvfrom(fd, hear, unix.MSG_DONTWAIT) // the kernel answers while it is asked
		if err != nil {
			return fmt.Errorf("sock_diag: %w", err)
		}
		for rest := hear[:n]; len(rest) >= unix.SizeofNlMsghdr; { // in place: there may be tens of thousands, every few seconds
			size, kind := int(binary.NativeEndian.Uint32(rest)), binary.NativeEndian.Uint16(rest[4:])
			if size < unix.SizeofNlMsghdr || size > len(rest) {
				return errors.New("sock_diag: a malformed answer")
			}
			switch kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return nil
			case sockDiagByFamily:
				c.Open++
				c.Bytes += carried(rest[unix.SizeofNlMsghdr:size])
			}
			rest = rest[min(len(rest), (size+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
		}
	}
}

const inetDiagInfo = 2 // INET_DIAG_INFO, linux/inet_diag.h

// carried finds the struct tcp_info in what the kernel says of a socket.
func carried(message []byte) uint64 {
	attributes := message[min(len(message), int(unsafe.Sizeof(inetDiagMsg{})-unsafe.Sizeof(unix.NlMsghdr{}))):]
	for len(attributes) >= unix.SizeofRtAttr {
		length, kind := int(binary.NativeEndian.Uint16(attributes)), binary.NativeEndian.Uint16(attributes[2:])
		if length < unix.SizeofRtAttr || length > len(attributes) {
			break
		}
		if kind == inetDiagInfo {
			var info unix.TCPInfo
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info)), attributes[unix.SizeofRtAttr:length])
			return info.Bytes_acked + info.Bytes_received
		}
		attributes = attributes[min(len(attributes), (length+3)&^3):]
	}
	return 0
}

func (d *diag) converse(say, hear []byte) (n int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	raw, err := d.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	cerr := raw.Control(func(fd uintptr) {
		// The kernel answers while it takes the request, so neither call blocks.
		if err = unix.Sendto(int(fd), say, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err == nil {
			n, _, err = unix.Recvfrom(int(fd), hear, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		}
	})
	return n, errors.Join(cerr, err)
}
