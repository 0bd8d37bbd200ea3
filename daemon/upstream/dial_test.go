package upstream

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// TestConnect knows within the node whether a connection is accepted or refused.
func TestConnect(t *testing.T) {
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
		conn, err := connect(t.Context(), at)
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
		if conn, err := connect(t.Context(), at); conn != nil || !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s, closed: got %v, %v; want ECONNREFUSED", at, conn, err)
		}
	}
}

// TestConnectWaits for an upstream whose backlog is full: its kernel drops the first SYN.
func TestConnectWaits(t *testing.T) {
	t.Parallel()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd) //nolint:errcheck // it is a listener
	err = errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0))
	if err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	at := socket.AddrPort(name)
	first, err := connect(t.Context(), at) // fills the backlog
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close() //nolint:errcheck // nothing was written
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if conn, err := connect(ctx, at); conn != nil || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, %v; want the end of the wait", conn, err)
	}
	accepted := make(chan error)
	go func() {
		for range 2 {
			conn, _, err := unix.Accept(fd)
			if err == nil {
				err = unix.Close(conn)
			}
			accepted <- err
		}
	}()
	second, err := connect(t.Context(), at)
	if err != nil {
		t.Fatal(err)
	}
	_ = second.Close() // nothing was written
	for range 2 {
		if err := <-accepted; err != nil {
			t.Error(err)
		}
	}
}

// TestConnectionThatIsReset: a connection that the other end has reset at once is an error, as with net.Dialer. It has
// no address of the other end.
func TestConnectionThatIsReset(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // ends the goroutine
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.(*net.TCPConn).SetLinger(0) // fails only if closed
			_ = c.Close()                     // a reset
		}
	}()
	at := l.Addr().(*net.TCPAddr).AddrPort()
	resets := 0
	for range 1000 {
		conn, err := connect(t.Context(), at)
		switch {
		case errors.Is(err, unix.ECONNRESET):
			resets++
		case err != nil:
			t.Fatal(err)
		case conn.RemoteAddr() == nil:
			t.Fatal("the connection has no address of the other end")
		default:
			_ = conn.Close() // nothing was written
		}
	}
	t.Logf("%d of 1000 were reset before they were returned", resets)
}
