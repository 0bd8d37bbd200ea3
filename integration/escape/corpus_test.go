package escape

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// attempt is a way out of the pod, with fixed packets.
type attempt struct {
	name string
	try  func(*lab)
}

// header is one in the chain of headers of an IP packet.
type header struct {
	kind byte
	data []byte // of an IPv6 extension header without its first byte, which names the next header
}

// ip is an IP packet with a chain of headers before data. IPv4 has no extension headers but AH.
func ip(src, dst netip.Addr, proto byte, data []byte, chain ...header) []byte {
	for _, h := range slices.Backward(chain) {
		data = append(append([]byte{proto}, h.data...), data...)
		proto = h.kind
	}
	if src.Is6() {
		b := binary.BigEndian.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(len(data)))
		b = append(b, proto, 64)
		return append(append(append(b, src.AsSlice()...), dst.AsSlice()...), data...)
	}
	return ipv4(src, dst, proto, nil, 0, data)
}

// ipv4 is an IPv4 packet with options, or a fragment with the given offset and flags.
func ipv4(src, dst netip.Addr, proto byte, options []byte, fragment uint16, data []byte) []byte {
	b := binary.BigEndian.AppendUint16([]byte{byte(0x45 + len(options)/4), 0}, uint16(20+len(options)+len(data)))
	b = binary.BigEndian.AppendUint16(b, 77) // its identification
	b = binary.BigEndian.AppendUint16(b, fragment)
	b = append(b, 64, proto, 0, 0)
	b = append(append(append(b, src.AsSlice()...), dst.AsSlice()...), options...)
	binary.BigEndian.PutUint16(b[10:], ^foldSum(b))
	return append(b, data...)
}

// tcp is a segment without options and data.
func tcp(src, dst netip.AddrPort, flags byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, src.Port())
	b = binary.BigEndian.AppendUint16(b, dst.Port())
	b = append(append(b, b...), 0, 0, 0, 1) // its numbers tell a segment from others
	b = append(b, 5<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
	binary.BigEndian.PutUint16(b[16:], tcpChecksum(src.Addr(), dst.Addr(), b))
	return b
}

// signed is a segment with a wrong MD5 signature (RFC 2385). The kernel does not even answer it with a reset.
func signed(src, dst netip.AddrPort, flags byte) []byte {
	b := tcp(src, dst, flags)
	b[12] = 10 << 4 // the length of the header, in words
	b = append(append(b, 19, 18), make([]byte, 16+2)...)
	b[16], b[17] = 0, 0
	binary.BigEndian.PutUint16(b[16:], tcpChecksum(src.Addr(), dst.Addr(), b))
	return b
}

func segmentOf(src, dst netip.AddrPort, flags byte, chain ...header) []byte {
	return ip(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, tcp(src, dst, flags), chain...)
}

func datagram(src, dst netip.AddrPort) []byte {
	b := binary.BigEndian.AppendUint16(nil, src.Port())
	b = binary.BigEndian.AppendUint16(b, dst.Port())
	return ip(src.Addr(), dst.Addr(), unix.IPPROTO_UDP, append(b, 0, 12, 0, 0, 1, 2, 3, 4))
}

// ethernet is a frame from the pod to its gateway. between comes before the EtherType of the packet.
func (s *scene) ethernet(packet []byte, between ...byte) []byte {
	b := append(append(append([]byte{}, s.macs[0]...), s.macs[1]...), between...)
	etherType := uint16(unix.ETH_P_IP)
	if packet[0]>>4 == 6 {
		etherType = unix.ETH_P_IPV6
	}
	return append(binary.BigEndian.AppendUint16(b, etherType), packet...)
}

// flow is a pair of ends.
type flow struct{ pod, nested, captured, excluded netip.AddrPort }

func (s *scene) flows() []flow {
	var all []flow
	for _, f := range s.families() {
		end := func(ip string, port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(ip), port) }
		all = append(all, flow{
			end(f.pod, 20000), end(f.nested, 20000), end(f.world, webPort), end(f.excluded, webPort),
		})
	}
	return all
}

var everyFlags = []byte{syn, ack, syn | ack, fin | ack, rst, syn | fin, 0, 0xff}

// via sends an IP packet by a way of the lab, whatever it takes.
func (l *lab) via(name string, mark uint32, packet []byte) {
	w := l.ways[name]
	w.mark(mark)
	etherType := uint16(unix.ETH_P_IP)
	if packet[0]>>4 == 6 {
		etherType = unix.ETH_P_IPV6
	}
	if w.kind == frames {
		packet = l.ethernet(packet)
	}
	if name == "packet on lo" { // its address; frames to another are for another host
		copy(packet, make([]byte, 12))
	}
	w.send(packet, etherType)
}

// fromOutside sends an IP packet to the pod.
func (l *lab) fromOutside(packet []byte) {
	frame := l.ethernet(packet)
	copy(frame, l.macs[1])
	copy(frame[6:], l.macs[0])
	l.outer.send(frame, unix.ETH_P_ALL)
}

// raw is the name of the raw socket for the family of a packet.
func raw(packet []byte, suffix string) string {
	return fmt.Sprintf("raw IPv%d%s", packet[0]>>4, suffix)
}

// attempts must all fail.
var attempts = []attempt{
	{"segments of raw sockets", func(l *lab) {
		for _, f := range l.flows() {
			for _, flags := range everyFlags {
				for _, m := range marks {
					p := segmentOf(f.pod, f.captured, flags)
					l.via(raw(p, ""), m, p)
					l.via(raw(p, " bound to eth0"), m, p)
					l.via("nested: "+raw(p, ""), m, segmentOf(f.nested, f.captured, flags))
				}
			}
		}
	}},
	{"segments of packet sockets", func(l *lab) {
		for _, f := range l.flows() {
			for _, flags := range everyFlags {
				for _, m := range marks {
					for _, way := range []string{"packet", "packet, no qdisc", "datagram packet", "packet on lo"} {
						l.via(way, m, segmentOf(f.pod, f.captured, flags))
					}
				}
			}
		}
	}},
	{"VLAN tags", func(l *lab) {
		for _, f := range l.flows() {
			for _, tags := range [][]byte{
				{0x81, 0, 0, 0}, {0x81, 0, 0xe0, 0}, {0x81, 0, 0, 5}, {0x88, 0xa8, 0, 0}, {0x88, 0xa8, 0, 7},
				{0x91, 0, 0, 0},
				{0x81, 0, 0, 0, 0x81, 0, 0, 0}, {0x88, 0xa8, 0, 1, 0x81, 0, 0, 2},
			} {
				for _, way := range []string{"packet", "packet, no qdisc"} {
					w := l.ways[way]
					w.mark(1 << 30)
					w.send(l.ethernet(segmentOf(f.pod, f.captured, syn), tags...), unix.ETH_P_8021Q)
					w.send(l.ethernet(segmentOf(f.pod, f.captured, syn), tags...), unix.ETH_P_ARP)
				}
			}
		}
	}},
	{"options, extension headers and fragments of packet sockets", func(l *lab) {
		for _, f := range l.flows() {
			for n := range wrappings {
				p := wrapped(f.pod, f.captured, n)
				l.via("packet", 0, p)
				l.via("packet, no qdisc", 1<<30, p)
			}
		}
	}},
	{"options, extension headers and fragments of raw sockets", func(l *lab) {
		for _, f := range l.flows() {
			for n := range wrappings {
				p := wrapped(f.pod, f.captured, n)
				l.via(raw(p, ""), 0, p)
				if p[0]>>4 == 4 {
					l.via("raw IPv4, no defragmentation", 1<<30, p)
				}
			}
		}
	}},
	{"QUIC", func(l *lab) {
		for _, f := range l.flows() {
			to := netip.AddrPortFrom(f.captured.Addr(), 443)
			for _, way := range []string{"packet", "packet, no qdisc", raw(datagram(f.pod, to), "")} {
				l.via(way, 0, datagram(f.pod, to))
				l.via(way, 1<<30, datagram(f.pod, to))
			}
			l.via("nested: "+raw(datagram(f.pod, to), ""), 0, datagram(f.nested, to))
			l.ways["packet"].send(l.ethernet(datagram(f.pod, to), 0x81, 0, 0, 0), unix.ETH_P_8021Q)
			if to.Addr().Is4() {
				p := datagram(f.pod, to)
				l.via("packet", 0, ipv4(f.pod.Addr(), to.Addr(), unix.IPPROTO_UDP, []byte{1, 1, 1, 0}, 0, p[20:]))
				l.via("packet", 0, ipv4(f.pod.Addr(), to.Addr(), unix.IPPROTO_UDP, nil, 0x2000, p[20:]))
			}
		}
	}},
	{"segments that pretend to come from outside", func(l *lab) {
		for _, f := range l.flows() {
			for _, flags := range []byte{syn, ack} {
				l.via("packet on lo", 0, segmentOf(f.captured, f.pod, flags))
				l.via("packet on lo", 0, segmentOf(f.pod, f.captured, flags))
				p := segmentOf(f.captured, f.pod, flags)
				l.via(raw(p, ""), 0, p)
				p = segmentOf(f.pod, f.captured, ack)
				l.via(raw(p, ""), 0, p)
			}
		}
	}},
	{"connections that a segment on lo has begun", func(l *lab) {
		for _, f := range l.flows() {
			pod := netip.AddrPortFrom(f.pod.Addr(), 20004)
			l.via("packet on lo", 0, segmentOf(f.captured, pod, syn))
			for _, flags := range []byte{syn | ack, syn | ack, ack, ack} {
				p := segmentOf(pod, f.captured, flags)
				l.via(raw(p, ""), 0, p)
			}
		}
	}},
	{"connections on the ports of one from outside", func(l *lab) {
		for _, f := range l.flows() {
			pod := netip.AddrPortFrom(f.pod.Addr(), 20003)
			l.fromOutside(segmentOf(f.captured, pod, syn))
			p := segmentOf(pod, f.captured, syn)
			l.via(raw(p, ""), 0, p)
		}
	}},
	{"connections on the ports of one from outside that is not answered", func(l *lab) {
		for _, f := range l.flows() {
			pod := netip.AddrPortFrom(f.pod.Addr(), 20005)
			l.fromOutside(ip(f.captured.Addr(), pod.Addr(), unix.IPPROTO_TCP, signed(f.captured, pod, syn)))
			p := segmentOf(pod, f.captured, syn)
			l.via(raw(p, ""), 0, p)
		}
	}},
	{"segments of an entry that lo has made", func(l *lab) {
		for _, f := range l.flows() {
			for _, flags := range []byte{ack, syn, ack} {
				p := segmentOf(f.pod, f.captured, flags)
				l.via(raw(p, ""), 0, p)
				p = segmentOf(netip.AddrPortFrom(f.pod.Addr(), 20002), f.captured, flags)
				l.via("packet on lo", 0, p)
				l.via(raw(p, " bound to lo"), 0, p)
				l.via(raw(p, " bound to eth0"), 0, p)
				l.via(raw(p, " bound to eth0"), 0, p)
			}
		}
	}},
	{"segments of connections that conntrack forgets", func(l *lab) {
		for _, f := range l.flows() {
			for _, flags := range []byte{syn, ack, fin | ack} {
				p := segmentOf(f.pod, f.captured, flags)
				l.via(raw(p, ""), 0, p)
				l.forget()
				l.via(raw(p, " bound to eth0"), 0, p)
			}
		}
	}},
	{"AH before TCP", func(l *lab) {
		ah := header{unix.IPPROTO_AH, append([]byte{4, 0, 0}, make([]byte, 20)...)}
		for _, f := range l.flows() {
			for _, flags := range []byte{syn, syn | fin} { // ip6tables-legacy reads on, and redirects the first
				p := segmentOf(f.pod, f.captured, flags, ah)
				l.via(raw(p, ""), 0, p)
				l.via("packet", 0, p)
			}
		}
	}},
	{"SNAP before IPv4", func(l *lab) {
		f := l.flows()[0]
		frame := l.ethernet(segmentOf(f.pod, f.captured, syn), 0, 48, 0xaa, 0xaa, 3, 0, 0, 0)
		l.ways["packet"].send(frame, unix.ETH_P_802_3)
	}},
	{"source routes by way of an excluded address", func(l *lab) {
		for _, f := range l.flows() {
			p := segmentOf(f.pod, f.excluded, ack)
			p[len(p)-4] ^= 1 // of its checksum, so that no answer ends the connection
			l.via(raw(p, ""), 0, p)
			for _, flags := range []byte{ack, syn} {
				p := detour(f, unix.IPPROTO_TCP, tcp(f.pod, f.captured, flags))
				l.via(raw(p, ""), 0, p)
			}
			quic := netip.AddrPortFrom(f.captured.Addr(), 443)
			p = datagram(f.pod, quic)
			p = detour(f, unix.IPPROTO_UDP, p[len(p)-12:])
			l.via(raw(p, ""), 0, p)
			ah := append([]byte{unix.IPPROTO_TCP, 4, 0, 0}, make([]byte, 20)...)
			p = detour(f, unix.IPPROTO_AH, append(ah, tcp(f.pod, f.captured, syn)...))
			l.via(raw(p, ""), 0, p)
		}
	}},
	{"a mark behind a macvlan interface of a nested container", func(l *lab) {
		l.beginConnection(l.macvlan, l.flows()[0].captured, 1<<30)
	}},
	{"the other direction of a connection to an excluded address, whose source is forged", func(l *lab) {
		f := l.flows()[0]
		l.via("raw IPv4 bound to lo", 0, segmentOf(f.captured, f.excluded, ack)) // an entry without masquerading
		l.via("raw IPv4", 0, segmentOf(f.captured, f.excluded, ack))
		l.via("raw IPv4", 0, segmentOf(f.excluded, f.captured, ack))
	}},
	{"a connection whose other direction goes to an excluded address", func(l *lab) {
		for _, f := range l.flows() {
			for _, p := range [][]byte{
				segmentOf(f.excluded, f.captured, ack), segmentOf(f.captured, f.excluded, ack),
			} {
				l.via(raw(p, " bound to lo"), 0, p) // an entry without masquerading
				l.via(raw(p, ""), 0, p)
			}
			p := segmentOf(f.excluded, f.captured, ack)
			l.via(raw(p, ""), 0, p)
		}
	}},
	{"mobility, HIP and Shim6 headers before TCP", func(l *lab) {
		f := l.flows()[1]
		for _, kind := range []byte{headerMobility, headerHIP, headerShim6} {
			l.via("raw IPv6", 0, segmentOf(f.pod, f.captured, syn, header{kind, []byte{0, 1, 4, 0, 0, 0, 0}}))
		}
	}},
	{"fragments that show no ports", func(l *lab) {
		for _, f := range l.flows() {
			part := tcp(f.pod, netip.AddrPortFrom(f.captured.Addr(), freePort), syn)
			if f.pod.Addr().Is4() {
				for _, field := range []uint16{1, 0x2001, 4} {
					p := ipv4(f.pod.Addr(), f.captured.Addr(), unix.IPPROTO_TCP, nil, field, part)
					l.via("raw IPv4, no defragmentation", 0, p)
				}
				continue
			}
			// A piece whose length is no multiple of 8 is left as it is. nftables takes the flow label for its port.
			malformed := header{unix.IPPROTO_FRAGMENT, []byte{0, 0, 0x21, 0, 0, 0, 9}}
			p := ip(f.pod.Addr(), f.captured.Addr(), unix.IPPROTO_TCP, part[:11], malformed)
			l.via("raw IPv6", 0, p)
			binary.BigEndian.PutUint16(p[2:], freePort)
			l.via("raw IPv6", 0, p)
		}
	}},
}

// wrappings is the number of packets that wrapped knows.
const wrappings = 3

// wrapped is a segment behind options or extension headers, or a fragment of one.
func wrapped(src, dst netip.AddrPort, n int) []byte {
	segment := tcp(src, dst, syn)
	if src.Addr().Is4() {
		return [][]byte{
			ipv4(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, []byte{1, 1, 1, 0}, 0, segment),
			ipv4(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, nil, 0x2000, segment[:8]),         // more fragments follow
			ipv4(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, []byte{148, 4, 0, 0}, 0, segment), // router alert
		}[n]
	}
	pad := header{unix.IPPROTO_DSTOPTS, []byte{0, 1, 4, 0, 0, 0, 0}}
	return [][]byte{
		segmentOf(src, dst, syn, header{unix.IPPROTO_HOPOPTS, pad.data}, pad),
		segmentOf(src, dst, syn, header{unix.IPPROTO_FRAGMENT, []byte{0, 0, 0, 0, 0, 0, 9}}),
		segmentOf(src, dst, syn, header{unix.IPPROTO_ROUTING, []byte{0, 4, 0, 0, 0, 0, 0}}, pad),
	}[n]
}

// detour is a packet from the pod to the captured destination with a source route by way of the excluded one.
func detour(f flow, proto byte, data []byte) []byte {
	if f.pod.Addr().Is4() {
		route := append(append([]byte{131, 7, 4}, f.captured.Addr().AsSlice()...), 0)
		return ipv4(f.pod.Addr(), f.excluded.Addr(), proto, route, 0, data)
	}
	segments := append(f.captured.Addr().AsSlice(), f.excluded.Addr().AsSlice()...)
	route := header{unix.IPPROTO_ROUTING, append([]byte{4, 4, 1, 1, 0, 0, 0}, segments...)}
	return ip(f.pod.Addr(), f.excluded.Addr(), proto, data, route)
}

// beginConnection begins a connection from h, whose socket has a packet mark. The kernel sends its SYN at once.
func (l *lab) beginConnection(h *testbed.Host, to netip.AddrPort, mark int) {
	l.t.Helper()
	err := h.Do(func() error {
		family, address := sockaddr(to.Addr().String(), int(to.Port()))
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark)
		if cerr := unix.Connect(fd, address); !errors.Is(cerr, unix.EINPROGRESS) {
			err = errors.Join(err, cerr)
		}
		return errors.Join(err, unix.Close(fd))
	})
	if err != nil {
		l.t.Errorf("connecting from %s: %v", h.Name, err)
	}
}

// attempt tries a, with no connection known from before, and returns the frames that must not have left.
func (l *lab) attempt(a attempt) []string {
	l.t.Helper()
	l.forget()
	l.tap.forget()
	a.try(l)
	return l.escapes()
}

// forget deletes all of conntrack's entries in the pod.
func (l *lab) forget() {
	l.t.Helper()
	err := l.pod.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
	if err != nil {
		l.t.Fatalf("conntrack: %v", err)
	}
}

// defaults are the rules of a pod without annotations, and their settings.
func defaults() (ruleset.Ruleset, settings) {
	s := settings{
		quic: "reject", excludeCIDRs: prefixes(excludedIPv4+"/32", excludedIPv6+"/128"),
		inbound: []ports{{podPort, heldInbound}},
	}
	return ruleset.Ruleset{
		Interfaces: []string{"eth0"}, ExcludeCIDRs: s.excludeCIDRs, RejectQUIC: true,
		InboundPorts:   []ruleset.PortRange{{First: podPort, Last: heldInbound}},
		ExcludeSources: prefixes("10.88.0.1/32", "fd00:88::1/128"),
	}, s
}

// withPorts are the rules of a pod that has port lists, and their settings.
func withPorts() (ruleset.Ruleset, settings) {
	r, s := defaults()
	s.includePorts = []ports{{missingPort + 1, 65535}, {1, missingPort - 1}}
	s.excludePorts = []ports{{freePort, freePort}}
	r.IncludePorts, r.ExcludePorts = portRanges(s.includePorts), portRanges(s.excludePorts)
	return r, s
}

func portRanges(list []ports) (ranges []ruleset.PortRange) {
	for _, p := range list {
		ranges = append(ranges, ruleset.PortRange{First: p.first, Last: p.last})
	}
	return ranges
}

// TestWaysOut tries each way out of a pod with the default rules, and with port lists.
func TestWaysOut(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		for name, rulesOf := range map[string]func() (ruleset.Ruleset, settings){
			"defaults": defaults, "ports": withPorts,
		} {
			t.Run(f.Name+", "+name, func(t *testing.T) {
				t.Parallel()
				rules, s := rulesOf()
				testWaysOut(t, newLab(t, f, rules, s))
			})
		}
	}
}

func testWaysOut(t *testing.T, l *lab) {
	t.Helper()
	testbed.Eventually(t, "excluded traffic passes", func() bool { return l.first(l.passing()) == "" })
	for _, a := range attempts {
		for _, e := range l.attempt(a) {
			t.Errorf("%s: %s", a.name, e)
		}
	}
}
