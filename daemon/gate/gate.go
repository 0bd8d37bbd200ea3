// Package gate holds one pod's listeners in its netns: there captured connections wait while the upstream is late.
// It holds them and accepts nothing by itself: a relay or a proxy does.
package gate

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Gate is the listeners of one pod: one for each address family for outbound connections, and one for each address of
// the pod for inbound connections. They pin the netns until Close. A Gate does not change; Widen and Narrow make
// another one that shares its listeners.
type Gate struct {
	Listeners []*Listener
	ports     ruleset.Ports
	diag      *sockdiag.Conn
}

// Ports are the ports at which g listens.
func (g *Gate) Ports() ruleset.Ports { return g.ports }

// None is a gate without listeners, for a pod with these capture ports.
func None(ports ruleset.Ports) *Gate { return &Gate{ports: ports} }

// outbound are the addresses at which outbound connections arrive. They are wildcards, because a connection of a
// nested container is redirected to the address of the bridge through which it came.
func (g *Gate) outbound() []netip.AddrPort {
	return []netip.AddrPort{
		netip.AddrPortFrom(netip.IPv4Unspecified(), g.ports.Outbound),
		netip.AddrPortFrom(netip.IPv6Unspecified(), g.ports.Outbound),
	}
}

func (g *Gate) inbound(addresses []netip.Addr) []netip.AddrPort {
	var all []netip.AddrPort
	for _, a := range addresses {
		all = append(all, netip.AddrPortFrom(a, g.ports.Inbound))
	}
	return all
}

// Open listens for the outbound connections of the pod in the netns at path.
func Open(path string, ports ruleset.Ports) (*Gate, error) {
	g := None(ports)
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		if g.diag, err = sockdiag.Open(); err != nil {
			return err
		}
		g.Listeners, err = listenAll(g.outbound())
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listening in netns %s: %w", path, err), g.Close())
	}
	return g, nil
}

// Adopt makes a gate of listeners in the netns at path that another process has handed over.
func Adopt(path string, listeners []*os.File, ports ruleset.Ports) (*Gate, error) {
	g := ofFiles(listeners)
	g.ports = ports
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		g.diag, err = sockdiag.Open()
		return err
	})
	for _, l := range g.Listeners {
		var berr error
		l.at, berr = l.boundTo()
		l.Inbound = isInbound(l.at)
		var perr error // an older version has not set them
		cerr := l.control(func(fd int) { perr = socket.PrepareListener(fd) })
		err = errors.Join(err, berr, cerr, perr)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("taking over listeners in netns %s: %w", path, err), g.Close())
	}
	return g, nil
}

// ofFiles makes a gate that can only be shut and closed.
func ofFiles(listeners []*os.File) *Gate {
	g := &Gate{}
	for _, f := range listeners {
		g.Listeners = append(g.Listeners, &Listener{file: f})
	}
	return g
}

// Discard shuts and closes listeners of which no gate was made.
func Discard(listeners []*os.File) error {
	g := ofFiles(listeners)
	return errors.Join(g.Shut(), g.Close())
}

// Widen also listens for inbound connections at the addresses of the pod in the netns at path. It returns g if g
// listens at all of them already, and otherwise a gate that replaces g and has its listeners.
func (g *Gate) Widen(path string, addresses []netip.Addr) (*Gate, error) {
	missing := g.missing(g.inbound(addresses))
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
	return &Gate{slices.Concat(g.Listeners, more), g.ports, g.diag}, nil
}

// Narrow closes the inbound listeners, unless connections wait in them. It returns g if nothing changed, and otherwise
// a gate that replaces g.
func (g *Gate) Narrow() (*Gate, error) {
	inbound, narrow := &Gate{}, &Gate{ports: g.ports, diag: g.diag}
	for _, l := range g.Listeners {
		if l.Inbound {
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

// missing returns those of all at which g does not listen.
func (g *Gate) missing(all []netip.AddrPort) []netip.AddrPort {
	return slices.DeleteFunc(slices.Clone(all), func(at netip.AddrPort) bool {
		return slices.ContainsFunc(g.Listeners, func(l *Listener) bool { return l.at == at })
	})
}

// Evict closes the listeners of other processes in the netns at path at those addresses where g, widened to addresses,
// does not listen. The kernel resets the connections in their accept queues.
func (g *Gate) Evict(path string, addresses []netip.Addr) error {
	err := ns.WithNetNSPath(path, func(ns.NetNS) error {
		diag, err := sockdiag.Open()
		if err != nil {
			return err
		}
		defer diag.Close()
		var errs []error // one listener may have served both families
		for _, at := range g.missing(slices.Concat(g.outbound(), g.inbound(addresses))) {
			errs = append(errs, diag.Destroy(at))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("closing listeners of another process in netns %s: %w", path, err)
	}
	return nil
}

// Files returns the listening sockets, to be handed over. They still belong to g.
func (g *Gate) Files() []*os.File {
	files := make([]*os.File, len(g.Listeners))
	for i, l := range g.Listeners {
		files[i] = l.file
	}
	return files
}

// Cookies returns the SO_COOKIE of each listener, sorted. The kernel uses no cookie twice until the next boot.
func (g *Gate) Cookies() ([]uint64, error) { return Cookies(g.Files()) }

// Pause makes every Wait return, as Close does, until Resume. Connections in the accept queues go on waiting.
func (g *Gate) Pause() error { return g.setDeadline(time.Unix(1, 0)) }

// Resume undoes Pause.
func (g *Gate) Resume() error { return g.setDeadline(time.Time{}) }

func (g *Gate) setDeadline(t time.Time) error {
	var errs []error
	for _, l := range g.Listeners {
		errs = append(errs, l.file.SetReadDeadline(t))
	}
	return errors.Join(errs...)
}

// Shut ends the listeners for every process that holds them. The kernel resets the connections in their accept queues.
func (g *Gate) Shut() error {
	var errs []error
	for _, l := range g.Listeners {
		var err error
		cerr := l.control(func(fd int) { err = unix.Shutdown(fd, unix.SHUT_RDWR) })
		errs = append(errs, cerr, err)
	}
	return errors.Join(errs...)
}

// Close closes the listeners. Unless another process holds them too, the kernel resets the connections in their accept
// queues.
func (g *Gate) Close() error {
	var errs []error
	for _, l := range g.Listeners {
		errs = append(errs, l.file.Close())
	}
	if g.diag != nil {
		g.diag.Close()
	}
	return errors.Join(errs...)
}

// Queued counts the connections in the kernel's accept queues.
func (g *Gate) Queued() (int, error) {
	sum := 0
	for _, l := range g.Listeners {
		n, err := l.Queued()
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// Counts asks the kernel for the connections that came through g, were accepted by any process, and are still open.
// The kernel walks its table of sockets for it, which takes milliseconds.
func (g *Gate) Counts() (sockdiag.Counts, error) {
	sum, err := g.diag.Count(g.ports.Outbound)
	if err == nil && slices.ContainsFunc(g.Listeners, func(l *Listener) bool { return l.Inbound }) {
		var inbound sockdiag.Counts
		inbound, err = g.diag.Count(g.ports.Inbound)
		sum.Open += inbound.Open
		sum.Bytes += inbound.Bytes
	}
	return sum, err
}

// maxEnded bounds how many apps of each address family one Sweep looks for: each takes some 50 µs.
const maxEnded = 256

// Sweep resets the connections in the accept queues whose apps have closed them without a byte. The kernel keeps a
// connection that is over in its queue until it is accepted. Sweep returns how many there are: these, and those that
// their clients have reset. If connections wait, the kernel walks its table of sockets for each address family.
func (g *Gate) Sweep() (over int, err error) {
	queued := map[netip.AddrPort]int{} // by the first listener of a family and port
	for _, l := range g.Listeners {
		n, err := l.Queued()
		if err != nil {
			return 0, err
		}
		if n > 0 {
			queued[g.sibling(l).at] += n
		}
	}
	for at, n := range queued {
		known, ended, err := g.diag.Queued(at)
		if err != nil {
			return 0, err
		}
		// Dumps have the same order each time. Apps that hold their sockets must not hide those that are gone.
		rand.Shuffle(len(ended), func(i, j int) { ended[i], ended[j] = ended[j], ended[i] })
		gone, err := g.resetGone(ended[:min(len(ended), maxEnded)])
		if err != nil {
			return 0, err
		}
		over += max(n-known, 0) + gone
	}
	return over, nil
}

// sibling returns the first listener with the family and port of l.
func (g *Gate) sibling(l *Listener) *Listener {
	i := slices.IndexFunc(g.Listeners, func(other *Listener) bool {
		return other.at.Port() == l.at.Port() && other.at.Addr().Is4() == l.at.Addr().Is4()
	})
	return g.Listeners[i]
}

// resetGone resets those connections whose apps have closed their sockets, and counts them.
func (g *Gate) resetGone(ended []sockdiag.Ended) (count int, err error) {
	if len(ended) == 0 {
		return 0, nil
	}
	raw, err := g.Listeners[0].file.SyscallConn()
	if err != nil {
		return 0, err
	}
	err = netns.Of(raw, func() error {
		for _, e := range ended {
			// The app's socket has the original destination. If the entry is missing, nothing is known of the app.
			app, err := conntrack.Flow{Source: e.Listener, Destination: e.Client}.Original()
			if err != nil || g.AppState(app.Source, app.Destination) != sockdiag.AppClosed {
				continue
			}
			count++
			// A kernel without CONFIG_INET_DIAG_DESTROY cannot reset it. The relay drops it before it dials.
			if g.diag.Reset(e) == nil {
				_ = app.Forget() // a proxy that accepts it finds no destination to connect to
			}
		}
		return nil
	})
	return count, err
}

// AppState says whether a process still holds the app's end of the connection from src to dst.
func (g *Gate) AppState(src, dst netip.AddrPort) sockdiag.AppState { return g.diag.AppState(src, dst) }
