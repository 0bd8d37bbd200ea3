// Package sockdiag asks the kernel about TCP sockets in one netns, by sock_diag(7).
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"
	"unsafe"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// AppState says whether a process still holds the app's end of a captured connection.
type AppState int

// The states of an app's socket.
const (
	AppUnknown AppState = iota // not in the pod's own netns, or gone
	AppOpen                    // a process holds the socket, even if one direction is shut
	AppClosed                  // no process holds the socket
)

// Counts sums up connections.
type Counts struct {
	Open  int    // accepted and not ended
	Bytes uint64 // both directions together
}

// Conn is a sock_diag socket. It answers for the netns that it was opened in, from any thread.
type Conn struct {
	socket  *nl.NetlinkSocket // its lock guards closed, and lets one request at a time be made
	sockets map[int]*nl.SocketHandle
	closed  bool
}

// The first call sets a variable of package nl, without a lock. Here it is made before any goroutine starts.
var _ = nl.NativeEndian()

// Open opens a Conn in the netns of the calling thread.
func Open() (*Conn, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_INET_DIAG)
	if err != nil {
		return nil, fmt.Errorf("opening sock_diag: %w", err)
	}
	if err := s.SetReceiveTimeout(&unix.Timeval{Sec: 1}); err != nil { // the kernel answers at once, or not at all
		s.Close()
		return nil, fmt.Errorf("opening sock_diag: %w", err)
	}
	return &Conn{socket: s, sockets: map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: {Socket: s}}}, nil
}

// Close closes the socket. Requests after Close fail.
func (c *Conn) Close() {
	c.socket.Lock()
	defer c.socket.Unlock()
	c.closed = true
	c.socket.Close()
}

// request is struct inet_diag_req_v2 (linux/inet_diag.h). Package netlink has requests of its own, but none for one
// socket without a dump, none to destroy an IPv6 socket, and none for the sockets of one port.
type request struct {
	family, protocol uint8
	extensions, pad  uint8
	states           uint32
	id               socketID
}

// socketID is struct inet_diag_sockid. Ports and addresses are in network byte order.
type socketID struct {
	sport, dport [2]byte
	src, dst     [16]byte
	iface        uint32
	cookie       [2]uint32
}

// message is the fixed part of struct inet_diag_msg.
type message struct {
	family, state, timer, retrans uint8
	id                            socketID
	expires, rqueue, wqueue, uid  uint32
	inode                         uint32
}

// Len implements nl.NetlinkRequestData.
func (r *request) Len() int { return int(unsafe.Sizeof(*r)) }

// Serialize implements nl.NetlinkRequestData.
func (r *request) Serialize() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(r)), r.Len()) }

// requestFor asks for the socket at src that is connected to dst, or for the listener at src if dst is the zero value.
func requestFor(src, dst netip.AddrPort) *request {
	r := request{
		family: unix.AF_INET, protocol: unix.IPPROTO_TCP, states: ^uint32(0),
		id: socketID{cookie: [2]uint32{nl.TCPDIAG_NOCOOKIE, nl.TCPDIAG_NOCOOKIE}},
	}
	if src.Addr().Is6() {
		r.family = unix.AF_INET6
	}
	binary.BigEndian.PutUint16(r.id.sport[:], src.Port())
	binary.BigEndian.PutUint16(r.id.dport[:], dst.Port())
	copy(r.id.src[:], src.Addr().AsSlice())
	copy(r.id.dst[:], dst.Addr().AsSlice())
	return &r
}

func (c *Conn) execute(kind, flags int, r *request, each func(reply []byte) bool) error {
	req := nl.NewNetlinkRequest(kind, flags)
	req.Sockets = c.sockets
	req.AddData(r)
	return req.ExecuteIter(unix.NETLINK_INET_DIAG, 0, each)
}

// AppState looks up the socket from which src is connected to dst. An app that has closed its socket sends the same FIN
// as an app that has only shut down its sending side. The kernel knows which of the two it was.
func (c *Conn) AppState(src, dst netip.AddrPort) AppState {
	reply, err := c.ask(requestFor(src, dst))
	if err != nil {
		return AppUnknown
	}
	m, ok := parse(reply)
	switch {
	case !ok:
		return AppUnknown
	case m.inode != 0:
		return AppOpen
	default:
		return AppClosed
	}
}

// ask asks for one socket. Package nl would take 64 KiB of memory for the answer, at the end of every connection.
func (c *Conn) ask(r *request) ([]byte, error) {
	req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, 0)
	req.AddData(r)
	c.socket.Lock()
	defer c.socket.Unlock()
	if c.closed {
		return nil, os.ErrClosed
	}
	req.Seq = atomic.AddUint32(&c.sockets[unix.NETLINK_INET_DIAG].Seq, 1)
	kernel := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	if err := unix.Sendto(c.socket.GetFd(), req.Serialize(), 0, kernel); err != nil {
		return nil, fmt.Errorf("asking sock_diag: %w", err)
	}
	for reply := make([]byte, 1024); ; { // the kernel has answered by now
		n, _, err := unix.Recvfrom(c.socket.GetFd(), reply, unix.MSG_DONTWAIT)
		if err != nil {
			return nil, fmt.Errorf("reading an answer of sock_diag: %w", err)
		}
		if n < unix.SizeofNlMsghdr {
			return nil, errors.New("an answer of sock_diag is too short")
		}
		header := (*unix.NlMsghdr)(unsafe.Pointer(&reply[0]))
		switch {
		case header.Seq != req.Seq: // of a request that was given up
		case header.Type == unix.NLMSG_ERROR:
			return nil, errors.New("sock_diag has no answer")
		default:
			return reply[unix.SizeofNlMsghdr:n], nil
		}
	}
}

func parse(reply []byte) (*message, bool) {
	if len(reply) < int(unsafe.Sizeof(message{})) {
		return nil, false
	}
	return (*message)(unsafe.Pointer(&reply[0])), true
}

// Destroy closes the listener at an address, whichever process has it (tcp_abort in net/ipv4/tcp.c). A listener that
// does not exist is no error.
func (c *Conn) Destroy(at netip.AddrPort) error {
	return c.destroy(at, requestFor(at, netip.AddrPort{}))
}

func (c *Conn) destroy(at netip.AddrPort, r *request) error {
	err := c.execute(nl.SOCK_DESTROY, unix.NLM_F_ACK, r, func([]byte) bool { return true })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("SOCK_DESTROY of port %d of %s: %w", at.Port(), at.Addr(), err)
	}
	return nil
}

// Ended is a connection in an accept queue whose client has ended its side, and has sent no byte before.
type Ended struct {
	// Listener and Client are its addresses as the listener sees them.
	Listener, Client netip.AddrPort

	request request // for this socket and no later one with these addresses
}

// Reset ends the connection. It stays in the accept queue until it is accepted.
func (c *Conn) Reset(e Ended) error { return c.destroy(e.Listener, &e.request) }

// Queued counts the connections in the accept queues at the port of the address, in the family of the address, and
// lists those that have ended. Connections that were reset are in the queue too, but not in the kernel's table, and are
// not counted. The kernel walks its table of sockets for it.
func (c *Conn) Queued(at netip.AddrPort) (count int, ended []Ended, err error) {
	r := requestFor(netip.AddrPortFrom(unspecified(at.Addr()), at.Port()), netip.AddrPort{})
	r.states = 1<<tcpEstablished | 1<<tcpCloseWait
	err = c.execute(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP, r, func(reply []byte) bool {
		m, ok := parse(reply)
		if !ok || !m.isQueued() {
			return true
		}
		count++
		if m.state == tcpCloseWait && m.rqueue <= 1 { // the FIN counts as a byte
			ended = append(ended, m.ended())
		}
		return true
	})
	if err != nil {
		return 0, nil, fmt.Errorf("listing connections that wait at port %d: %w", at.Port(), err)
	}
	return count, ended, nil
}

func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// isQueued reports whether the connection is in an accept queue: no process has a descriptor of it. One that was
// accepted and closed is in another state.
func (m *message) isQueued() bool {
	return m.inode == 0 && (m.state == tcpEstablished || m.state == tcpCloseWait)
}

func (m *message) ended() Ended {
	length := 16
	if m.family == unix.AF_INET {
		length = 4
	}
	at := func(address [16]byte, port [2]byte) netip.AddrPort {
		a, _ := netip.AddrFromSlice(address[:length]) // has one of the two lengths
		return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port[:]))
	}
	r := request{family: m.family, protocol: unix.IPPROTO_TCP, states: ^uint32(0), id: m.id}
	return Ended{Listener: at(m.id.src, m.id.sport), Client: at(m.id.dst, m.id.dport), request: r}
}

// TCP states, net/tcp_states.h.
const tcpEstablished, tcpCloseWait = 1, 8

// connected are the states in which a process may still hold the socket of a connection: ESTABLISHED, FIN_WAIT1,
// FIN_WAIT2, CLOSE_WAIT, LAST_ACK and CLOSING.
const connected = 1<<tcpEstablished | 1<<4 | 1<<5 | 1<<tcpCloseWait | 1<<9 | 1<<11

// Count counts the accepted connections to a local port, in both address families.
func (c *Conn) Count(port uint16) (Counts, error) {
	var sum Counts
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		r := request{family: family, protocol: unix.IPPROTO_TCP, states: connected, extensions: 1 << (diagInfo - 1)}
		binary.BigEndian.PutUint16(r.id.sport[:], port)
		err := c.execute(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP, &r, func(reply []byte) bool {
			if m, ok := parse(reply); ok && !m.isQueued() {
				sum.Open++
				sum.Bytes += carried(reply)
			}
			return true
		})
		if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) { // interrupted: nearly right, and only displayed
			return sum, fmt.Errorf("counting connections to port %d: %w", port, err)
		}
	}
	return sum, nil
}

const diagInfo = 2 // INET_DIAG_INFO, linux/inet_diag.h

// carried finds the struct tcp_info in a reply, and sums up the bytes of both directions.
func carried(reply []byte) uint64 {
	attributes, err := nl.ParseRouteAttr(reply[min(len(reply), int(unsafe.Sizeof(message{}))):])
	if err != nil {
		return 0
	}
	for _, a := range attributes {
		if a.Attr.Type == diagInfo {
			var info unix.TCPInfo // a kernel may fill in less, or more
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info)), a.Value)
			return info.Bytes_acked + info.Bytes_received
		}
	}
	return 0
}
