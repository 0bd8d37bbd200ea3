package escape

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// packet is the TCP or UDP that a frame carries to a destination.
type packet struct {
	proto    byte   // unix.IPPROTO_TCP, unix.IPPROTO_UDP, or 0 for all other frames
	later    bool   // a fragment other than the first: it has no ports
	fragment uint32 // identifies the fragments of one packet; 0 for a whole packet
	src, dst netip.AddrPort
	// final is the last destination of a source route; the zero value without one.
	final              netip.Addr
	hasPorts, hasFlags bool
	flags              byte
	numbers            string // sequence and acknowledgement number
}

// beginsConnection reports whether p is the first segment of a connection.
func (p packet) beginsConnection() bool { return p.hasFlags && p.flags&(fin|syn|rst|ack) == syn }

// Bits of the flags of a TCP segment (RFC 9293, section 3.1).
const fin, syn, rst, ack = 1, 2, 4, 16

// EtherTypes that golang.org/x/sys/unix has no names for.
const (
	etherQinQ1, etherQinQ2, etherQinQ3 = 0x9100, 0x9200, 0x9300
	etherMin                           = 0x0600 // a smaller value is the length of an IEEE 802.3 frame
)

// parse finds the TCP or UDP in a frame. It goes through VLAN tags, MPLS labels, PPPoE, SNAP, IPv4 options and IPv6
// extension headers, and does not rely on lengths and checksums in the headers: a receiver may ignore them too.
func parse(frame []byte) packet {
	b, kind := cut(frame, 12)
	for {
		var etherType uint16
		if b, etherType = cutType(b); kind == nil || b == nil {
			return packet{}
		}
		switch {
		case etherType == unix.ETH_P_IP:
			return parseIPv4(b)
		case etherType == unix.ETH_P_IPV6:
			return parseIPv6(b)
		case etherType == unix.ETH_P_8021Q, etherType == unix.ETH_P_8021AD,
			etherType == etherQinQ1, etherType == etherQinQ2, etherType == etherQinQ3:
			if b, _ = cut(b, 2); b == nil {
				return packet{}
			}
		case etherType == unix.ETH_P_MPLS_UC, etherType == unix.ETH_P_MPLS_MC:
			return parseVersion(afterLabels(b))
		case etherType == unix.ETH_P_PPP_SES: // 6 bytes, and the protocol of PPP in 2
			b, _ = cut(b, 8)
			return parseVersion(b)
		case etherType < etherMin && len(b) >= 8 && string(b[:3]) == "\xaa\xaa\x03": // LLC and SNAP: RFC 1042
			b = b[6:]
		default:
			return packet{}
		}
	}
}

// cut returns b without its first n bytes, and those; nil if b is shorter.
func cut(b []byte, n int) (rest, first []byte) {
	if len(b) < n {
		return nil, nil
	}
	return b[n:], b[:n]
}

func cutType(b []byte) ([]byte, uint16) {
	rest, t := cut(b, 2)
	if t == nil {
		return nil, 0
	}
	return rest, binary.BigEndian.Uint16(t)
}

func afterLabels(b []byte) []byte {
	for len(b) >= 4 {
		last := b[2]&1 == 1
		if b = b[4:]; last {
			return b
		}
	}
	return nil
}

func parseVersion(b []byte) packet {
	switch {
	case len(b) > 0 && b[0]>>4 == 4:
		return parseIPv4(b)
	case len(b) > 0 && b[0]>>4 == 6:
		return parseIPv6(b)
	default:
		return packet{}
	}
}

func parseIPv4(b []byte) packet {
	if len(b) < 20 {
		return packet{}
	}
	header := max(int(b[0]&15)*4, 20)
	p := packet{proto: b[9], later: binary.BigEndian.Uint16(b[6:])&0x1fff != 0}
	if binary.BigEndian.Uint16(b[6:])&0x3fff != 0 {
		p.fragment = 1<<16 | uint32(binary.BigEndian.Uint16(b[4:]))
	}
	src, dst := netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
	p.final = sourceRoute(b[20:min(header, len(b))])
	b = b[min(header, len(b)):]
	for p.proto == unix.IPPROTO_AH && !p.later && len(b) >= 2 {
		p.proto, b = b[0], b[min((int(b[1])+2)*4, len(b)):]
	}
	return p.transport(b, src, dst)
}

// sourceRoute returns the last address of a source route (RFC 791, section 3.1).
func sourceRoute(options []byte) netip.Addr {
	for len(options) >= 2 && options[0] != 0 {
		if options[0] == 1 {
			options = options[1:]
			continue
		}
		kind, size := options[0], int(options[1])
		if size < 2 || size > len(options) {
			break
		}
		const loose, strict = 131, 137
		if (kind == loose || kind == strict) && size >= 7 && int(options[2]) <= size-3 {
			return netip.AddrFrom4([4]byte(options[size-4:]))
		}
		options = options[size:]
	}
	return netip.Addr{}
}

// Extension headers that golang.org/x/sys/unix has no names for.
const headerMobility, headerHIP, headerShim6 = 135, 139, 140

func parseIPv6(b []byte) packet {
	if len(b) < 40 {
		return packet{}
	}
	p := packet{proto: b[6]}
	src, dst := netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
	b = b[40:]
	routable := true // routers do not look for a route behind a header that is for the destination
	for {
		size := 0
		switch p.proto {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_ROUTING, headerMobility, headerHIP, headerShim6:
			if len(b) >= 2 {
				size = (int(b[1]) + 1) * 8
			}
		case unix.IPPROTO_AH:
			if len(b) >= 2 {
				size = (int(b[1]) + 2) * 4
			}
		case unix.IPPROTO_FRAGMENT:
			if len(b) >= 8 {
				size = 8
				p.later = p.later || binary.BigEndian.Uint16(b[2:])>>3 != 0
				p.fragment = binary.BigEndian.Uint32(b[4:])
			}
		default:
			return p.transport(b, src, dst)
		}
		if size == 0 || p.later && p.proto != unix.IPPROTO_FRAGMENT { // the rest is in another fragment
			p.proto = unix.IPPROTO_TCP // maybe
			return p.transport(nil, src, dst)
		}
		routable = routable && p.proto < headerMobility
		if routable && p.proto == unix.IPPROTO_ROUTING && min(size, len(b)) >= 24 && b[3] > 0 {
			p.final = lastSegment(b[:min(size, len(b))])
		}
		p.proto = b[0]
		b = b[min(size, len(b)):]
	}
}

// lastSegment returns the last destination of a routing header: of segment routing (RFC 8754) the first in the list.
func lastSegment(header []byte) netip.Addr {
	const segmentRouting = 4
	if header[2] == segmentRouting {
		return netip.AddrFrom16([16]byte(header[8:]))
	}
	return netip.AddrFrom16([16]byte(header[8+(len(header)-24)/16*16:]))
}

func (p packet) transport(b []byte, src, dst netip.Addr) packet {
	p.src, p.dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
	if p.proto != unix.IPPROTO_TCP && p.proto != unix.IPPROTO_UDP {
		p.proto = 0
		return p
	}
	if p.later || len(b) < 4 {
		return p
	}
	p.hasPorts = true
	p.src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(b))
	p.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[2:]))
	if p.proto == unix.IPPROTO_TCP && len(b) > 13 {
		p.hasFlags, p.flags, p.numbers = true, b[13], string(b[4:12])
	}
	return p
}
