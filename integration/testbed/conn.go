package testbed

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// connTimeout bounds a test's reads and writes on one connection.
const connTimeout = time.Minute

// ConnPair makes a TCP connection on loopback and returns both its ends. far has a deadline, for the test to use; near
// has none, for the code under test.
func ConnPair(tb testing.TB) (far, near *net.TCPConn) {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // the only connection is accepted
	f, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = f.Close() })
	n, err := l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = n.Close() })
	if err := f.SetDeadline(time.Now().Add(connTimeout)); err != nil {
		tb.Fatal(err)
	}
	return f.(*net.TCPConn), n.(*net.TCPConn)
}

// Send writes s to c. A failure ends the test.
func Send(tb testing.TB, c io.Writer, s string) {
	tb.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		tb.Fatalf("sending %q: %v", s, err)
	}
}

// CloseWrite half-closes c: its peer reads the end of the data. A failure ends the test.
func CloseWrite(tb testing.TB, c *net.TCPConn) {
	tb.Helper()
	if err := c.CloseWrite(); err != nil {
		tb.Fatalf("half-closing: %v", err)
	}
}

// CheckReads checks that c, which name describes, reads want.
func CheckReads(tb testing.TB, name string, c io.Reader, want string) {
	tb.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		tb.Errorf("%s reads: got %q, %v; want %q", name, got, err, want)
	}
}

// CheckReadFails checks that c, which name describes, reads no more data but the error want: io.EOF after a half-close,
// ECONNRESET after a reset.
func CheckReadFails(tb testing.TB, name string, c io.Reader, want error) {
	tb.Helper()
	if n, err := c.Read(make([]byte, 1)); n > 0 || !errors.Is(err, want) {
		tb.Errorf("%s reads: got %d bytes, %v; want %v", name, n, err, want)
	}
}
