package testbed

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Tap records the frames that come out of a pod's link, on the node's side of it.
type Tap struct {
	tb   TB
	file *os.File
	done chan struct{}

	mu     sync.Mutex // guards frames
	frames [][]byte
}

// Tap begins to record. It ends with the test.
func (p *Pod) Tap() *Tap {
	p.tb.Helper()
	t := &Tap{tb: p.tb, done: make(chan struct{})}
	peer := p.peer()
	err := p.node.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		t.file = os.NewFile(uintptr(fd), "tap")
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: swap16(unix.ETH_P_ALL), Ifindex: peer})
	})
	if err != nil {
		p.tb.Fatalf("tapping the link of %s: %v", p, err)
	}
	go t.read()
	p.tb.Cleanup(func() {
		_ = t.file.Close()
		<-t.done
	})
	return t
}

// peer is the index of the node's end of the pod's link, in the node's netns.
func (p *Pod) peer() int {
	p.tb.Helper()
	m := peerIndex.FindStringSubmatch(p.Exec("ip", "-o", "link", "show", "eth0"))
	if m == nil {
		p.tb.Fatalf("eth0 of %s has no peer", p)
	}
	index, _ := strconv.Atoi(m[1])
	return index
}

var peerIndex = regexp.MustCompile(`eth0@if(\d+)`)

func (t *Tap) read() {
	defer close(t.done)
	b := make([]byte, 1<<16)
	for {
		n, err := t.file.Read(b)
		if err != nil {
			return // closed: the test has ended
		}
		t.mu.Lock()
		t.frames = append(t.frames, slices.Clone(b[:n]))
		t.mu.Unlock()
	}
}

// Sync waits until every frame that has left the pod is recorded: it sends one that passes the wall, and waits for it.
func (t *Tap) Sync(p *Pod) {
	t.tb.Helper()
	marker := fmt.Appendf(nil, "sync %d", time.Now().UnixNano())
	frame := slices.Concat(make([]byte, 12), binary.BigEndian.AppendUint16(nil, unix.ETH_P_LLDP), marker)
	SendFrames(p.Host, "eth0", FrameOptions{}, frame)
	Eventually(t.tb, "the tap sees the end", func() bool {
		return len(t.Frames(func(f []byte) bool { return slices.Equal(f, frame) })) > 0
	})
}

// Frames returns the recorded frames for which match holds.
func (t *Tap) Frames(match func([]byte) bool) [][]byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	var found [][]byte
	for _, f := range t.frames {
		if match(f) {
			found = append(found, f)
		}
	}
	return found
}

// TCPTo returns a match for TCP over plain Ethernet and IP, without options or extension headers, to an address.
func TCPTo(to netip.AddrPort) func([]byte) bool {
	return func(f []byte) bool {
		if len(f) < 14+40+20 {
			f = append(slices.Clone(f), make([]byte, 14+40+20-len(f))...)
		}
		switch ip, kind := f[14:], binary.BigEndian.Uint16(f[12:]); {
		case kind == unix.ETH_P_IP && to.Addr().Is4():
			return ip[9] == unix.IPPROTO_TCP && netip.AddrFrom4([4]byte(ip[16:20])) == to.Addr() &&
				binary.BigEndian.Uint16(ip[22:]) == to.Port()
		case kind == unix.ETH_P_IPV6 && to.Addr().Is6():
			return ip[6] == unix.IPPROTO_TCP && netip.AddrFrom16([16]byte(ip[24:40])) == to.Addr() &&
				binary.BigEndian.Uint16(ip[42:]) == to.Port()
		}
		return false
	}
}

// FrameOptions are those of the packet socket that sends frames.
type FrameOptions struct {
	Mark        uint32 // SO_MARK
	BypassQdisc bool   // PACKET_QDISC_BYPASS
	Protocol    uint16 // that the socket claims; 0 takes the frame's
}

// SendFrames sends frames through an interface by a packet socket.
func SendFrames(h *Host, device string, o FrameOptions, frames ...[]byte) {
	h.tb.Helper()
	err := h.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // everything is sent
		if o.BypassQdisc {
			if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
				return err
			}
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(o.Mark)); err != nil {
			return err
		}
		index, err := interfaceIndex(fd, device)
		if err != nil {
			return err
		}
		for _, f := range frames {
			protocol := o.Protocol
			if protocol == 0 {
				protocol = binary.BigEndian.Uint16(f[12:])
			}
			to := &unix.SockaddrLinklayer{Protocol: swap16(protocol), Ifindex: index, Halen: 6}
			// An error says that the frame was dropped on its way out.
			if err := unix.Sendto(fd, f, 0, to); err != nil && err != unix.ENOBUFS && err != unix.EPERM {
				return err
			}
		}
		return nil
	})
	if err != nil {
		h.tb.Fatalf("sending frames from %s: %v", h.Name, err)
	}
}

func interfaceIndex(fd int, name string) (int, error) {
	req, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req)
	return int(req.Uint32()), err
}

// swap16 brings a number of 16 bits from the host's order into that of the network.
func swap16(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// Segment is a TCP segment in a frame.
type Segment struct {
	From, To netip.AddrPort
	Flags    byte   // as in the header: FIN 1, SYN 2, RST 4, PSH 8, ACK 16
	Tags     []byte // VLAN tags, between the addresses and the EtherType
	Payload  []byte
}

// Frame is the frame to the broadcast address. Checksums are left out: nobody on the way looks at those of TCP.
func (s Segment) Frame() []byte {
	header := make([]byte, 20)
	binary.BigEndian.PutUint16(header, s.From.Port())
	binary.BigEndian.PutUint16(header[2:], s.To.Port())
	header[12], header[13] = 5<<4, s.Flags
	tcp := slices.Concat(header, s.Payload)
	f := slices.Concat([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1}, s.Tags)
	if s.To.Addr().Is4() {
		ip := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}
		binary.BigEndian.PutUint16(ip[2:], uint16(20+len(tcp)))
		ip = slices.Concat(ip, s.From.Addr().AsSlice(), s.To.Addr().AsSlice())
		binary.BigEndian.PutUint16(ip[10:], checksum(ip))
		return slices.Concat(f, binary.BigEndian.AppendUint16(nil, unix.ETH_P_IP), ip, tcp)
	}
	ip := []byte{0x60, 0, 0, 0, 0, 0, unix.IPPROTO_TCP, 64}
	binary.BigEndian.PutUint16(ip[4:], uint16(len(tcp)))
	ip = slices.Concat(ip, s.From.Addr().AsSlice(), s.To.Addr().AsSlice())
	return slices.Concat(f, binary.BigEndian.AppendUint16(nil, unix.ETH_P_IPV6), ip, tcp)
}

// checksum is that of the Internet (RFC 1071).
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
