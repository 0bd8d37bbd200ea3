package escape

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// probe is traffic that must pass, be captured, or be rejected aloud.
type probe struct {
	name string
	try  func(ctx context.Context) error
}

// check runs the probes at the same time and returns the failures, by the names of the probes.
func check(timeout time.Duration, probes []probe) map[string]error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	failed := map[string]error{}
	for _, p := range probes {
		wg.Go(func() {
			if err := p.try(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed[p.name] = err
			}
		})
	}
	wg.Wait()
	return failed
}

func at(ip string, port int) string { return net.JoinHostPort(ip, strconv.Itoa(port)) }

// reads is a probe that connects from h and reads want to the end of the connection.
func reads(name string, h *testbed.Host, address, want string) probe {
	return probe{name, func(ctx context.Context) error {
		got, err := h.Caller(ctx, address)
		if err == nil && got != want {
			err = fmt.Errorf("connecting to %s: got %q, want %q", address, got, want)
		}
		return err
	}}
}

// echoes is a probe that connects from h, over TCP or UDP, and gets back what it sends.
func echoes(name string, h *testbed.Host, network, address string) probe {
	return probe{name, func(ctx context.Context) error {
		c, err := h.Dial(ctx, network, address)
		if err != nil {
			return err
		}
		defer c.Close() //nolint:errcheck // all has been read
		return echo(ctx, c)
	}}
}

func echo(ctx context.Context, c net.Conn) error {
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "echo"); err != nil {
		return err
	}
	got := make([]byte, 4)
	_, err := io.ReadFull(c, got)
	if err == nil && string(got) != "echo" {
		err = fmt.Errorf("got %q", got)
	}
	return err
}

// refused is a probe that sends a datagram from h and gets an ICMP error for it.
func refused(name string, h *testbed.Host, address string) probe {
	return probe{name, func(ctx context.Context) error {
		c, err := h.Dial(ctx, "udp", address)
		if err != nil {
			return err
		}
		defer c.Close() //nolint:errcheck // nothing is expected of it
		deadline, _ := ctx.Deadline()
		if err := c.SetDeadline(deadline); err != nil {
			return err
		}
		_, _ = io.WriteString(c, "echo") // fails at once where the sender is in the netns of the rules
		if _, err := c.Read(make([]byte, 4)); !errors.Is(err, unix.ECONNREFUSED) {
			return fmt.Errorf("a datagram to %s: %w, want it refused", address, err)
		}
		return nil
	}}
}

// families are the addresses of one family.
type family struct {
	name, world, other, excluded, pod, gateway, nested, bridge string
}

func (s *scene) families() []family {
	return []family{
		{"IPv4", testbed.WorldIPv4, otherIPv4, excludedIPv4, s.pod.IPv4, testbed.NodeIPv4, "172.30.0.2", "172.30.0.1"},
		{"IPv6", testbed.WorldIPv6, otherIPv6, excludedIPv6, s.pod.IPv6, testbed.NodeIPv6, "fd00:30::2", "fd00:30::1"},
	}
}

// passing are the probes of traffic that sluice has no part in.
func (s *scene) passing() []probe {
	var all []probe
	for _, f := range s.families() {
		all = append(all,
			reads("excluded "+f.name, s.pod.Host, at(f.excluded, webPort), f.pod),
			reads("excluded, nested "+f.name, s.nested, at(f.excluded, webPort), f.pod),
			echoes("UDP "+f.name, s.pod.Host, "udp", at(f.world, udpPort)),
			echoes("UDP, nested "+f.name, s.nested, "udp", at(f.world, udpPort)),
			echoes("pod to itself "+f.name, s.pod.Host, "tcp", at(f.pod, podPort)),
			echoes("pod to nested "+f.name, s.pod.Host, "tcp", at(f.nested, podPort)),
			echoes("nested to pod "+f.name, s.nested, "tcp", at(f.bridge, podPort)),
		)
	}
	return all
}

// inbound are the probes of connections from outside.
func (s *scene) inbound() []probe {
	var all []probe
	for _, f := range s.families() {
		all = append(all, echoes("inbound "+f.name, s.n.World, "tcp", at(f.pod, podPort)))
	}
	return all
}

// quic are the probes of QUIC that is rejected.
func (s *scene) quic() []probe {
	var all []probe
	for _, f := range s.families() {
		all = append(all,
			refused("QUIC "+f.name, s.pod.Host, at(f.world, 443)),
			refused("QUIC, nested "+f.name, s.nested, at(f.world, 443)),
		)
	}
	return all
}

// plainFrames are frames that a packet socket may send, by their names.
func plainFrames(s *scene) map[string][]byte {
	ethernet := func(etherType uint16) []byte {
		b := append(append([]byte{}, s.macs[2]...), s.macs[1]...)
		return binary.BigEndian.AppendUint16(b, etherType)
	}
	arp := append(ethernet(unix.ETH_P_ARP), 0, 1, 8, 0, 6, 4, 0, 1)
	arp = append(arp, s.macs[1]...)
	arp = append(arp, netip.MustParseAddr(s.pod.IPv4).AsSlice()...)
	arp = append(arp, make([]byte, 6)...)
	arp = append(arp, 10, 88, 0, 1)
	all := map[string][]byte{"ARP": arp}
	for name, etherType := range map[string]uint16{
		"802.1X": unix.ETH_P_PAE, "LLDP": unix.ETH_P_LLDP, "PTP": unix.ETH_P_1588,
	} {
		all[name] = append(ethernet(etherType), make([]byte, 46)...)
	}
	for name, frame := range maps.Clone(all) {
		tag := []byte{0x81, 0, 0x60, 0}
		all[name+" with priority"] = slices.Insert(slices.Clone(frame), 12, tag...)
	}
	data := make([]byte, 16)
	for _, f := range s.families() {
		pod, world := netip.MustParseAddr(f.pod), netip.MustParseAddr(f.world)
		icmp := map[bool]byte{false: unix.IPPROTO_ICMP, true: unix.IPPROTO_ICMPV6}[pod.Is6()]
		udp := datagram(netip.AddrPortFrom(pod, 999), netip.AddrPortFrom(world, udpPort))
		for name, p := range map[string][]byte{"ICMP": ip(pod, world, icmp, data), "UDP": udp} {
			all[name+" frame "+f.name] = s.ethernet(p)
			all[name+" frame with priority "+f.name] = s.ethernet(p, 0x81, 0, 0x60, 0)
		}
	}
	dhcp := datagram(netip.MustParseAddrPort("0.0.0.0:68"), netip.MustParseAddrPort("255.255.255.255:67"))
	all["DHCP"], all["DHCP with priority"] = s.ethernet(dhcp), s.ethernet(dhcp, 0x81, 0, 0x60, 0)
	return all
}
