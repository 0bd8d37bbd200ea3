package upstream

import (
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func TestProxyHeaderNamesBothEndsAndThePod(t *testing.T) {
	t.Parallel()
	const signature = "\x0d\x0a\x0d\x0a\x00\x0d\x0a\x51\x55\x49\x54\x0a"
	for name, tc := range map[string]struct {
		req  Request
		want string
	}{
		"IPv4": {
			request,
			signature + "\x21\x11\x00\x20" + "\x0a\x00\x00\x05" + "\xc0\x00\x02\x07" + "\x9c\x40" + "\x01\xbb" +
				"\xe0\x00\x02ci" + "\xe1\x00\x05web-0" + "\xe2\x00\x047d3f",
		},
		"IPv6, inbound": {
			Request{
				Destination: netip.MustParseAddrPort("[2001:db8::7]:80"),
				Source:      netip.MustParseAddrPort("[fd00::5]:1"),
				Pod:         attach.Pod{Name: "web-0"},
				Inbound:     true,
			},
			signature + "\x21\x21\x00\x36" +
				"\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x05" +
				"\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x07" + "\x00\x01" + "\x00\x50" +
				"\xe1\x00\x05web-0" + "\xe3\x00\x07inbound",
		},
		"without source and pod": {
			Request{Destination: netip.MustParseAddrPort("192.0.2.7:443")},
			signature + "\x21\x11\x00\x0c" + "\x00\x00\x00\x00" + "\xc0\x00\x02\x07" + "\x00\x00" + "\x01\xbb",
		},
		"without a source of IPv6": {
			Request{Destination: netip.MustParseAddrPort("[2001:db8::7]:443")},
			signature + "\x21\x21\x00\x24" + strings.Repeat("\x00", 16) +
				"\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x07" + "\x00\x00" + "\x01\xbb",
		},
		"a name that is too long": {
			Request{
				Destination: netip.MustParseAddrPort("192.0.2.7:443"),
				Pod:         attach.Pod{Name: strings.Repeat("x", 70_000)},
			},
			signature + "\x21\x11\x01\x0e" + "\x00\x00\x00\x00" + "\xc0\x00\x02\x07" + "\x00\x00" + "\x01\xbb" +
				"\xe1\x00\xff" + strings.Repeat("x", 255),
		},
	} {
		checkSent(t, name, config.ProxyV2, tc.req, tc.want, func(*net.TCPConn) string { return "" })
	}
}

// TestIdleConnectionThatHasEndedIsNotUsed by a protocol without an answer: the app's bytes would be lost.
func TestIdleConnectionThatHasEndedIsNotUsed(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*net.TCPConn) error{
		"ended": (*net.TCPConn).CloseWrite,
		"reset": func(c *net.TCPConn) error {
			resetConn(c)
			return c.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startProxy(t, "127.0.0.1:0", stayOpen)
			u := newUpstream(p.Addr().String(), config.ProxyV2)
			far, near := testbed.ConnPair(t)
			u.swapIdle(newIdleConn(near)) // nothing watches it: its end has not been noticed yet
			if err := end(far); err != nil {
				t.Fatal(err)
			}
			testbed.Eventually(t, "the end has arrived", func() bool { return isReadable(near) })
			conn, err := u.Dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close() //nolint:errcheck // nothing was sent on it
			if conn.LocalAddr().String() == near.LocalAddr().String() {
				t.Error("the connection that has ended was used")
			}
		})
	}
}

// TestIdleConnectionIsTakenOnce, can be read from then on, and is replaced by another one.
func TestIdleConnectionIsTakenOnce(t *testing.T) {
	t.Parallel()
	u := newUpstream(freeAddress(), config.ProxyV2)
	startProxy(t, u.name, func(conn *net.TCPConn) {
		if _, err := io.ReadFull(conn, make([]byte, 48)); err == nil { // the header of request
			_, _ = io.WriteString(conn, "hello")
		}
		stayOpen(conn)
	})
	run(t, u)
	if err := u.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for range 10 {
		conn, _, err := dialAndAsk(t.Context(), u, request)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close() //nolint:errcheck // nothing is left to send
		if seen[conn.LocalAddr().String()] {
			t.Errorf("the connection from %s was taken twice", conn.LocalAddr())
		}
		seen[conn.LocalAddr().String()] = true
		if err := conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		testbed.CheckReads(t, "the relay", conn, "hello")
	}
}

// TestHeaderTravelsWithTheFirstBytes, in one segment, if they follow at once: the proxy wakes once.
func TestHeaderTravelsWithTheFirstBytes(t *testing.T) {
	t.Parallel()
	segments := make(chan uint32)
	p := startProxy(t, "127.0.0.1:0", func(conn *net.TCPConn) {
		_, _ = io.ReadFull(conn, make([]byte, 48+5)) // fails at the end of the test
		var info *unix.TCPInfo
		err := socket.Control(conn, func(fd int) (err error) {
			info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			return err
		})
		if err != nil {
			t.Error(err)
		}
		segments <- info.Data_segs_in
	})
	u := newUpstream(p.Addr().String(), config.ProxyV2)
	req := request
	for _, more := range []bool{false, true} {
		req.More = func() bool { return more }
		together := 0
		for range 20 { // on a busy machine they may follow too late
			conn, _, err := dialAndAsk(t.Context(), u, req)
			if err != nil {
				t.Fatal(err)
			}
			testbed.Send(t, conn, "hello")
			if <-segments == 1 {
				together++
			}
			_ = conn.Close() // everything was read
		}
		if more != (together > 0) {
			t.Errorf("more %t: %d of 20 headers came together with the first bytes", more, together)
		}
	}
}

// TestProbeByProxyHeaderNeedsTheConnection: there is no answer that could show that the upstream serves.
func TestProbeByProxyHeaderNeedsTheConnection(t *testing.T) {
	t.Parallel()
	c := config.Upstream{Address: freeAddress(), Protocol: config.ProxyV2, ProbeInterval: 10 * time.Millisecond}
	u := newUpstreamOf(c)
	connects := make(chan bool, 1)
	connects <- true
	startProxy(t, c.Address, func(conn *net.TCPConn) {
		header := make([]byte, 28)
		if _, err := io.ReadFull(conn, header); err != nil {
			return // the idle connection
		}
		works := <-connects
		connects <- works
		if works {
			ip, _ := netip.AddrFromSlice(header[20:24])
			to := netip.AddrPortFrom(ip, uint16(header[26])<<8|uint16(header[27]))
			if server, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(to)); err == nil {
				_ = server.Close()
			}
		}
		stayOpen(conn)
	})
	run(t, u)
	for _, works := range []bool{true, false, true} {
		<-connects
		connects <- works
		testbed.Eventually(t, "the status follows the connections that the upstream makes", func() bool {
			s := u.Status()
			return s.Ready == works && (works || strings.Contains(s.Reason, "fails a probe"))
		})
	}
}
