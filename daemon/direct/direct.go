// Package direct connects to a captured connection's original destination as the pod itself would have: from its netns
// and address, and uncaptured.
//
// The kernel asks the nat table about connections that conntrack does not know yet. So one is entered into conntrack, by
// its addresses and ports and with a mark, before its first segment is sent; it takes CAP_NET_ADMIN over the netns to do
// that. The ruleset lets a SYN with the mark out until it has been answered: the entry outlives the connection, and who
// has the port next is not to have it. A mark of the socket would let in whoever has CAP_NET_RAW, as most containers do:
// that suffices for SO_MARK since Linux 5.17.
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

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// exemption is how long the kernel remembers the entry, in seconds, until the first segment is sent; from then on it is
// kept as that of any other connection.
const exemption = 10

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
	err := inNetnsOf(captured, func() (err error) {
		if s, exempt, err = bind(dst); err == nil {
			err = exempt.enter()
		}
		return err
	})
	if s != nil {
		defer s.Close() //nolint:errcheck // FileConn has made a duplicate, or there is an error already
	}
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = s.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := connect(s, dst); err != nil {
		_ = s.Close() // it would send another SYN, and the next to have the port is not to be exempt
		return nil, errors.Join(err, inNetnsOf(captured, exempt.forget))
	}
	c, err := net.FileConn(s)
	if err != nil {
		return nil, err
	}
	conn := c.(*net.TCPConn)
	return conn, conn.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true})
}

// inNetnsOf calls do on a thread in the netns of conn.
func inNetnsOf(conn *net.TCPConn, do func() error) error {
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

// bind makes a socket in this netns that nobody else can have the port of, at the address from which dst is reached.
func bind(dst netip.AddrPort) (*os.File, flow, error) {
	src, err := gate.SourceTo(dst.Addr())
	if err != nil {
		return nil, flow{}, err
	}
	if !src.IsValid() {
		return nil, flow{}, unix.ENETUNREACH
	}
	family := unix.AF_INET6
	if dst.Addr().Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, flow{}, fmt.Errorf("socket: %w", err)
	}
	s := os.NewFile(uintptr(fd), "direct")
	// Whatever ends it before it is joined to the pod's connection is no end of what the pod had to say.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return s, flow{}, fmt.Errorf("SO_LINGER: %w", err)
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(src, 0))); err != nil {
		return s, flow{}, fmt.Errorf("bind to %s: %w", src, err)
	}
	bound, err := unix.Getsockname(fd)
	if err != nil {
		return s, flow{}, fmt.Errorf("getsockname: %w", err)
	}
	return s, flow{netip.AddrPortFrom(src, port(bound)), dst}, nil
}

// connect returns when s is connected, or at its deadline.
func connect(s *os.File, dst netip.AddrPort) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	// Asked again, the kernel tells what has become of it.
	werr := raw.Write(func(fd uintptr) bool {
		err = unix.Connect(int(fd), sockaddr(dst))
		return !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EALREADY)
	})
	if werr != nil {
		return werr
	}
	return err
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func port(a unix.Sockaddr) uint16 {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return uint16(a.Port)
	case *unix.SockaddrInet6:
		return uint16(a.Port)
	}
	return 0
}

// flow is a connection as conntrack knows it.
type flow struct{ src, dst netip.AddrPort }

func (f flow) family() netlink.InetFamily {
	if f.src.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func tuple(from, to netip.AddrPort) netlink.IPTuple {
	return netlink.IPTuple{
		Protocol: unix.IPPROTO_TCP,
		SrcIP:    from.Addr().AsSlice(), SrcPort: from.Port(),
		DstIP: to.Addr().AsSlice(), DstPort: to.Port(),
	}
}

// enter has conntrack know f, with no translation of addresses.
func (f flow) enter() error {
	return withConntrack(func(h *netlink.Handle) error {
		err := h.ConntrackCreate(netlink.ConntrackTable, f.family(), &netlink.ConntrackFlow{
			FamilyType: uint8(f.family()), Forward: tuple(f.src, f.dst), Reverse: tuple(f.dst, f.src),
			Mark: ruleset.DirectMark, TimeOut: exemption,
		})
		if err != nil {
			return fmt.Errorf("exempting it from capture: %w", err)
		}
		return nil
	})
}

func (f flow) forget() error {
	return withConntrack(func(h *netlink.Handle) error {
		if _, err := h.ConntrackDeleteFilters(netlink.ConntrackTable, f.family(), f); err != nil {
			return fmt.Errorf("ending its exemption from capture: %w", err)
		}
		return nil
	})
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (f flow) MatchConntrackFlow(o *netlink.ConntrackFlow) bool {
	is := func(a netip.AddrPort, ip net.IP, port uint16) bool {
		addr, ok := netip.AddrFromSlice(ip)
		return ok && addr.Unmap() == a.Addr() && port == a.Port()
	}
	t := o.Forward
	return t.Protocol == unix.IPPROTO_TCP && is(f.src, t.SrcIP, t.SrcPort) && is(f.dst, t.DstIP, t.DstPort)
}

func withConntrack(do func(*netlink.Handle) error) error {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("opening conntrack: %w", err)
	}
	defer h.Close()
	return do(h)
}
