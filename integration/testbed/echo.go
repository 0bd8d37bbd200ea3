package testbed

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// EchoPort is the port of the world's echo service.
const EchoPort = "7"

// EchoAddresses are the addresses of the world's echo service: IPv4, then IPv6.
var EchoAddresses = []string{net.JoinHostPort(WorldIPv4, EchoPort), net.JoinHostPort(WorldIPv6, EchoPort)}

// ServeEcho serves echo in the world and counts the connections.
func ServeEcho(n *Node) *atomic.Int64 {
	n.tb.Helper()
	var seen atomic.Int64
	for _, a := range EchoAddresses {
		n.World.Serve(a, func(c net.Conn) {
			seen.Add(1)
			_, _ = io.Copy(c, c) // the client notices an error
		})
	}
	return &seen
}

// Context is a context of one minute, for operations that take moments.
func Context(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := Minute()
	t.Cleanup(cancel)
	return ctx
}

// Minute is Context for a test that makes so many that it ends each itself.
func Minute() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Minute)
}

// ErrWrongEcho is the error of an echo that differs from the bytes that were sent.
var ErrWrongEcho = errors.New("the echo is not what was sent")

// Echo connects, sends payload, and reads all of it back.
func Echo(ctx context.Context, h *Host, address string, payload []byte) error {
	c, err := h.Open(ctx, address)
	if err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	defer c.Close() //nolint:errcheck // all has been read
	var wg sync.WaitGroup
	defer wg.Wait()
	var wrote error
	wg.Go(func() { _, wrote = c.Write(payload) }) // bytes that are lost are missed below
	got := make([]byte, len(payload))
	if _, err := io.ReadFull(c, got); err != nil {
		wg.Wait() // the kernel reports a reset once, and to one of the two
		return fmt.Errorf("reading the echo: %w", errors.Join(wrote, err))
	}
	if !bytes.Equal(got, payload) {
		return ErrWrongEcho
	}
	return nil
}

// Echoes runs count echoes of size bytes from each host at the same time, over IPv4 and IPv6 in turn, within a minute.
// The channel gets the outcome of each.
func Echoes(t *testing.T, count, size int, hosts ...*Host) <-chan error {
	t.Helper()
	ctx, payload := Context(t), RandomBytes(size)
	outcome := make(chan error, count*len(hosts))
	for _, h := range hosts {
		for i := range count {
			go func() { outcome <- Echo(ctx, h, EchoAddresses[i%2], payload) }()
		}
	}
	return outcome
}

// EchoAll runs such echoes and ends the test unless all of them are served.
func EchoAll(t *testing.T, count, size int, hosts ...*Host) {
	t.Helper()
	WantServed(t, Echoes(t, count, size, hosts...), count*len(hosts))
}

// WantServed ends the test unless the next n outcomes are without an error.
func WantServed(t *testing.T, outcome <-chan error, n int) {
	t.Helper()
	for i := range n {
		if err := <-outcome; err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
}

// WantPending ends the test if a connection ends within a moment: those that wait must neither fail nor be served.
func WantPending(t *testing.T, outcome <-chan error) {
	t.Helper()
	select {
	case err := <-outcome:
		t.Fatalf("a connection has ended already: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
}

// RandomBytes are n random bytes.
func RandomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return b
}

// Open connects from the netns; ctx bounds the connection too.
func (h *Host) Open(ctx context.Context, address string) (*net.TCPConn, error) {
	c, err := h.Dial(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	return c.(*net.TCPConn), c.SetDeadline(deadline)
}

// MustOpen connects from h until the end of the test.
func MustOpen(t *testing.T, h *Host, address string) *net.TCPConn {
	t.Helper()
	c, err := h.Open(Context(t), address)
	if err != nil {
		t.Fatalf("connecting to %s: %v", address, err)
	}
	t.Cleanup(func() { _ = c.Close() }) // as the test left it
	return c
}

// Talk is a connection to the echo service, and the bytes sent on it that have not come back yet.
type Talk struct {
	*net.TCPConn
	sent []byte
}

// StartTalks opens count connections from h, over IPv4 and IPv6 in turn, and sends size bytes on each.
func StartTalks(t *testing.T, h *Host, count, size int) []*Talk {
	t.Helper()
	talks := make([]*Talk, count)
	ForEach(t, count, func(i int) error {
		c, err := h.Open(Context(t), EchoAddresses[i%2])
		if err != nil {
			return fmt.Errorf("connecting: %w", err)
		}
		t.Cleanup(func() { _ = c.Close() }) // as the test left it
		talks[i] = &Talk{TCPConn: c}
		return talks[i].Send(RandomBytes(size))
	})
	return talks
}

// ForEach calls do for 0 to count-1 at the same time. An error ends the test.
func ForEach(t *testing.T, count int, do func(i int) error) {
	t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, count)
	for i := range count {
		wg.Go(func() { errs[i] = do(i) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// Send returns when the kernel has all of b.
func (c *Talk) Send(b []byte) error {
	c.sent = append(c.sent, b...)
	_, err := c.Write(b)
	return err
}

// Receive reads back all that was sent.
func (c *Talk) Receive() error {
	got := make([]byte, len(c.sent))
	if _, err := io.ReadFull(c, got); err != nil {
		return fmt.Errorf("reading the echo: %w", err)
	}
	if !bytes.Equal(got, c.sent) {
		return ErrWrongEcho
	}
	c.sent = nil
	return nil
}

// WantEchoes ends the test unless every connection gets back all that was sent.
func WantEchoes(t *testing.T, talks []*Talk) {
	t.Helper()
	ForEach(t, len(talks), func(i int) error { return talks[i].Receive() })
}

// WantAllReset fails the test unless every connection ends with a reset, after any number of bytes.
func WantAllReset(t *testing.T, talks []*Talk) {
	t.Helper()
	for _, c := range talks {
		if _, err := io.Copy(io.Discard, c); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: got %v; want a reset", c.RemoteAddr(), err)
		}
	}
}

// WantEcho fails the test unless text comes back on an open connection.
func WantEcho(t *testing.T, c net.Conn, text string) {
	t.Helper()
	got := make([]byte, len(text))
	_, err := io.WriteString(c, text)
	if err == nil {
		_, err = io.ReadFull(c, got)
	}
	if err != nil || string(got) != text {
		t.Errorf("%s: the open connection echoes %q, %v", text, got, err)
	}
}

// Accepted serves address in the world and sends each connection to the channel, with a deadline of a minute.
func Accepted(t *testing.T, n *Node, address string) <-chan *net.TCPConn {
	t.Helper()
	conns := make(chan *net.TCPConn)
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })
	n.World.Serve(address, func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(time.Minute)) // a connection without one shows in the test
		select {
		case conns <- c.(*net.TCPConn):
			<-done
		case <-done:
		}
	})
	return conns
}

// UploadTooMuch uploads to a server of AnswerEarly until that fails, and fails itself unless the answer can be read to
// its end.
func UploadTooMuch(ctx context.Context, h *Host, address, answer string) error {
	c, err := h.Open(ctx, address)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // read to its end
	_, err = io.Copy(c, endless{})
	if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		return fmt.Errorf("the upload ended with %w; want a reset", err)
	}
	got, err := io.ReadAll(c)
	if string(got) != answer {
		return errors.Join(fmt.Errorf("got %d of %d bytes of the answer", len(got), len(answer)), err)
	}
	return nil
}

// endless can be read for ever.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }
