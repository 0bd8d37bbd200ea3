// Package netns looks up addresses and routes in network namespaces, and enters the netns of a socket.
package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Address is an address of an interface.
type Address struct {
	netip.Addr
	Interface string
	// Loopback says that the interface is one; the address may be of any kind.
	Loopback bool
}

// Addresses lists the addresses in the netns at path, in the order of its interfaces.
func Addresses(path string) ([]Address, error) {
	var found []Address
	err := ns.WithNetNSPath(path, func(ns.NetNS) error {
		interfaces, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, i := range interfaces {
			addrs, err := i.Addrs()
			if err != nil {
				return err
			}
			for _, a := range addrs {
				if n, ok := a.(*net.IPNet); ok {
					if ip, ok := netip.AddrFromSlice(n.IP); ok {
						found = append(found, Address{ip.Unmap(), i.Name, i.Flags&net.FlagLoopback != 0})
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing addresses in netns %s: %w", path, err)
	}
	return found, nil
}

// Bridges lists the interface indices of the bridges in the netns at path.
func Bridges(path string) ([]int, error) {
	var found []int
	err := ns.WithNetNSPath(path, func(ns.NetNS) error {
		links, err := netlink.LinkList()
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // then more events come
			return err
		}
		for _, l := range links {
			if l.Type() == "bridge" {
				found = append(found, l.Attrs().Index)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing bridges in netns %s: %w", path, err)
	}
	return found, nil
}

// Of calls do on a thread in the netns of a socket.
func Of(socket syscall.RawConn, do func() error) error {
	var fd int
	var err error
	if cerr := socket.Control(func(s uintptr) { fd, err = unix.IoctlRetInt(int(s), unix.SIOCGSKNS) }); cerr != nil {
		return cerr
	}
	if err != nil {
		return fmt.Errorf("SIOCGSKNS: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	return ns.WithNetNSPath("/proc/self/fd/"+strconv.Itoa(fd), func(ns.NetNS) error { return do() })
}

// SourceTo returns the address from which the calling thread's netns connects to dst, or the zero value if no route
// leads there.
func SourceTo(dst netip.Addr) (netip.Addr, error) {
	// Connecting a UDP socket looks up the route and sends nothing. The port does not matter.
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst, 9)))
	var failed *os.SyscallError
	if errors.As(err, &failed) && failed.Syscall == "connect" {
		return netip.Addr{}, nil // unreachable, prohibited or blackhole route
	}
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close() //nolint:errcheck // nothing was sent
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap().WithZone(""), nil
}
