package escape

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// kindOf says which bytes a way takes.
type kindOf int

const (
	frames      kindOf = iota // link-layer frames
	packetsLink               // IP packets; the kernel adds the link-layer header
	packetsIPv4               // IPv4 packets with their header
	packetsIPv6               // IPv6 packets with their header
)

// way is a socket in the pod, or in a container nested in it, through which packets are sent.
type way struct {
	name  string
	kind  kindOf
	fd    int
	index int // the interface of a packet socket
}

// wayConfig describes a way before it is opened.
type wayConfig struct {
	name    string
	kind    kindOf
	device  string // of a packet socket; of a raw socket the device that it is bound to
	options [][2]int
}

// ways are all ways from the netns of a pod. A nested container has those of its own eth0.
var ways = []wayConfig{
	{name: "packet", kind: frames, device: "eth0"},
	{name: "packet, no qdisc", kind: frames, device: "eth0",
		options: [][2]int{{unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS}}},
	{name: "datagram packet", kind: packetsLink, device: "eth0"},
	{name: "packet on lo", kind: frames, device: "lo"},
	{name: "raw IPv4", kind: packetsIPv4},
	{name: "raw IPv4, no defragmentation", kind: packetsIPv4, options: [][2]int{{unix.SOL_IP, unix.IP_NODEFRAG}}},
	{name: "raw IPv4 bound to eth0", kind: packetsIPv4, device: "eth0"},
	{name: "raw IPv4 bound to lo", kind: packetsIPv4, device: "lo"},
	{name: "raw IPv6", kind: packetsIPv6},
	{name: "raw IPv6 bound to lo", kind: packetsIPv6, device: "lo"},
	{name: "raw IPv6 bound to eth0", kind: packetsIPv6, device: "eth0"},
}

// bridgeWays are those on a pod's interfaces to the containers nested in it.
var bridgeWays = []wayConfig{
	{name: "packet on the bridge", kind: frames, device: "docker0"},
	{name: "packet on the bridge's port", kind: frames, device: "v0"},
}

func openWays(t *testing.T, h *testbed.Host, where string, configs []wayConfig) []way {
	t.Helper()
	var opened []way
	for _, c := range configs {
		w := way{name: where + c.name, kind: c.kind}
		err := h.Do(func() (err error) {
			w.fd, w.index, err = c.open()
			return err
		})
		if err != nil {
			t.Fatalf("opening a socket in %s, %s: %v", h.Name, c.name, err)
		}
		t.Cleanup(func() { _ = unix.Close(w.fd) }) // nothing was written that matters
		opened = append(opened, w)
	}
	return opened
}

func (c wayConfig) open() (fd, index int, err error) {
	index, err = interfaceIndex(c.device)
	if err != nil {
		return 0, 0, err
	}
	family, kind, proto := unix.AF_PACKET, unix.SOCK_RAW, 0
	switch c.kind {
	case packetsLink:
		kind = unix.SOCK_DGRAM
	case packetsIPv4:
		family, proto = unix.AF_INET, unix.IPPROTO_RAW
	case packetsIPv6:
		family, proto = unix.AF_INET6, unix.IPPROTO_RAW
	}
	if fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto); err != nil {
		return 0, 0, fmt.Errorf("socket: %w", err)
	}
	errs := []error{unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1)}
	for _, o := range c.options {
		errs = append(errs, unix.SetsockoptInt(fd, o[0], o[1], 1))
	}
	if family != unix.AF_PACKET && c.device != "" {
		errs = append(errs, unix.BindToDevice(fd, c.device))
	}
	return fd, index, errors.Join(errs...)
}

// interfaceIndex returns the index of an interface in the netns of the calling thread, or 0 for no name.
func interfaceIndex(name string) (int, error) {
	if name == "" {
		return 0, nil
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(s) //nolint:errcheck // nothing was written
	request, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	if err := unix.IoctlIfreq(s, unix.SIOCGIFINDEX, request); err != nil {
		return 0, fmt.Errorf("index of %s: %w", name, err)
	}
	return int(request.Uint32()), nil
}

// send sends b. The kernel refuses most of it, which is no error here.
func (w way) send(b []byte, etherType uint16) {
	var address [28]byte
	size := 0
	switch w.kind {
	case frames, packetsLink:
		to := (*unix.RawSockaddrLinklayer)(unsafe.Pointer(&address))
		*to = unix.RawSockaddrLinklayer{
			Family: unix.AF_PACKET, Protocol: htons(etherType), Ifindex: int32(w.index),
			Halen: 6, Addr: [8]byte{255, 255, 255, 255, 255, 255}, // broadcast reaches the gateway too
		}
		size = unix.SizeofSockaddrLinklayer
	case packetsIPv4:
		if len(b) < 20 {
			return
		}
		binary.NativeEndian.PutUint16(address[:], unix.AF_INET)
		copy(address[4:8], b[16:20])
		size = unix.SizeofSockaddrInet4
	case packetsIPv6:
		if len(b) < 40 {
			return
		}
		binary.NativeEndian.PutUint16(address[:], unix.AF_INET6)
		copy(address[8:24], b[24:40])
		size = unix.SizeofSockaddrInet6
	}
	if len(b) == 0 {
		return
	}
	_, _, _ = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(w.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
		unix.MSG_DONTWAIT, uintptr(unsafe.Pointer(&address)), uintptr(size))
}

// mark sets SO_MARK.
func (w way) mark(m uint32) {
	_ = unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_MARK, int(m)) // a container without the right sends without
}

// marks are the bits of packet marks that sluice's rules use, and others.
var marks = []uint32{0, 0, 1 << 28, 1 << 29, 1 << 30, 1<<28 | 1<<29 | 1<<30, 1<<29 | 0x3a99, ^uint32(0)}
