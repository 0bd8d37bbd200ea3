package gate

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Listener is a listening socket in a pod's netns.
type Listener struct {
	// Inbound says that l takes connections to the pod, and not connections that the pod makes.
	Inbound bool

	file *os.File
	at   netip.AddrPort
}

// isInbound tells the listeners apart: those for outbound connections have the wildcard address.
func isInbound(at netip.AddrPort) bool { return !at.Addr().IsUnspecified() }

// backlog is larger than any net.core.somaxconn: the kernel takes the smaller of the two.
const backlog = 1 << 16

// listenAll listens at all addresses, except those of a family that the kernel does not have.
func listenAll(at []netip.AddrPort) ([]*Listener, error) {
	var all []*Listener
	for _, a := range at {
		l, err := listen(a)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		}
		if errors.Is(err, unix.EADDRINUSE) {
			err = fmt.Errorf("%w: another process in the pod listens there; stop it, or set capture.ports to ports "+
				"that no pod uses", err)
		}
		if err != nil {
			g := Gate{Listeners: all}
			return nil, errors.Join(fmt.Errorf("port %d of %s: %w", a.Port(), a.Addr(), err), g.Close())
		}
		all = append(all, l)
	}
	return all, nil
}

func listen(at netip.AddrPort) (*Listener, error) {
	family, to := socket.Sockaddr(at)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	l := &Listener{Inbound: isInbound(at), file: os.NewFile(uintptr(fd), "gate"), at: at}
	fail := func(step string, err error) (*Listener, error) {
		return nil, errors.Join(fmt.Errorf("%s: %w", step, err), l.file.Close())
	}
	// Connections of a daemon that died may still occupy the port.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fail("SO_REUSEADDR", err)
	}
	if family == unix.AF_INET6 { // the other listener serves IPv4
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return fail("IPV6_V6ONLY", err)
		}
	}
	// Accepted sockets inherit it. The way to the app is within the node: where the node's default is BBR, its pacing
	// would cost a third of the throughput. A kernel without cubic keeps its default.
	_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
	// An address that the pod has just been given may still be tentative (duplicate address detection).
	if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1); err != nil {
		return fail("IP_FREEBIND", err)
	}
	if err := socket.PrepareListener(fd); err != nil {
		return fail("inherited options", err)
	}
	if err := unix.Bind(fd, to); err != nil {
		return fail("bind", err)
	}
	if err := unix.Listen(fd, backlog); err != nil {
		return fail("listen", err)
	}
	return l, nil
}

// Wait returns when a connection can be accepted, and does not accept it: a connection that cannot be served yet stays
// in the accept queue. After Close or Pause the error is os.ErrClosed.
func (l *Listener) Wait() error {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return err
	}
	err = raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	if err != nil {
		return os.ErrClosed // the poller has an error value of its own
	}
	return nil
}

// Accept takes the connection that has waited longest, or returns nil if none waits. Any close of it is a reset: until
// it is joined to the upstream, the end of this process must not look to the app like the end of an answer.
func (l *Listener) Accept() (c *socket.Conn, err error) {
	if cerr := l.control(func(l int) { c, err = socket.Accept(l) }); cerr != nil {
		return nil, cerr
	}
	return c, acceptError(err)
}

// Refuse resets the connection that has waited longest. It reports whether there was one, and whether it was still
// open.
func (l *Listener) Refuse() (found, open bool, err error) {
	var fd int
	if cerr := l.control(func(l int) { fd, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC) }); cerr != nil {
		return false, false, cerr
	}
	if err != nil {
		return false, false, acceptError(err)
	}
	_, gone := unix.Getpeername(fd) // fails with ENOTCONN after a reset
	return true, gone == nil, errors.Join(socket.ResetOnClose(fd), unix.Close(fd))
}

// acceptError is nil if only no connection waits.
func acceptError(err error) error {
	for _, none := range []error{unix.EAGAIN, unix.ECONNABORTED, unix.EINTR} {
		if errors.Is(err, none) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	return nil
}

// Queued counts the connections in the accept queue of l.
func (l *Listener) Queued() (n int, err error) {
	cerr := l.control(func(fd int) {
		var info *unix.TCPInfo
		if info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n = int(info.Unacked) // of a listener: sk_ack_backlog (tcp_get_info in net/ipv4/tcp.c)
		}
	})
	return n, errors.Join(cerr, err)
}

// boundTo asks the kernel for the address of l.
func (l *Listener) boundTo() (at netip.AddrPort, err error) {
	var name unix.Sockaddr
	if cerr := l.control(func(fd int) { name, err = unix.Getsockname(fd) }); cerr != nil {
		return at, cerr
	}
	return socket.AddrPort(name), err
}

func (l *Listener) control(do func(fd int)) error {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return err
	}
	if err := raw.Control(func(fd uintptr) { do(int(fd)) }); err != nil {
		return os.ErrClosed // the poller has an error value of its own
	}
	return nil
}

// Cookies returns the SO_COOKIE of each socket, sorted.
func Cookies(sockets []*os.File) ([]uint64, error) {
	cookies := make([]uint64, len(sockets))
	for i, f := range sockets {
		var err error
		cerr := (&Listener{file: f}).control(func(fd int) {
			cookies[i], err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		})
		if err := errors.Join(cerr, err); err != nil {
			return nil, fmt.Errorf("SO_COOKIE: %w", err)
		}
	}
	slices.Sort(cookies)
	return cookies, nil
}

// Verify returns an error unless every socket listens on one of the capture ports in the netns with that identity. A
// proxy that returns listeners is not trusted to name the netns itself.
func Verify(sockets []*os.File, id attach.NetnsID, ports ruleset.Ports) error {
	for _, f := range sockets {
		var netns uint64
		var listens int
		var errs [2]error
		l := &Listener{file: f}
		cerr := l.control(func(fd int) {
			netns, errs[0] = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
			listens, errs[1] = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		})
		at, err := l.boundTo()
		if err := errors.Join(errs[0], errs[1], cerr, err); err != nil {
			return err
		}
		capturePort := at.Port() == ports.Outbound || at.Port() == ports.Inbound
		if netns != id.Cookie || netns == 0 || listens == 0 || !capturePort {
			return fmt.Errorf("the socket does not listen on a capture port of netns %s", id)
		}
	}
	return nil
}
