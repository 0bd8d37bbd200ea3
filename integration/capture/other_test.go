package capture

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// Addresses of the world beside its first one, in both families: one is excluded from capture.
var (
	elsewhere = []string{"198.51.100.30", "2001:db8::30"}
	exempt    = []string{"198.51.100.20", "2001:db8::20"}
)

// newFilteringNode is a node that excludes two addresses, with the world's first address as its name server.
func newFilteringNode(t *testing.T, capture map[string]any) (*testbed.Node, *testbed.Daemon) {
	t.Helper()
	n := testbed.New(t)
	n.Resolvers = []string{testbed.WorldIPv4, testbed.WorldIPv6}
	capture["source"] = "all"
	capture["excludeCIDRs"] = slices.Concat([]string{"169.254.0.0/16", "fe80::/10"}, exempt)
	n.Config["capture"] = capture
	for _, ip := range slices.Concat(elsewhere, exempt) {
		length := "/24"
		if strings.Contains(ip, ":") {
			length = "/64"
		}
		// Deprecated, so that the world's own connections come from its first address.
		n.World.Exec("ip", "addr", "add", ip+length, "dev", "eth0", "nodad", "preferred_lft", "0")
	}
	for _, ip := range slices.Concat([]string{testbed.WorldIPv4, testbed.WorldIPv6}, elsewhere, exempt) {
		n.World.ServeCallerUDP(net.JoinHostPort(ip, "53"))
		n.World.ServeCallerUDP(net.JoinHostPort(ip, "8443"))
	}
	n.World.ServeCaller(":80")
	testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	d := n.StartDaemon()
	return n, d
}

// TestOther: a pod sends what is neither TCP nor QUIC as far as it may, and the rest is refused at once. So it is with
// containers in the pod. TCP, and packets to excluded destinations, are not affected.
func TestOther(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n, _ := newFilteringNode(t, map[string]any{})
			for _, other := range []string{"allow", "dns", "deny"} {
				pod := f.AddPod(t, n, other, n.Annotated(map[string]string{"sluice.dev/other": other}))
				nested := pod.Nested()
				t.Run(other, func(t *testing.T) {
					for _, from := range []*testbed.Host{pod.Host, nested} {
						for family, resolver := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
							passes := func(ip, port string, want bool) {
								t.Helper()
								wantUDP(t, from, net.JoinHostPort(ip, port), []string{pod.IPv4, pod.IPv6}[family], want)
							}
							passes(resolver, "53", other != "deny")
							passes(resolver, "8443", other == "allow")
							passes(elsewhere[family], "53", other == "allow")
							passes(exempt[family], "53", true)
							passes(exempt[family], "8443", true)
							wantPing(t, from, resolver, other == "allow")
							wantPing(t, from, exempt[family], true)
							wantSCTP(t, from, resolver, other == "allow")
							testbed.WantCaller(t, from, net.JoinHostPort(resolver, "80"),
								[]string{testbed.NodeIPv4, testbed.NodeIPv6}[family])
						}
					}
				})
			}
		})
	}
}

// TestOtherLetsThePodLive: what the pod needs to have a network at all, and its answers to the outside, pass where
// nothing else may.
func TestOtherLetsThePodLive(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n, _ := newFilteringNode(t, map[string]any{"other": "deny"})
			pod := f.AddPod(t, n, "strict", nil)
			wantUDP(t, pod.Host, testbed.WorldIPv4+":53", pod.IPv4, false)
			forget := func() {
				for _, h := range []*testbed.Host{n.Host, pod.Host} {
					h.IP("-4", "neigh", "flush", "all")
					h.IP("-6", "neigh", "flush", "all")
				}
			}
			pod.ServeCallerUDP(":8053")
			for family, ip := range []string{pod.IPv4, pod.IPv6} {
				gateway := []string{gatewayIPv4, gatewayIPv6}[family]
				world := []string{testbed.WorldIPv4, testbed.WorldIPv6}[family]
				forget()
				testbed.WantCaller(t, pod.Host, net.JoinHostPort(exempt[family], "80"), ip)
				forget()
				testbed.WantCaller(t, pod.Host, net.JoinHostPort(world, "80"),
					[]string{testbed.NodeIPv4, testbed.NodeIPv6}[family])
				forget()
				wantUDP(t, n.Host, net.JoinHostPort(ip, "8053"), gateway, true)
				wantUDP(t, n.World, net.JoinHostPort(ip, "8053"), world, true)
				wantPing(t, n.World, ip, true)
				// The pod says that nothing listens there.
				wantUDP(t, n.World, net.JoinHostPort(ip, "8054"), "", false)
			}
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK: %v", testbed.Describe(err))
			}
		})
	}
}

// TestOtherOfTheConfiguration: an annotation cannot loosen it. The daemon says that it knows no name server.
func TestOtherOfTheConfiguration(t *testing.T) {
	t.Parallel()
	n, d := newFilteringNode(t, map[string]any{"other": "dns"})
	if !strings.Contains(d.Log(), "resolvers=\"["+testbed.WorldIPv4+" "+testbed.WorldIPv6+"]\"") {
		t.Error("the log does not name the name servers")
	}
	pod := n.AddPod("plain")
	wantUDP(t, pod.Host, testbed.WorldIPv4+":53", pod.IPv4, true)
	wantUDP(t, pod.Host, testbed.WorldIPv4+":8443", pod.IPv4, false)
	loose := n.NewPod("loose")
	n.Annotated(map[string]string{"sluice.dev/other": "allow"})(loose)
	testbed.WantCNIError(t, loose.Add(), 100, "annotation sluice.dev/other", `"allow"`, "capture.other: dns")
	testbed.WantNoTraces(t, n, loose.Host)

	n.Resolvers = []string{"127.0.0.53"}
	d = n.HandOver(d)
	if !strings.Contains(d.Log(), "the daemon's resolv.conf has no name server for pods") {
		t.Error("the log does not say that there is no name server")
	}
	testbed.Eventually(t, "a pod may ask no name server", func() bool {
		_, err := pod.CallerUDP(testbed.Context(t), testbed.WorldIPv4+":53")
		return errors.Is(err, syscall.ECONNREFUSED)
	})
}

// wantUDP fails the test unless a server of ServeCallerUDP sees a datagram come from want, or if it must not pass,
// unless it is refused.
func wantUDP(t *testing.T, from *testbed.Host, address, want string, passes bool) {
	t.Helper()
	got, err := from.CallerUDP(testbed.Context(t), address)
	if passes && (err != nil || got != want) {
		t.Errorf("%s: UDP to %s: the server saw %q, %v; want %s", from.Name, address, got, err, want)
	}
	if !passes && !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%s: UDP to %s: got %q, %v; want it refused", from.Name, address, got, err)
	}
}

// wantPing fails the test unless an echo request is answered, or if it must not pass, unless it is refused.
func wantPing(t *testing.T, from *testbed.Host, ip string, passes bool) {
	t.Helper()
	network, request, reply := "ip4:icmp", []byte{8, 0, 0xf7, 0xfd, 0, 1, 0, 1}, byte(0)
	if strings.Contains(ip, ":") { // the kernel fills in the checksum
		network, request, reply = "ip6:ipv6-icmp", []byte{128, 0, 0, 0, 0, 1, 0, 1}, 129
	}
	err := askIP(testbed.Context(t), from, network, ip, request, func(answer []byte) bool { return answer[0] == reply })
	if passes && err != nil {
		t.Errorf("%s: echo request to %s: %v", from.Name, ip, err)
	}
	if !passes && !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%s: echo request to %s: got %v; want it refused", from.Name, ip, err)
	}
}

// wantSCTP fails the test unless the world says that it knows no SCTP, or if it must not pass, unless it is refused.
func wantSCTP(t *testing.T, from *testbed.Host, ip string, passes bool) {
	t.Helper()
	network, want := "ip4:132", syscall.ENOPROTOOPT
	if strings.Contains(ip, ":") { // where an unknown next header is a parameter problem
		network, want = "ip6:132", syscall.EPROTO
	}
	if !passes {
		want = syscall.ECONNREFUSED
	}
	// An INIT chunk, so that the kernel of the tests need not have SCTP. conntrack verifies the checksum (RFC 9260).
	packet := append([]byte{0x9c, 0x40, 0x13, 0x88, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 20}, testbed.RandomBytes(16)...)
	binary.LittleEndian.PutUint32(packet[8:], crc32.Checksum(packet, crc32.MakeTable(crc32.Castagnoli)))
	err := askIP(testbed.Context(t), from, network, ip, packet, func([]byte) bool { return false })
	if !errors.Is(err, want) {
		t.Errorf("%s: SCTP to %s: got %v; want %v", from.Name, ip, err, want)
	}
}

// askIP sends a packet until a packet that comes back is the answer, or an error.
func askIP(
	ctx context.Context, h *testbed.Host, network, ip string, packet []byte, isAnswer func([]byte) bool,
) error {
	c, err := h.Dial(ctx, network, ip)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing is left to be sent
	b := make([]byte, 1<<10)
	for ctx.Err() == nil {
		// As in CallerUDP.
		if _, err := c.Write(packet); err != nil && !errors.Is(err, syscall.EPERM) {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		n, _, err := c.(*net.IPConn).ReadFrom(b) // without the header of IPv4, which Read leaves
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return err
		case n > 0 && isAnswer(b[:n]):
			return nil
		}
	}
	return ctx.Err()
}
