package capture

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestUDP: UDP passes through, except QUIC, which is refused at once so that clients fall back to TCP.
func TestUDP(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.StartDaemon()
			for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
				for _, port := range []string{"53", "443"} {
					n.World.ServeCallerUDP(net.JoinHostPort(ip, port))
				}
			}
			pod := f.AddPod(t, n, "udp", nil)
			allowed := f.AddPod(t, n, "quic", n.Annotated(map[string]string{"sluice.dev/quic": "allow"}))
			nested := pod.Nested()
			for _, c := range []struct {
				name    string
				from    *testbed.Host
				world   string
				caller  string
				refused bool
				port    string
			}{
				{"DNS over IPv4", pod.Host, testbed.WorldIPv4, pod.IPv4, false, "53"},
				{"DNS over IPv6", pod.Host, testbed.WorldIPv6, pod.IPv6, false, "53"},
				{"DNS of a nested container", nested, testbed.WorldIPv4, pod.IPv4, false, "53"},
				{"QUIC over IPv4", pod.Host, testbed.WorldIPv4, "", true, "443"},
				{"QUIC over IPv6", pod.Host, testbed.WorldIPv6, "", true, "443"},
				{"QUIC of a nested container over IPv4", nested, testbed.WorldIPv4, "", true, "443"},
				{"QUIC of a nested container over IPv6", nested, testbed.WorldIPv6, "", true, "443"},
				{"QUIC allowed over IPv4", allowed.Host, testbed.WorldIPv4, allowed.IPv4, false, "443"},
				{"QUIC allowed over IPv6", allowed.Host, testbed.WorldIPv6, allowed.IPv6, false, "443"},
			} {
				t.Run(c.name, func(t *testing.T) {
					caller, err := c.from.CallerUDP(testbed.Context(t), net.JoinHostPort(c.world, c.port))
					if c.refused && !errors.Is(err, syscall.ECONNREFUSED) {
						t.Errorf("got %q, %v; want it refused", caller, err)
					}
					if !c.refused && (err != nil || caller != c.caller) {
						t.Errorf("the server saw %q, %v; want %s", caller, err, c.caller)
					}
				})
			}
		})
	}
}
