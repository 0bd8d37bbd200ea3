package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// ErrNotRedirected is the error of a connection that was made to the capture port itself.
var ErrNotRedirected = errors.New("connected to the capture port directly")

// soOriginalDst is SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST (linux/netfilter_ipv4.h and its IPv6 sibling).
const soOriginalDst = 80

// OriginalDestination reads the address to which the app connected before nat redirected the connection.
func OriginalDestination(c syscall.Conn) (netip.AddrPort, error) {
	var dst netip.AddrPort
	err := socket.Control(c, func(fd int) (err error) {
		dst, err = originalDestination(fd)
		return err
	})
	return dst, err
}

func originalDestination(fd int) (dst netip.AddrPort, err error) {
	name, err := unix.Getsockname(fd)
	if err != nil {
		return dst, fmt.Errorf("getsockname: %w", err)
	}
	local := socket.AddrPort(name)
	if local.Addr().Unmap().Is4() {
		dst, err = originalIPv4(fd)
	} else {
		dst, err = originalIPv6(fd)
	}
	if err != nil {
		return dst, fmt.Errorf("SO_ORIGINAL_DST: %w", err)
	}
	if dst == netip.AddrPortFrom(local.Addr().Unmap(), local.Port()) {
		return dst, ErrNotRedirected
	}
	return dst, nil
}

// x/sys has no call for SO_ORIGINAL_DST. These two read structures of the size that the kernel fills in.

func originalIPv4(fd int) (netip.AddrPort, error) {
	in, err := unix.GetsockoptIPv6Mreq(fd, unix.SOL_IP, soOriginalDst) // 20 bytes for a sockaddr_in of 16
	if err != nil {
		return netip.AddrPort{}, err
	}
	b := in.Multiaddr // family, port, address
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4])), nil
}

func originalIPv6(fd int) (netip.AddrPort, error) {
	in, err := unix.GetsockoptIPv6MTUInfo(fd, unix.SOL_IPV6, soOriginalDst) // begins with a sockaddr_in6
	if err != nil {
		return netip.AddrPort{}, err
	}
	port := (*[2]byte)(unsafe.Pointer(&in.Addr.Port)) // in network byte order
	return netip.AddrPortFrom(netip.AddrFrom16(in.Addr.Addr), binary.BigEndian.Uint16(port[:])), nil
}
