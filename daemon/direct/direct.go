// Package direct connects to a captured connection's original destination as the pod itself would have: from its netns
// and address, and uncaptured.
//
// A connection is entered into conntrack, by its addresses and ports and with a mark, before its first segment is sent.
// It takes CAP_NET_ADMIN over the netns to do that. What conntrack has, nat does not give another destination any more
// (nf_nat_setup_info in net/netfilter/nf_nat_core.c), and the ruleset lets a SYN with the mark out until it has been
// answered: the entry outlives the connection, and who has the port next is not to have it.
//
// A mark of the socket would let in whoever has CAP_NET_RAW, as most containers do: that suffices for SO_MARK since
// Linux 5.17.
package direct

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"
	"unsafe"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/gate"
)

// ErrNotExempt means that the connection could not be let out: it says nothing of the destination.
var ErrNotExempt = errors.New("not exempt from capture")

// Dial connects to dst from the netns of captured, which is a connection of the pod there.
func Dial(ctx context.Context, captured *net.TCPConn, dst netip.AddrPort) (*net.TCPConn, error) {
	conn, err := dial(ctx, captured, dst)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s from the pod's netns: %w", dst, err)
	}
	return conn, nil
}

func dial(ctx context.Context, captured *net.TCPConn, dst netip.AddrPort) (*net.TCPConn, error) {
	var s *os.File
	var exempt flow
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
	if err := connect(s, dst); err != nil {
		// While the port is still ours, and sends no more: the next to have it is not to be exempt.
		return nil, errors.Join(err, disconnect(s), inNetnsOf(context.Background(), captured, exempt.forget))
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

// threads bounds how many are in the netns of pods at a time: thousands of connections may have waited for too long at
// once.
var threads = make(chan struct{}, 16)

// inNetnsOf calls do on a thread in the netns of conn.
func inNetnsOf(ctx context.Context, conn *net.TCPConn, do func() error) error {
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
	var netns int
	if cerr := raw.Control(func(fd uintptr) { netns, err = unix.IoctlRetInt(int(fd), unix.SIOCGSKNS) }); cerr != nil {
		return cerr
	}
	if err != nil {
		return fmt.Errorf("SIOCGSKNS: %w", err)
	}
	defer unix.Close(netns) //nolint:errcheck // nothing was written
	return ns.WithNetNSPath("/proc/self/fd/"+strconv.Itoa(netns), func(ns.NetNS) error { return do() })
}

// newExempt makes a socket in this netns at the address from which dst is reached, whose connection to dst is exempt.
func newExempt(dst netip.AddrPort) (*os.File, flow, error) {
	src, err := gate.SourceTo(dst.Addr())
	if err != nil {
		return nil, flow{}, err
	}
	if !src.IsValid() {
		return nil, flow{}, unix.ENETUNREACH
	}
	for range 100 {
		s, f, err := bind(src, dst)
		if err != nil {
			return nil, flow{}, err
		}
		if err = f.enter(); err == nil {
			return s, f, nil
		}
		_ = s.Close() // nothing was sent
		// Who had the port before has left an entry, with a redirect most likely.
		if !errors.Is(err, unix.EEXIST) {
			return nil, flow{}, err
		}
	}
	return nil, flow{}, fmt.Errorf("no port of %s for it that conntrack does not know", src)
}

// bind makes a socket that nobody else can have the port of.
func bind(src netip.Addr, dst netip.AddrPort) (*os.File, flow, error) {
	family, anyPort := gate.Sockaddr(netip.AddrPortFrom(src, 0))
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, flow{}, fmt.Errorf("socket: %w", err)
	}
	s := os.NewFile(uintptr(fd), "direct")
	fail := func(what string, err error) (*os.File, flow, error) {
		return nil, flow{}, errors.Join(fmt.Errorf("%s: %w", what, err), s.Close())
	}
	// Whatever ends it before it is joined to the pod's connection is no end of what the pod had to say.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return fail("SO_LINGER", err)
	}
	if err := unix.Bind(fd, anyPort); err != nil {
		return fail("bind to "+src.String(), err)
	}
	bound, err := unix.Getsockname(fd)
	if err != nil {
		return fail("getsockname", err)
	}
	return s, flow{gate.AddrPort(bound), dst}, nil
}

// connect returns when s is connected, or at its deadline.
func connect(s *os.File, dst netip.AddrPort) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	_, to := gate.Sockaddr(dst)
	// Asked again, the kernel tells what has become of it.
	werr := raw.Write(func(fd uintptr) bool {
		err = unix.Connect(int(fd), to)
		return !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EALREADY)
	})
	if werr != nil {
		return werr
	}
	return err
}

// disconnect ends what s has begun, with a reset if it is connected by now; it keeps its port (tcp_disconnect in
// net/ipv4/tcp.c).
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
