// Package netns looks up addresses and routes in network namespaces, and enters the netns of a socket.
package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"syscall"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// Address is an address of an interface.
type Address struct {
	netip.Addr
	Interface string
	// Loopback says that the interface is one; the address may be of any kind.
	Loopback bool
}

// IsOf reports whether a is one of the addresses of a pod, on an interface that is no loopback.
func (a Address) IsOf(ips []netip.Addr) bool { return !a.Loopback && slices.Contains(ips, a.Addr) }

// Addresses lists the addresses in the netns at path, in the order of its interfaces.
func Addresses(path string) ([]Address, error) {
	_, found, err := list(path)
	return found, err
}

// list lists the names of the interfaces in the netns at path, and their addresses.
func list(path string) (names []string, found []Address, err error) {
	err = ns.WithNetNSPath(path, func(ns.NetNS) error {
		interfaces, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, i := range interfaces {
			names = append(names, i.Name)
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
		return nil, nil, fmt.Errorf("listing addresses in netns %s: %w", path, err)
	}
	return names, found, nil
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
	family, to := socket.Sockaddr(netip.AddrPortFrom(dst, 9))
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("looking up the route to %s: socket: %w", dst, err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was sent
	if err := unix.Connect(fd, to); err != nil {
		return netip.Addr{}, nil // unreachable, prohibited or blackhole route
	}
	from, err := unix.Getsockname(fd)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("looking up the route to %s: getsockname: %w", dst, err)
	}
	return socket.AddrPort(from).Addr().Unmap(), nil
}

// SourcesTo returns the addresses from which the calling thread's netns connects to dst now or soon: that of SourceTo,
// and the tentative ones of the interface that leads there. The kernel checks that no other host has such an address,
// and takes it a second later (RFC 4862, section 5.4): that of a bridge which has its first pod.
func SourcesTo(dst netip.Addr) ([]netip.Addr, error) {
	now, err := SourceTo(dst)
	if err != nil {
		return nil, err
	}
	var sources []netip.Addr
	if now.IsValid() {
		sources = append(sources, now)
	}
	if dst.Is4() {
		return sources, nil
	}
	routes, err := netlink.RouteGet(dst.AsSlice())
	if err != nil || len(routes) == 0 {
		return sources, nil //nolint:nilerr // no route leads there
	}
	out := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: routes[0].LinkIndex}}
	addrs, err := netlink.AddrList(out, unix.AF_INET6)
	if err != nil {
		return nil, fmt.Errorf("listing addresses of the interface that leads to %s: %w", dst, err)
	}
	for _, a := range addrs {
		soon, ok := netip.AddrFromSlice(a.IP)
		if ok && a.Flags&unix.IFA_F_TENTATIVE != 0 && !soon.IsLinkLocalUnicast() {
			sources = append(sources, soon)
		}
	}
	return sources, nil
}

// servicesInterface has the addresses of all services where kube-proxy uses IPVS: the kernel forwards what is sent
// there.
const servicesInterface = "kube-ipvs0"

// IsLocal reports whether dst is an address of the calling thread's netns: packets to it leave through the loopback.
// Addresses of services are not.
func IsLocal(dst netip.Addr) (bool, error) {
	from, err := SourceTo(dst)
	if err != nil || from != dst && !from.IsLoopback() {
		return false, err
	}
	services, err := net.InterfaceByName(servicesInterface)
	var failed syscall.Errno
	if errors.As(err, &failed) {
		return false, fmt.Errorf("looking for the interface %s: %w", servicesInterface, err)
	}
	if err != nil {
		return true, nil //nolint:nilerr // kube-proxy does not use IPVS
	}
	addrs, err := services.Addrs()
	if err != nil {
		return false, fmt.Errorf("listing addresses of %s: %w", servicesInterface, err)
	}
	return !slices.ContainsFunc(addrs, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && n.IP.Equal(dst.AsSlice())
	}), nil
}
