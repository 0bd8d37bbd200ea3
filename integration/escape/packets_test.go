package escape

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/sys/unix"
)

// maker makes random packets. The same generator in the same state makes the same packets.
type maker struct {
	*rand.Rand
	sources, destinations map[bool][]netip.Addr // by Is6
	macs                  [][]byte              // the first is the gateway's
	ports                 []uint16
}

func pick[T any](m *maker, of ...T) T { return of[m.IntN(len(of))] }

// chance is true in one of n cases.
func (m *maker) chance(n int) bool { return m.IntN(n) == 0 }

func (m *maker) bytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(m.Uint32())
	}
	return b
}

func (m *maker) port() uint16 {
	if m.chance(8) {
		return uint16(m.Uint32())
	}
	return pick(m, m.ports...)
}

func (m *maker) address(pool map[bool][]netip.Addr, v6 bool) netip.Addr {
	if m.chance(32) {
		size := 4
		if v6 {
			size = 16
		}
		a, _ := netip.AddrFromSlice(m.bytes(size))
		return a
	}
	return pick(m, pool[v6]...)
}

// payload is what an IP header stands before: TCP mostly.
func (m *maker) payload(src, dst netip.Addr) (proto byte, b []byte) {
	switch m.IntN(10) {
	case 0:
		return unix.IPPROTO_UDP, m.udp()
	case 1:
		other := pick[byte](m, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6, unix.IPPROTO_SCTP, byte(m.Uint32()))
		return other, m.bytes(m.IntN(40))
	default:
		return unix.IPPROTO_TCP, m.tcp(src, dst)
	}
}

func (m *maker) udp() []byte {
	b := binary.BigEndian.AppendUint16(nil, m.port())
	b = binary.BigEndian.AppendUint16(b, pick(m, 443, 53, m.port()))
	data := m.bytes(m.IntN(24))
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(data)))
	return append(append(b, 0, 0), data...)
}

func (m *maker) tcp(src, dst netip.Addr) []byte {
	b := binary.BigEndian.AppendUint16(nil, m.port())
	b = binary.BigEndian.AppendUint16(b, m.port())
	b = binary.BigEndian.AppendUint32(b, m.Uint32())
	b = binary.BigEndian.AppendUint32(b, m.Uint32())
	options := m.bytes(4 * pick(m, 0, 0, 1, m.IntN(11)))
	offset := byte(5+len(options)/4) << 4
	if m.chance(16) {
		offset = byte(m.Uint32())
	}
	flags := byte(m.Uint32())
	if m.chance(2) {
		flags = pick[byte](m, syn, syn|ack, ack, ack|8, fin|ack, rst, syn|fin, 0)
	}
	b = append(b, offset, flags, 0xff, 0xff, 0, 0, 0, 0)
	b = append(append(b, options...), m.bytes(m.IntN(32))...)
	if !m.chance(16) {
		binary.BigEndian.PutUint16(b[16:], tcpChecksum(src, dst, b))
	}
	return b
}

func tcpChecksum(src, dst netip.Addr, segment []byte) uint16 {
	sum := uint32(unix.IPPROTO_TCP) + uint32(len(segment))
	for _, part := range [][]byte{src.AsSlice(), dst.AsSlice(), segment} {
		for i := 0; i+1 < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
		if len(part)%2 == 1 {
			sum += uint32(part[len(part)-1]) << 8
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// ip makes a packet, or the fragments of one.
func (m *maker) ip(v6 bool) [][]byte {
	src, dst := m.address(m.sources, v6), m.address(m.destinations, v6)
	proto, data := m.payload(src, dst)
	if v6 {
		return m.ipv6(src, dst, proto, data)
	}
	return m.ipv4(src, dst, proto, data)
}

func (m *maker) ipv4(src, dst netip.Addr, proto byte, data []byte) [][]byte {
	var options []byte
	switch m.IntN(8) {
	case 0:
		options = m.bytes(4 * (1 + m.IntN(10)))
	case 1: // a source route
		hop := m.address(m.destinations, false).As4()
		options = append([]byte{pick[byte](m, 131, 137), 7, 4}, append(hop[:], 0)...)
	}
	id := uint16(m.Uint32())
	one := func(offset int, more bool, data []byte) []byte {
		first := byte(0x45 + len(options)/4)
		if m.chance(64) {
			first = byte(m.Uint32())
		}
		b := []byte{first, byte(m.Uint32())}
		b = binary.BigEndian.AppendUint16(b, uint16(20+len(options)+len(data)))
		b = binary.BigEndian.AppendUint16(b, id)
		field := uint16(offset / 8)
		if more {
			field |= 0x2000
		} else if offset == 0 && m.chance(2) {
			field |= 0x4000
		}
		b = binary.BigEndian.AppendUint16(b, field)
		b = append(b, pick[byte](m, 64, 64, 64, 1, 2), proto, 0, 0)
		b = append(append(b, src.AsSlice()...), dst.AsSlice()...)
		b = append(b, options...)
		binary.BigEndian.PutUint16(b[10:], ^foldSum(b))
		return append(b, data...)
	}
	return m.fragments(data, one)
}

func foldSum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// fragments cuts data at random places, in random order, with overlaps and tiny pieces; mostly it does not.
func (m *maker) fragments(data []byte, one func(offset int, more bool, data []byte) []byte) [][]byte {
	if !m.chance(5) {
		return [][]byte{one(0, false, data)}
	}
	var all [][]byte
	for at := 0; at < len(data); {
		size := 8 * (1 + m.IntN(4))
		if m.chance(8) {
			size = 1 + m.IntN(7) // too small for ports
		}
		end := min(at+size, len(data))
		all = append(all, one(at, end < len(data) || m.chance(16), data[at:end]))
		at = min(at+max(size&^7, 8), len(data))
		if at < len(data) && m.chance(6) { // the next overlaps
			at = max(0, at-8)
			data = append(data[:at:at], m.bytes(len(data)-at)...)
		}
		if len(all) > 8 {
			break
		}
	}
	if m.chance(2) {
		m.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
	if m.chance(4) && len(all) > 0 {
		all = all[1:]
	}
	return all
}

func (m *maker) ipv6(src, dst netip.Addr, proto byte, data []byte) [][]byte {
	next := proto
	for range pick(m, 0, 0, 1, 2, 3) { // the headers that a fragment carries
		next, data = m.extension(next, data)
	}
	id := m.Uint32()
	fragmented := next
	one := func(offset int, more bool, part []byte) []byte {
		next := fragmented
		if offset > 0 || more || m.chance(16) {
			field := uint16(offset)
			if more {
				field |= 1
			}
			header := binary.BigEndian.AppendUint16([]byte{next, 0}, field)
			part = append(binary.BigEndian.AppendUint32(header, id), part...)
			next = unix.IPPROTO_FRAGMENT
		}
		if m.chance(8) {
			next, part = m.extension(next, part)
		}
		b := binary.BigEndian.AppendUint32(nil, 6<<28|m.Uint32()>>4)
		b = binary.BigEndian.AppendUint16(b, uint16(len(part)))
		b = append(b, next, pick[byte](m, 64, 255, 1))
		return append(append(append(b, src.AsSlice()...), dst.AsSlice()...), part...)
	}
	return m.fragments(data, one)
}

// extension puts an IPv6 extension header before data.
func (m *maker) extension(next byte, data []byte) (byte, []byte) {
	kind := pick[byte](m, unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_AH,
		headerMobility, headerHIP, headerShim6)
	var b []byte
	switch kind {
	case unix.IPPROTO_AH:
		b = append([]byte{next, 4, 0, 0}, m.bytes(20)...)
	case unix.IPPROTO_ROUTING:
		hop := m.address(m.destinations, true).As16()
		b = append([]byte{next, 2, pick[byte](m, 0, 2, 4), pick[byte](m, 0, 1), 0, 0, 0, 0}, hop[:]...)
	default:
		b = []byte{next, 0, 1, 4, 0, 0, 0, 0} // PadN
	}
	if m.chance(16) && kind != unix.IPPROTO_AH {
		b[1] = byte(m.IntN(3)) // not its length
	}
	return kind, append(b, data...)
}

// frame puts link-layer headers before an IP packet: the right EtherType and no tag mostly.
func (m *maker) frame(v6 bool, packet []byte) []byte {
	dst, src := m.macs[0], m.macs[1]
	if m.chance(8) {
		dst, src = pick(m, m.macs...), pick(m, m.macs...)
	}
	b := append(append(make([]byte, 0, 64+len(packet)), dst...), src...)
	etherType := uint16(unix.ETH_P_IP)
	if v6 {
		etherType = unix.ETH_P_IPV6
	}
	if m.chance(3) {
		var whole bool
		if b, whole = m.encapsulate(b, v6); whole {
			return append(b, packet...)
		}
	}
	if m.chance(16) {
		etherType = pick(m, uint16(m.Uint32()), unix.ETH_P_IP, unix.ETH_P_IPV6, unix.ETH_P_ARP)
	}
	b = append(binary.BigEndian.AppendUint16(b, etherType), packet...)
	if m.chance(64) {
		b = b[:m.IntN(len(b))]
	}
	return b
}

// encapsulate adds tags to b. whole is false if an EtherType has to follow.
func (m *maker) encapsulate(b []byte, v6 bool) (_ []byte, whole bool) {
	tag := func(etherType, value uint16) {
		b = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, etherType), value)
	}
	priority := uint16(m.IntN(16)) << 12
	switch m.IntN(9) {
	case 0, 1: // VLAN 0: only a priority
		tag(unix.ETH_P_8021Q, priority)
	case 2:
		tag(unix.ETH_P_8021Q, priority|uint16(m.IntN(4096)))
	case 3:
		tag(unix.ETH_P_8021AD, priority|uint16(m.IntN(3)))
		tag(unix.ETH_P_8021Q, uint16(m.IntN(3)))
	case 4:
		tag(unix.ETH_P_8021Q, 0)
		tag(unix.ETH_P_8021Q, 0)
	case 5:
		tag(pick[uint16](m, etherQinQ1, etherQinQ2, etherQinQ3, unix.ETH_P_8021AD), uint16(m.IntN(3)))
	case 6: // MPLS with one label
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_MPLS_UC)
		return append(b, 0, 1, 1, 64), true
	case 7: // PPPoE
		b = append(binary.BigEndian.AppendUint16(b, unix.ETH_P_PPP_SES), 0x11, 0, 0, 1, 0, 64)
		return binary.BigEndian.AppendUint16(b, map[bool]uint16{false: 0x21, true: 0x57}[v6]), true
	case 8: // SNAP
		b = append(binary.BigEndian.AppendUint16(b, uint16(64+m.IntN(64))), 0xaa, 0xaa, 3, 0, 0, 0)
	}
	return b, false
}
