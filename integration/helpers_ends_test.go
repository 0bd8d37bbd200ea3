package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// talk is an app's connection to the echo service, and what it said there that has not come back yet.
type talk struct {
	*net.TCPConn
	said []byte
}

// open connects from h for as long as ctx lasts.
func open(ctx context.Context, h *testbed.Host, address string) (*net.TCPConn, error) {
	c, err := h.Dial(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	return c.(*net.TCPConn), c.SetDeadline(deadline)
}

// mustOpen is open for the length of the test.
func mustOpen(t *testing.T, h *testbed.Host, address string) *net.TCPConn {
	t.Helper()
	c, err := open(patience(t), h, address)
	if err != nil {
		t.Fatalf("connecting to %s: %v", address, err)
	}
	t.Cleanup(func() { _ = c.Close() }) // as the test left it
	return c
}

// startTalks opens count connections from h, over both families in turn, and says size bytes on each.
func startTalks(t *testing.T, h *testbed.Host, count, size int) []*talk {
	t.Helper()
	talks := make([]*talk, count)
	forEach(t, talks, func(i int) error {
		c, err := open(patience(t), h, echoAddresses[i%2])
		if err != nil {
			return fmt.Errorf("connecting: %w", err)
		}
		t.Cleanup(func() { _ = c.Close() }) // as the test left it
		talks[i] = &talk{TCPConn: c}
		return talks[i].say(random(size))
	})
	return talks
}

// forEach does something for every talk at a time.
func forEach(t *testing.T, talks []*talk, do func(i int) error) {
	t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, len(talks))
	for i := range talks {
		wg.Go(func() { errs[i] = do(i) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// say returns when the kernel has all of it.
func (c *talk) say(b []byte) error {
	c.said = append(c.said, b...)
	_, err := c.Write(b)
	return err
}

// hear wants back what was said.
func (c *talk) hear() error {
	got := make([]byte, len(c.said))
	if _, err := io.ReadFull(c, got); err != nil {
		return fmt.Errorf("reading the echo: %w", err)
	}
	if !bytes.Equal(got, c.said) {
		return errors.New("the echo is not what was said")
	}
	c.said = nil
	return nil
}

func hearAll(t *testing.T, talks []*talk) {
	t.Helper()
	forEach(t, talks, func(i int) error { return talks[i].hear() })
}

// wantAllReset fails the test unless every connection ends with a reset, whatever came before that.
func wantAllReset(t *testing.T, talks []*talk) {
	t.Helper()
	for _, c := range talks {
		if _, err := io.Copy(io.Discard, c); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: got %v; want a reset", c.RemoteAddr(), err)
		}
	}
}

// accepted serves address in the world and gives every connection away with a deadline.
func accepted(t *testing.T, n *testbed.Node, address string) <-chan *net.TCPConn {
	t.Helper()
	conns := make(chan *net.TCPConn)
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })
	n.World.Serve(address, func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(time.Minute)) // what fails is missed
		select {
		case conns <- c.(*net.TCPConn):
			<-done
		case <-done:
		}
	})
	return conns
}
