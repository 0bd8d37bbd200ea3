// Package gate holds one pod's listeners in its netns: where captured connections wait while the upstream
// is late. It only holds them; who accepts is somebody else's business.
package gate

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Gate is the listeners of one pod, one for each address family. They pin the netns until Close.
type Gate struct {
	Listeners []*Listener
	diag      *diag
}

// Listener is a listening socket in a pod's netns.
type Listener struct{ file *os.File }

// backlog is more than any net.core.somaxconn: the kernel takes the smaller of the two.
const backlog = 1 << 16

// Open listens on every address of the netns at path. Wildcards, because what a nested container sends is
// redirected to the address of the bridge it came in by.
func Open(path string) (*Gate, error) {
	g := &Gate{}
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		if g.diag, err = openDiag(); err != nil {
			return err
		}
		for _, at := range []unix.Sockaddr{
			&unix.SockaddrInet4{Port: ruleset.OutboundPort},
			&unix.SockaddrInet6{Port: ruleset.OutboundPort},
		} {
			l, err := listen(at)
			if errors.Is(err, unix.EAFNOSUPPORT) {
				continue // a kernel without IPv6
			}
			if err != nil {
				return err
			}
			g.Listeners = append(g.Listeners, l)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listening on port %d in netns %s: %w", ruleset.OutboundPort, path, err), g.Close())
	}
	return g, nil
}

// Adopt makes a gate of the listeners of another, handed over by the process that held them, in the netns at path.
func Adopt(path string, listeners []*os.File) (*Gate, error) {
	g := &Gate{}
	for _, f := range listeners {
		g.Listeners = append(g.Listeners, &Listener{f})
	}
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		g.diag, err = openDiag()
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("taking over listeners in netns %s: %w", path, err), g.Close())
	}
	return g, nil
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
		cerr := (&Listener{f}).control(func(fd int) { cookies[i], err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE) })
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
		var at unix.Sockaddr
		var errs [3]error
		cerr := (&Listener{f}).control(func(fd int) {
			netns, errs[0] = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
			listens, errs[1] = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
			at, errs[2] = unix.Getsockname(fd)
		})
		if err := errors.Join(append(errs[:], cerr)...); err != nil {
			return err
		}
		if netns != id.Cookie || netns == 0 || listens == 0 || portOf(at) != ruleset.OutboundPort {
			return fmt.Errorf("it does not listen on port %d of netns %s", ruleset.OutboundPort, id)
		}
	}
	return nil
}

func portOf(a unix.Sockaddr) int {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return a.Port
	case *unix.SockaddrInet6:
		return a.Port
	}
	return 0
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

func listen(at unix.Sockaddr) (*Listener, error) {
	family := unix.AF_INET
	if _, is := at.(*unix.SockaddrInet6); is {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	l := &Listener{os.NewFile(uintptr(fd), "gate")}
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
	if err := unix.Bind(fd, at); err != nil {
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
	Waiting int // for the upstream
	Open    int
	Bytes   uint64 // both ways together
}

// Queued counts the connections in the kernel's accept queues.
func (g *Gate) Queued() (int, error) {
	n := 0
	for _, l := range g.Listeners {
		q, err := l.queued()
		if err != nil {
			return 0, err
		}
		n += q
	}
	return n, nil
}

func (l *Listener) queued() (n int, err error) {
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

// Accept takes the connection that has waited longest; nil when there is none after all.
func (l *Listener) Accept() (*net.TCPConn, error) {
	var fd int
	var err error
	if cerr := l.control(func(l int) {
		fd, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC)
	}); cerr != nil {
		return nil, cerr
	}
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EINTR):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("accept: %w", err)
	}
	f := os.NewFile(uintptr(fd), "captured") // blocking still, so that only the duplicate is polled
	defer f.Close()                          //nolint:errcheck // FileConn made that duplicate
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}
