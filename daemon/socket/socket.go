// Package socket does to TCP sockets the things that package net has no call for: socket addresses, resets, and the
// kernel's counters of a connection.
package socket

import (
	"errors"
	"io"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Stream is a TCP connection: a net.TCPConn, or an os.File of the socket.
type Stream interface {
	io.ReadWriteCloser
	syscall.Conn
	SetReadDeadline(t time.Time) error
}

// Sockaddr converts an address and port to the kernel's form, with its address family.
func Sockaddr(a netip.AddrPort) (family int, _ unix.Sockaddr) {
	if a.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// AddrPort is the inverse of Sockaddr. It returns the zero value for a family other than IPv4 and IPv6.
func AddrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// Reset closes a connection with a RST. A plain close would send a FIN, and the peer would take a connection that was
// cut off for one that was served to the end.
func Reset(c Stream) {
	_ = SetResetOnClose(c, true) // fails only on a closed connection
	_ = c.Close()
}

// SetResetOnClose makes any close of the connection, the exit of the process included, send a RST, or undoes that.
func SetResetOnClose(c Stream, reset bool) error {
	if reset {
		return Control(c, ResetOnClose)
	}
	return Control(c, func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{})
	})
}

// CloseWrite sends a FIN: the peer reads the end of the data.
func CloseWrite(c Stream) error {
	return Control(c, func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

// SendMore writes b, which the kernel holds back until the next bytes follow, or for 200 ms.
func SendMore(c syscall.Conn, b []byte) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	werr := raw.Write(func(fd uintptr) bool {
		for err = nil; err == nil && len(b) > 0; {
			var n int
			n, err = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_MORE|unix.MSG_NOSIGNAL)
			b = b[max(n, 0):]
		}
		return !errors.Is(err, unix.EAGAIN)
	})
	if werr != nil {
		return werr
	}
	return err
}

// Control calls do with the descriptor of c. The errors are that of do, and that of a c that is closed.
func Control(c syscall.Conn, do func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = do(int(fd)) })
	return errors.Join(cerr, err)
}

// Connect connects a non-blocking socket, or waits for the result of a connect(2) to the same address that has begun.
// It returns when s is connected, or at its deadline with [os.ErrDeadlineExceeded].
func Connect(s *os.File, to unix.Sockaddr) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	// A second connect(2) on the same socket returns the result of the first.
	werr := raw.Write(func(fd uintptr) bool {
		err = unix.Connect(int(fd), to)
		return !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EALREADY)
	})
	if werr != nil {
		return werr
	}
	return err
}

// ResetOnClose makes any close of the socket, the exit of the process included, send a RST.
func ResetOnClose(fd int) error {
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// TCP states, net/tcp_states.h.
const (
	tcpFinWait2  = 5
	tcpClose     = 7
	tcpCloseWait = 8
)

// IsReset reports whether the peer has reset the connection, or the connection is closed. A peer that has only shut its
// sending side down may have sent bytes that are still to be read.
func IsReset(c syscall.Conn) bool { return state(c) == tcpClose }

// IsOver reports whether the peer has reset the connection, and whether it has ended its side and no byte of it is left
// to be read.
func IsOver(c syscall.Conn) (reset, empty bool) {
	s := state(c)
	return s == tcpClose, s == tcpCloseWait && length(c, unix.SIOCINQ) == 0
}

// HasBytes reports whether there are bytes to read.
func HasBytes(c syscall.Conn) bool { return length(c, unix.SIOCINQ) > 0 }

// IsDelivered reports whether the peer's kernel has acknowledged every byte that was written to c.
func IsDelivered(c syscall.Conn) bool { return length(c, unix.SIOCOUTQ) == 0 }

// length returns the length of one of the kernel's queues of c, or -1 if c is closed.
func length(c syscall.Conn, queue uint) (n int) {
	err := Control(c, func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, queue)
		return err
	})
	if err != nil {
		return -1
	}
	return n
}

// IsFINAcked reports whether the peer's kernel has acknowledged our FIN, and so every byte before it, while the peer
// has not ended its own side.
func IsFINAcked(c syscall.Conn) bool { return state(c) == tcpFinWait2 }

func state(c syscall.Conn) uint8 {
	info, err := tcpInfo(c)
	if err != nil {
		return tcpClose
	}
	return info.State
}

// Delivered counts the bytes written to c that the peer's kernel has acknowledged.
func Delivered(c syscall.Conn) uint64 {
	info, err := tcpInfo(c)
	if err != nil {
		return 0
	}
	return info.Bytes_acked
}

// Carried counts the bytes that the kernel has moved on c, both ways together.
func Carried(c syscall.Conn) uint64 {
	info, err := tcpInfo(c)
	if err != nil {
		return 0
	}
	return info.Bytes_acked + info.Bytes_received
}

func tcpInfo(c syscall.Conn) (info *unix.TCPInfo, err error) {
	err = Control(c, func(fd int) (err error) {
		info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		return err
	})
	return info, err
}
