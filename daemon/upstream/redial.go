package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// redial is dial, at a tenth of its cost while the upstream refuses connections: a daemon whose upstream is late does
// little else, twelve times a second. net.Dialer wakes a goroutine and other threads for each attempt.
func (u *Upstream) redial(ctx context.Context) (*net.TCPConn, error) {
	if u.isReady() {
		return u.dial(ctx)
	}
	address, err := u.locate()
	if err != nil {
		return nil, err
	}
	if at, err := netip.ParseAddrPort(address); err == nil && at.Addr().Zone() == "" {
		if conn, err := connectAtOnce(at); conn != nil || err != nil {
			return conn, err
		}
	}
	return u.dial(ctx)
}

// connectAtOnce connects to address if the kernel knows the outcome at once, as it does within the node. Else both
// results are nil.
func connectAtOnce(at netip.AddrPort) (*net.TCPConn, error) {
	family, to := socket.Sockaddr(netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("dialing the upstream: %w", err)
	}
	errno, err := outcome(fd, to)
	switch {
	case err != nil:
		_ = unix.Close(fd)
		return nil, nil // dial finds out
	case errno != 0:
		_ = unix.Close(fd)
		return nil, fmt.Errorf("dial tcp %s: connect: %w", at, errno)
	}
	f := os.NewFile(uintptr(fd), "upstream")
	defer f.Close() //nolint:errcheck // the connection has a duplicate
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("dialing the upstream: %w", err)
	}
	return conn.(*net.TCPConn), nil
}

// outcome connects a socket, and returns the error of the connection, or 0 if it is there. The other error means that
// neither is known yet.
func outcome(fd int, to unix.Sockaddr) (unix.Errno, error) {
	dontPace(fd)
	if err := unix.Connect(fd, to); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return 0, err
	}
	// The answer of a socket on this node came while connect(2) held this one.
	errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil || errno != 0 {
		return unix.Errno(errno), err
	}
	_, err = unix.Getpeername(fd) // fails unless it is connected
	return 0, err
}
