package testbed

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// ServeCallerUDP answers every datagram with the IP that it comes from, until the test ends.
func (h *Host) ServeCallerUDP(address string) {
	h.tb.Helper()
	var s net.PacketConn
	if err := h.Do(func() (err error) {
		s, err = net.ListenPacket("udp", address)
		return err
	}); err != nil {
		h.tb.Fatalf("listening on %s in %s: %v", address, h.Name, err)
	}
	h.tb.Cleanup(func() { _ = s.Close() })
	go func() {
		b := make([]byte, 1<<10)
		for {
			_, from, err := s.ReadFrom(b)
			if err != nil {
				return // closed: the test has ended
			}
			_, _ = s.WriteTo([]byte(IPOf(from)), from) // the client asks again if it fails
		}
	}()
}

// CallerUDP sends datagrams from the netns to a server of ServeCallerUDP until it gets an answer or a refusal.
func (h *Host) CallerUDP(ctx context.Context, address string) (string, error) {
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
