package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// dial connects to the upstream.
func (u *Upstream) dial(ctx context.Context) (*net.TCPConn, error) {
	address, err := u.locate()
	if err != nil {
		return nil, err
	}
	if at, err := netip.ParseAddrPort(address); err == nil && at.Addr().Zone() == "" {
		return connect(ctx, at)
	}
	d := net.Dialer{Timeout: dialTimeout, Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { dontPace(int(fd)) })
	}}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// connect is net.Dialer for an address, at a tenth of its cost where the kernel knows the outcome at once, as it does
// within the node: net.Dialer wakes a goroutine and other threads for each attempt. Connections dial while an app
// waits, and a daemon whose upstream is late does little else, twelve times a second.
func connect(ctx context.Context, at netip.AddrPort) (*net.TCPConn, error) {
	family, to := socket.Sockaddr(netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("dialing the upstream: %w", err)
	}
	dontPace(fd)
	err = unix.Connect(fd, to)
	if errors.Is(err, unix.EINPROGRESS) { // most likely the answer came while connect(2) held the socket
		err = unix.Connect(fd, to) // returns its result then
	}
	if err != nil && !errors.Is(err, unix.EALREADY) {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("dial tcp %s: connect: %w", at, err)
	}
	f := os.NewFile(uintptr(fd), "upstream")
	defer f.Close() //nolint:errcheck // the connection has a duplicate
	if err != nil {
		_ = f.SetWriteDeadline(time.Now().Add(dialTimeout)) // fails only on a closed file
		defer context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })()
		if err := socket.Connect(f, to); err != nil {
			return nil, fmt.Errorf("dial tcp %s: connect: %w", at, err)
		}
	}
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("dialing the upstream: %w", err)
	}
	if conn.RemoteAddr() == nil { // the kernel forgets the other end when that resets the connection
		_ = conn.Close()
		return nil, fmt.Errorf("dial tcp %s: connect: %w", at, unix.ECONNRESET)
	}
	return conn.(*net.TCPConn), nil
}
