package capture

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

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
					echoUDP(t, n.World, net.JoinHostPort(ip, port))
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
					caller, err := askUDP(testbed.Context(t), c.from, net.JoinHostPort(c.world, c.port))
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

// echoUDP answers each datagram with the address that it comes from.
func echoUDP(t *testing.T, h *testbed.Host, address string) {
	t.Helper()
	var s net.PacketConn
	if err := h.Do(func() (err error) {
		s, err = net.ListenPacket("udp", address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	go func() {
		b := make([]byte, 1<<10)
		for {
			_, from, err := s.ReadFrom(b)
			if err != nil {
				return // closed: the test has ended
			}
			_, _ = s.WriteTo([]byte(testbed.IPOf(from)), from) // the client asks again if it fails
		}
	}()
}

// askUDP asks until it gets an answer or a refusal.
func askUDP(ctx context.Context, h *testbed.Host, address string) (string, error) {
	c, err := h.Dial(ctx, "udp", address)
	if err != nil {
		return "", err
	}
	defer c.Close() //nolint:errcheck // one datagram each way
	b := make([]byte, 1<<10)
	for {
		// A datagram that is rejected on its way out of this very netns fails with EPERM; the next call says why.
		if _, err := io.WriteString(c, "?"); err != nil && !errors.Is(err, syscall.EPERM) {
			return "", err
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return "", err
		}
		n, err := c.Read(b)
		if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() == nil {
			continue
		}
		return string(b[:n]), err
	}
}
