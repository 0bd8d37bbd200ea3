// Package direct connects to the original destination of a captured connection as the pod itself would: from its netns
// and address, and not captured.
//
// It enters the connection into conntrack, by its addresses and ports and with a mark, before the first segment is
// sent. That takes CAP_NET_ADMIN over the netns. nat does not translate a connection that conntrack has an entry for
// (nf_nat_setup_info in net/netfilter/nf_nat_core.c), and the ruleset lets a SYN with the mark out until it has been
// answered. The entry outlives the connection: without that limit the next process with this port would be exempt.
//
// A socket mark would let out any process with CAP_NET_RAW, which most containers have: since Linux 5.17 that
// capability suffices for SO_MARK.
package direct

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/socket"
)

// ErrNotExempt means that the connection could not be exempted from capture. It says nothing about the destination.
var ErrNotExempt = errors.New("not exempt from capture")

// dial connects to dst from the netns of captured, a connection of the pod there.
func dial(ctx context.Context, captured syscall.Conn, dst netip.AddrPort) (*net.TCPConn, error) {
	conn, err := dialExempt(ctx, captured, dst)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s from the pod's netns: %w", dst, err)
	}
	return conn, nil
}

func dialExempt(ctx context.Context, captured syscall.Conn, dst netip.AddrPort) (*net.TCPConn, error) {
	var s *os.File
	var exempt conntrack.Flow
	err := inNetnsOf(ctx, captured, func() (err error) {
		s, exempt, err = newExempt(dst)
		return err
	})
	if err != nil && !errors.Is(err, unix.ENETUNREACH) {
		err = fmt.Errorf("%w: %w", ErrNotExempt, err)
	}
	if err != nil {
		return nil, err
	}
	defer s.Close() //nolint:errcheck // FileConn has made a duplicate, or there is an error already
	stop := context.AfterFunc(ctx, func() { _ = s.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_, to := socket.Sockaddr(dst)
	if err := socket.Connect(s, to); err != nil {
		// The entry goes while the port is still ours and sends nothing more: its next user must not be exempt.
		return nil, errors.Join(err, disconnect(s), inNetnsOf(context.Background(), captured, exempt.Forget))
	}
	c, err := net.FileConn(s)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotExempt, err)
	}
	conn := c.(*net.TCPConn)
	if err := conn.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true}); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// threads bounds how many threads are in the netns of pods at a time: thousands of connections may expire at once.
var threads = make(chan struct{}, 16)

// inNetnsOf calls do on a thread in the netns of conn.
func inNetnsOf(ctx context.Context, conn syscall.Conn, do func() error) error {
	select {
	case threads <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-threads }()
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	return netns.Of(raw, do)
}

// newExempt makes a socket in the current netns, bound to the address from which dst is reached. Its connection to dst
// is exempt from capture.
func newExempt(dst netip.AddrPort) (*os.File, conntrack.Flow, error) {
	src, err := netns.SourceTo(dst.Addr())
	if err != nil {
		return nil, conntrack.Flow{}, err
	}
	if !src.IsValid() {
		return nil, conntrack.Flow{}, unix.ENETUNREACH
	}
	for range 100 {
		s, f, err := bind(src, dst)
		if err != nil {
			return nil, conntrack.Flow{}, err
		}
		if err = f.Exempt(); err == nil {
			return s, f, nil
		}
		_ = s.Close() // nothing was sent
		// A former user of the port has left an entry, most likely with a redirect.
		if !errors.Is(err, unix.EEXIST) {
			return nil, conntrack.Flow{}, err
		}
	}
	return nil, conntrack.Flow{}, fmt.Errorf("conntrack knows every port of %s that was tried", src)
}

// bind makes a socket with a port that no other process can get.
func bind(src netip.Addr, dst netip.AddrPort) (*os.File, conntrack.Flow, error) {
	family, anyPort := socket.Sockaddr(netip.AddrPortFrom(src, 0))
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, conntrack.Flow{}, fmt.Errorf("socket: %w", err)
	}
	s := os.NewFile(uintptr(fd), "direct")
	fail := func(step string, err error) (*os.File, conntrack.Flow, error) {
		return nil, conntrack.Flow{}, errors.Join(fmt.Errorf("%s: %w", step, err), s.Close())
	}
	// Until it is joined to the pod's connection, its end must not look like the end of the pod's data.
	if err := socket.ResetOnClose(fd); err != nil {
		return fail("SO_LINGER", err)
	}
	if err := unix.Bind(fd, anyPort); err != nil {
		return fail("bind to "+src.String(), err)
	}
	bound, err := unix.Getsockname(fd)
	if err != nil {
		return fail("getsockname", err)
	}
	return s, conntrack.Flow{Source: socket.AddrPort(bound), Destination: dst}, nil
}

// disconnect aborts the connection of s, with a reset if it is established by now. The socket keeps its port
// (tcp_disconnect in net/ipv4/tcp.c).
func disconnect(s *os.File) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	unspec := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	var errno unix.Errno
	cerr := raw.Control(func(fd uintptr) {
		_, _, errno = unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&unspec)), unsafe.Sizeof(unspec))
	})
	if cerr == nil && errno != 0 {
		return fmt.Errorf("disconnecting: %w", errno)
	}
	return cerr
}
