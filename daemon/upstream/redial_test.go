package upstream

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// TestConnectAtOnce knows within the node whether a connection is accepted or refused.
func TestConnectAtOnce(t *testing.T) {
	t.Parallel()
	for _, host := range []string{"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"} {
		l, err := net.Listen("tcp", host+":0")
		if err != nil {
			t.Fatal(err)
		}
		at := netip.MustParseAddrPort(l.Addr().String())
		if host == "[::ffff:127.0.0.1]" {
			at = netip.AddrPortFrom(netip.MustParseAddr("::ffff:127.0.0.1"), at.Port())
		}
		conn, err := connectAtOnce(at)
		if conn == nil || err != nil {
			t.Fatalf("%s: got %v, %v; want a connection", at, conn, err)
		}
		served, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.WriteString(conn, "hello")
		got := make([]byte, 5)
		if err == nil {
			_, err = io.ReadFull(served, got)
		}
		if err != nil || string(got) != "hello" {
			t.Errorf("%s: got %q, %v", at, got, err)
		}
		for _, c := range []io.Closer{conn, served, l} {
			_ = c.Close() // everything was read
		}
		if conn, err := connectAtOnce(at); conn != nil || !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s, closed: got %v, %v; want ECONNREFUSED", at, conn, err)
		}
	}
}
