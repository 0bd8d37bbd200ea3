// Package socket does to TCP sockets the things that package net has no call for: socket addresses, resets, and the
// kernel's counters of a connection.
package socket

import (
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

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
func Reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // fails only on a closed connection
	_ = c.Close()
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
func IsReset(c *net.TCPConn) bool { return state(c) == tcpClose }

// IsEmpty reports whether the peer has ended its side, and no byte of it is left to be read.
func IsEmpty(c *net.TCPConn) bool {
	if state(c) != tcpCloseWait {
		return false
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var unread int
	cerr := raw.Control(func(fd uintptr) { unread, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	return cerr == nil && err == nil && unread == 0
}

// IsFINAcked reports whether the peer's kernel has acknowledged our FIN, and so every byte before it, while the peer
// has not ended its own side.
func IsFINAcked(c *net.TCPConn) bool { return state(c) == tcpFinWait2 }

func state(c *net.TCPConn) uint8 {
	info, err := tcpInfo(c)
	if err != nil {
		return tcpClose
	}
	return info.State
}

// Delivered counts the bytes written to c that the peer's kernel has acknowledged.
func Delivered(c *net.TCPConn) uint64 {
	info, err := tcpInfo(c)
	if err != nil {
		return 0
	}
	return info.Bytes_acked
}

// Carried counts the bytes that the kernel has moved on c, both ways together.
func Carried(c *net.TCPConn) uint64 {
	info, err := tcpInfo(c)
	if err != nil {
		return 0
	}
	return info.Bytes_acked + info.Bytes_received
}

func tcpInfo(c *net.TCPConn) (info *unix.TCPInfo, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	return info, errors.Join(cerr, err)
}
