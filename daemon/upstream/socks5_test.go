package upstream

import (
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/daemon/config"
)

const (
	boundIPv4 = "\x01\x7f\x00\x00\x01\x1f\x90"
	boundIPv6 = "\x04\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x1f\x90"
	boundName = "\x03\x05proxy\x1f\x90"
)

// socks makes a handler that answers the greeting with method, reads a request of n bytes, sends reply, and calls then.
// It sends the greeting and the request to asked, unless that is nil.
func socks(method string, n int, reply string, asked chan<- string, then func(*net.TCPConn)) func(*net.TCPConn) {
	return func(conn *net.TCPConn) {
		all := make([]byte, 3+n)
		if _, err := io.ReadFull(conn, all[:3]); err != nil {
			return
		}
		_, _ = io.WriteString(conn, method)
		if _, err := io.ReadFull(conn, all[3:]); err != nil {
			then(conn)
			return
		}
		if asked != nil {
			asked <- string(all)
		}
		_, _ = io.WriteString(conn, reply)
		then(conn)
	}
}

func TestSOCKS5RequestNamesTheDestination(t *testing.T) {
	t.Parallel()
	for destination, want := range map[string]string{
		"192.0.2.7:443": "\x05\x01\x00" + "\x05\x01\x00\x01\xc0\x00\x02\x07\x01\xbb",
		"[2001:db8::7]:80": "\x05\x01\x00" + "\x05\x01\x00\x04" +
			"\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x07" + "\x00\x50",
		"203.0.113.9:65535": "\x05\x01\x00" + "\x05\x01\x00\x01\xcb\x00\x71\x09\xff\xff",
	} {
		asked := make(chan string, 1)
		more := make(chan string, 1)
		readAll := func(c *net.TCPConn) {
			b, _ := io.ReadAll(c)
			more <- string(b)
		}
		handle := socks("\x05\x00", len(want)-3, "\x05\x00\x00"+boundIPv4, asked, readAll)
		p := startProxy(t, "127.0.0.1:0", handle)
		req := request
		req.Destination = netip.MustParseAddrPort(destination)
		conn, first, err := ask(t, p.Addr().String(), config.SOCKS5, req)
		if err != nil || len(first) > 0 {
			t.Fatalf("%s: got %q, %v", destination, first, err)
		}
		_ = conn.Close()
		if diff := cmp.Diff(want, <-asked+<-more); diff != "" {
			t.Errorf("%s (-want +got):\n%s", destination, diff)
		}
	}
}

func TestSOCKS5KeepsDataAfterTheReply(t *testing.T) {
	t.Parallel()
	for name, bound := range map[string]string{
		"IPv4": boundIPv4, "IPv6": boundIPv6, "name": boundName, "an empty name": "\x03\x00\x1f\x90",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startProxy(t, "127.0.0.1:0", socks("\x05\x00", 10, "\x05\x00\x00"+bound+"SSH-2.0-x\r\n", nil, hangUp))
			conn, first, err := ask(t, p.Addr().String(), config.SOCKS5, request)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := rest(t, conn, first), "SSH-2.0-x\r\n"; got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

func TestSOCKS5RepliesAreClassified(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, method, reply string
		then                func(*net.TCPConn)
		want                error
		says                string
	}{
		{"0, succeeded", "\x05\x00", "\x05\x00\x00" + boundIPv4, hangUp, nil, ""},
		{"1, general failure", "\x05\x00", "\x05\x01\x00" + boundIPv4, hangUp, ErrLate, "reply 1"},
		{"2, not allowed", "\x05\x00", "\x05\x02\x00" + boundIPv4, hangUp, ErrUnreachable, "reply 2"},
		{"3, network unreachable", "\x05\x00", "\x05\x03\x00" + boundIPv4, stayOpen, ErrUnreachable, "reply 3"},
		{"4, host unreachable", "\x05\x00", "\x05\x04\x00" + boundIPv4, hangUp, ErrUnreachable, "reply 4"},
		{"5, refused", "\x05\x00", "\x05\x05\x00" + boundIPv4, hangUp, ErrUnreachable, "reply 5"},
		{"6, TTL expired", "\x05\x00", "\x05\x06\x00" + boundIPv4, hangUp, ErrUnreachable, "reply 6"},
		{"7, command not supported", "\x05\x00", "\x05\x07\x00" + boundIPv4, hangUp, ErrMisconfigured, "reply 7"},
		{"8, address type not supported", "\x05\x00", "\x05\x08\x00" + boundIPv4, hangUp, ErrUnreachable, "reply 8"},
		{"9, unassigned", "\x05\x00", "\x05\x09\x00" + boundIPv4, hangUp, ErrMisconfigured, "reply 9"},
		{"no acceptable method", "\x05\xff", "", hangUp, ErrMisconfigured, "user and a password"},
		{"a method that was not offered", "\x05\x02", "", hangUp, ErrMisconfigured, "0x2"},
		{"SOCKS4", "\x04\x00", "", hangUp, ErrMisconfigured, "not SOCKS5"},
		{"an HTTP proxy", "HTTP/1.1 400 Bad Request\r\n\r\n", "", hangUp, ErrMisconfigured, "not SOCKS5"},
		{
			"another version in the reply", "\x05\x00", "\x04\x00\x00" + boundIPv4, hangUp,
			ErrMisconfigured, "not SOCKS5",
		},
		{
			"an unknown type of address", "\x05\x00", "\x05\x00\x00\x02abcd\x00\x01", hangUp,
			ErrMisconfigured, "address type 2",
		},
		{"closed before the method", "", "", hangUp, ErrLate, "ended before the answer"},
		{"closed within the method", "\x05", "", hangUp, ErrLate, "ended before the answer"},
		{"closed before the reply", "\x05\x00", "", hangUp, ErrLate, "ended before the answer"},
		{"closed within the reply", "\x05\x00", "\x05\x00", hangUp, ErrLate, "ended before the answer"},
		{
			"closed within the bound address", "\x05\x00", "\x05\x00\x00" + boundIPv6[:9], hangUp,
			ErrLate, "ended within the answer",
		},
		{"closed before the bound name", "\x05\x00", "\x05\x00\x00\x03", hangUp, ErrLate, "ended within the answer"},
		{"reset before the method", "", "", resetConn, ErrLate, "ended before the answer"},
		{"reset before the reply", "\x05\x00", "", resetConn, ErrLate, "ended before the answer"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := 10
			if len(tc.method) < 2 {
				n = 0 // no request follows
			}
			p := startProxy(t, "127.0.0.1:0", socks(tc.method, n, tc.reply, nil, tc.then))
			conn, _, err := ask(t, p.Addr().String(), config.SOCKS5, request)
			checkAnswer(t, conn, err, tc.want, tc.says)
		})
	}
}

func TestHalfCloseDependsOnTheProtocol(t *testing.T) {
	t.Parallel()
	for protocol, want := range map[config.Protocol]bool{
		config.Connect: false, config.SOCKS5: true, config.ProxyV2: true,
	} {
		if got := newUpstream("127.0.0.1:1", protocol).HalfClose(); got != want {
			t.Errorf("%s: got %t, want %t", protocol, got, want)
		}
	}
}
