package socket

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

// pair is a TCP connection on loopback, by both its ends.
func pair(t *testing.T) (far, near *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // of no more use
	f, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	n, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{f, n} {
		t.Cleanup(func() { _ = c.Close() })
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	_ = n.SetDeadline(time.Time{})
	return f.(*net.TCPConn), n.(*net.TCPConn)
}

// TestIsResetTellsAResetFromAHalfClose: a peer that has only shut down its sending side has not reset the connection.
func TestIsResetTellsAResetFromAHalfClose(t *testing.T) {
	t.Parallel()
	far, near := pair(t)
	if IsReset(near) {
		t.Error("open connection: got reset")
	}
	send(t, far, "unread")
	shut(t, far)
	checkReads(t, "near", near, "unread")
	checkEnd(t, "near", near, io.EOF)
	if IsReset(near) {
		t.Error("half-closed connection: got reset")
	}
	Reset(far)
	testbed.Eventually(t, "the connection is reset", func() bool { return IsReset(near) })
	_ = near.Close()
	if !IsReset(near) {
		t.Error("closed connection: got not reset")
	}
}

func send(t *testing.T, c *net.TCPConn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
}

func shut(t *testing.T, c *net.TCPConn) {
	t.Helper()
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
}

func checkReads(t *testing.T, who string, c *net.TCPConn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Errorf("%s reads: got %q, %v; want %q", who, got, err, want)
	}
}

func checkEnd(t *testing.T, who string, c *net.TCPConn, want error) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n > 0 || !errors.Is(err, want) {
		t.Errorf("%s reads: got %d bytes, %v; want %v", who, n, err, want)
	}
}
