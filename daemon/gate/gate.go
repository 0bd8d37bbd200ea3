// Package gate holds one pod's listeners in its netns: where captured connections wait while the upstream
// is late. It only holds them; who accepts is somebody else's business.
package gate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Gate is the listeners of one pod: for what it sends out one for each address family, for what it is sent one for
// each of its addresses. They pin the netns until Close.
type Gate struct {
	Listeners []*Listener
	diag      *diag
}

// Listener is a listening socket in a pod's netns.
type Listener struct {
	file *os.File
	at   netip.AddrPort
}

// Inbound tells whether l takes connections to the pod, rather than those that the pod makes.
func (l *Listener) Inbound() bool { return l.at.Port() == ruleset.InboundPort }

// backlog is more than any net.core.somaxconn: the kernel takes the smaller of the two.
const backlog = 1 << 16

// outbound is where what pods send arrives.
var outbound = []netip.AddrPort{
	netip.AddrPortFrom(netip.IPv4Unspecified(), ruleset.OutboundPort),
	netip.AddrPortFrom(netip.IPv6Unspecified(), ruleset.OutboundPort),
}

// Evict ends listeners in the netns at path where g, widened to the addresses, would have its own and has none: some other
// process has them and does not give them away. Connections that wait in their accept queues are reset by the kernel.
func (g *Gate) Evict(path string, addresses []netip.Addr) error {
	err := ns.WithNetNSPath(path, func(ns.NetNS) error {
		d, err := openDiag()
		if err != nil {
			return err
		}
		defer d.file.Close() //nolint:errcheck // the answers count
		var errs []error     // one may have listened for both families
		for _, at := range g.missing(slices.Concat(outbound, inboundAt(addresses))) {
			if err := d.destroy(at); err != nil {
				errs = append(errs, fmt.Errorf("port %d of %s: %w", at.Port(), at.Addr(), err))
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("ending listeners of another process in netns %s: %w", path, err)
	}
	return nil
}

func inboundAt(addresses []netip.Addr) []netip.AddrPort {
	var all []netip.AddrPort
	for _, a := range addresses {
		all = append(all, netip.AddrPortFrom(a, ruleset.InboundPort))
	}
	return all
}

// missing are those at which g has no listener.
func (g *Gate) missing(all []netip.AddrPort) []netip.AddrPort {
	return slices.DeleteFunc(all, func(at netip.AddrPort) bool {
		return slices.ContainsFunc(g.Listeners, func(l *Listener) bool { return l.at == at })
	})
}

// Open listens for what the pod in the netns at path sends. Wildcards, because what a nested container sends is
// redirected to the address of the bridge it came in by.
func Open(path string) (*Gate, error) {
	g := &Gate{}
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		if g.diag, err = openDiag(); err != nil {
			return err
		}
		g.Listeners, err = listenAll(outbound)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listening in netns %s: %w", path, err), g.Close())
	}
	return g, nil
}

// Widen listens also for what the pod in the netns at path is sent, at its addresses. It returns g if g does so already,
// or else a gate that takes the place of g, and has its listeners.
func (g *Gate) Widen(path string, addresses []netip.Addr) (*Gate, error) {
	missing := g.missing(inboundAt(addresses))
	if len(missing) == 0 {
		return g, nil
	}
	var more []*Listener
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		more, err = listenAll(missing)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listening in netns %s: %w", path, err)
	}
	return &Gate{slices.Concat(g.Listeners, more), g.diag}, nil
}

// Narrow undoes Widen, unless connections wait in the listeners that would go.
func (g *Gate) Narrow() (*Gate, error) {
	inbound := &Gate{}
	narrow := &Gate{diag: g.diag}
	for _, l := range g.Listeners {
		if l.Inbound() {
			inbound.Listeners = append(inbound.Listeners, l)
		} else {
			narrow.Listeners = append(narrow.Listeners, l)
		}
	}
	if waiting, err := inbound.Queued(); err != nil || waiting > 0 || len(inbound.Listeners) == 0 {
		return g, err
	}
	return narrow, errors.Join(inbound.Shut(), inbound.Close())
}

// listenAll listens at all of the addresses, but for those of a family that the kernel does not have.
func listenAll(at []netip.AddrPort) ([]*Listener, error) {
	var all []*Listener
	for _, a := range at {
		l, err := listen(a)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		}
		if err != nil {
			g := Gate{Listeners: all}
			return nil, errors.Join(fmt.Errorf("port %d of %s: %w", a.Port(), a.Addr(), err), g.Close())
		}
		all = append(all, l)
	}
	return all, nil
}

// Adopt makes a gate of the listeners of another, handed over by the process that held them, in the netns at path.
func Adopt(path string, listeners []*os.File) (*Gate, error) {
	g := ofFiles(listeners)
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		g.diag, err = openDiag()
		return err
	})
	for _, l := range g.Listeners {
		var berr error
		l.at, berr = l.boundTo()
		err = errors.Join(err, berr)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("taking over listeners in netns %s: %w", path, err), g.Close())
	}
	return g, nil
}

// ofFiles has no more than the listeners.
func ofFiles(listeners []*os.File) *Gate {
	g := &Gate{}
	for _, f := range listeners {
		g.Listeners = append(g.Listeners, &Listener{file: f})
	}
	return g
}

// Files are the listening sockets, to be handed over.
func (g *Gate) Files() []*os.File {
	files := make([]*os.File, len(g.Listeners))
	for i, l := range g.Listeners {
		files[i] = l.file
	}
	return files
}

// Cookies tell the listening sockets of g from all others, until the next boot.
func (g *Gate) Cookies() ([]uint64, error) { return Cookies(g.Files()) }

// Cookies reads the SO_COOKIE of sockets.
func Cookies(sockets []*os.File) ([]uint64, error) {
	cookies := make([]uint64, len(sockets))
	for i, f := range sockets {
		var err error
		cerr := (&Listener{file: f}).control(func(fd int) { cookies[i], err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE) })
		if err := errors.Join(cerr, err); err != nil {
			return nil, fmt.Errorf("SO_COOKIE: %w", err)
		}
	}
	slices.Sort(cookies)
	return cookies, nil
}

// Belong reports sockets that are not the listeners of a gate in the netns with that identity.
func Belong(sockets []*os.File, id attach.NetnsID) error {
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
		ours := at.Port() == ruleset.OutboundPort || at.Port() == ruleset.InboundPort
		if netns != id.Cookie || netns == 0 || listens == 0 || !ours {
			return fmt.Errorf("it does not listen on a capture port of netns %s", id)
		}
	}
	return nil
}

// boundTo asks the kernel for the address of l.
func (l *Listener) boundTo() (netip.AddrPort, error) {
	var at unix.Sockaddr
	var err error
	if cerr := l.control(func(fd int) { at, err = unix.Getsockname(fd) }); cerr != nil {
		return netip.AddrPort{}, cerr
	}
	return AddrPort(at), err
}

// Sockaddr is how the kernel is told of an address, and of which family that is.
func Sockaddr(a netip.AddrPort) (family int, _ unix.Sockaddr) {
	if a.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// AddrPort is what Sockaddr was made of; the zero value if it is of neither family.
func AddrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// Discard shuts and closes listeners that nobody made a gate of.
func Discard(listeners []*os.File) error {
	g := ofFiles(listeners)
	return errors.Join(g.Shut(), g.Close())
}

// Pause ends every Wait, as Close does, until Resume. What waits to be accepted goes on waiting.
func (g *Gate) Pause() error { return g.deadline(time.Unix(1, 0)) }

// Resume undoes Pause.
func (g *Gate) Resume() error { return g.deadline(time.Time{}) }

func (g *Gate) deadline(t time.Time) error {
	var errs []error
	for _, l := range g.Listeners {
		errs = append(errs, l.file.SetReadDeadline(t))
	}
	return errors.Join(errs...)
}

func listen(at netip.AddrPort) (*Listener, error) {
	family, to := Sockaddr(at)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	l := &Listener{os.NewFile(uintptr(fd), "gate"), at}
	fail := func(step string, err error) (*Listener, error) {
		return nil, errors.Join(fmt.Errorf("%s: %w", step, err), l.file.Close())
	}
	// Connections of a daemon that died may still occupy the port.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fail("SO_REUSEADDR", err)
	}
	if family == unix.AF_INET6 { // the other listener has IPv4
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return fail("IPV6_V6ONLY", err)
		}
	}
	// What is accepted inherits it. The way to the app is within the node: where the node's default is BBR,
	// its pacing would cost a third of the throughput. A kernel without cubic keeps its default.
	_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
	// An address that was just given to the pod may still be tentative: duplicates of it are looked for.
	if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1); err != nil {
		return fail("IP_FREEBIND", err)
	}
	if err := unix.Bind(fd, to); err != nil {
		return fail("bind", err)
	}
	if err := unix.Listen(fd, backlog); err != nil {
		return fail("listen", err)
	}
	return l, nil
}

// Shut ends the listeners for everybody who holds them, in this process or in another. Connections that wait in
// their accept queues are reset by the kernel.
func (g *Gate) Shut() error {
	var errs []error
	for _, l := range g.Listeners {
		var err error
		cerr := l.control(func(fd int) { err = unix.Shutdown(fd, unix.SHUT_RDWR) })
		errs = append(errs, cerr, err)
	}
	return errors.Join(errs...)
}

// Close closes the listeners. If nobody else holds them, connections that wait in their accept queues are reset by
// the kernel.
func (g *Gate) Close() error {
	var errs []error
	for _, l := range g.Listeners {
		errs = append(errs, l.file.Close())
	}
	if g.diag != nil {
		errs = append(errs, g.diag.file.Close())
	}
	return errors.Join(errs...)
}

// Counts are what the connections through a gate come to.
type Counts struct {
	Open  int    // accepted, and not ended
	Bytes uint64 // both ways together
}

// Queued counts the connections in the kernel's accept queues.
func (g *Gate) Queued() (int, error) {
	n := 0
	for _, l := range g.Listeners {
		q, err := l.Queued()
		if err != nil {
			return 0, err
		}
		n += q
	}
	return n, nil
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

func (l *Listener) control(do func(fd int)) error {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return err
	}
	if err := raw.Control(func(fd uintptr) { do(int(fd)) }); err != nil {
		return os.ErrClosed // poll's own error for it is another
	}
	return nil
}

// Wait returns when a connection can be accepted. It accepts none: whoever is not ready to serve one lets
// it wait where it is. After Close it returns an error that is os.ErrClosed.
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
		return os.ErrClosed // poll's own error for it is another
	}
	return nil
}

// Reset ends a connection with a reset: its other end shall not take it for one that was served.
func Reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // fails only on a closed connection
	_ = c.Close()
}

// Accept takes the connection that has waited longest; nil when there is none after all. It takes a second descriptor
// for a moment, and waits for one: what was accepted is not lost for want of it, unless ctx ends.
func (l *Listener) Accept(ctx context.Context) (*net.TCPConn, error) {
	fd, err := l.accept()
	if err != nil || fd < 0 {
		return nil, err
	}
	// Whatever ends it before it has been joined to another is no end of what its server had to say.
	if err := resetOnClose(fd); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	f := os.NewFile(uintptr(fd), "captured") // blocking still, so that only the duplicate is polled
	defer f.Close()                          //nolint:errcheck // FileConn made that duplicate
	for {
		c, err := net.FileConn(f)
		switch {
		case err == nil:
			return c.(*net.TCPConn), nil
		case !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE):
			return nil, err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Refuse resets the connection that has waited longest; it tells whether there was one.
func (l *Listener) Refuse() (bool, error) {
	fd, err := l.accept()
	if err != nil || fd < 0 {
		return false, err
	}
	return true, errors.Join(resetOnClose(fd), unix.Close(fd))
}

func resetOnClose(fd int) error {
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// accept returns -1 when there is none after all.
func (l *Listener) accept() (fd int, err error) {
	if cerr := l.control(func(l int) { fd, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC) }); cerr != nil {
		return -1, cerr
	}
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EINTR):
		return -1, nil
	case err != nil:
		return -1, fmt.Errorf("accept: %w", err)
	}
	return fd, nil
}
