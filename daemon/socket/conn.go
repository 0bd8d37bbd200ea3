package socket

import (
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Conn is a TCP connection that was accepted at a socket of which package net does not know. To make a net.TCPConn of
// it would take a second descriptor and three times as many system calls.
type Conn struct {
	*os.File
	// Peer is the address of the other end.
	Peer netip.AddrPort
}

// The connections that are accepted at a listener inherit these options. They are those of package net.
var inherited = []struct{ level, option, value int }{
	{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
	{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 15},
	{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15},
	{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 9},
}

// PrepareListener sets the options of the connections that Accept will accept.
func PrepareListener(fd int) error {
	for _, o := range inherited {
		if err := unix.SetsockoptInt(fd, o.level, o.option, o.value); err != nil {
			return fmt.Errorf("setting option %d of level %d: %w", o.option, o.level, err)
		}
	}
	return nil
}

// Accept accepts a connection at a listener. Until ResetOnClose is undone, any close of the connection is a reset.
// Connections that wait to be accepted send no keepalives.
func Accept(listener int) (*Conn, error) {
	fd, peer, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err != nil {
		return nil, err
	}
	c := &Conn{os.NewFile(uintptr(fd), "captured"), AddrPort(peer)}
	err = ResetOnClose(fd)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	}
	if err != nil {
		_ = c.Close() // nothing was read or written
		return nil, err
	}
	return c, nil
}
