package mitmproxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// talk is one side of a connection.
type talk struct {
	net.Conn              // TCP, or the TLS on it
	tcp      *net.TCPConn // with a deadline
	config   *tls.Config
	server   bool
}

// script is all that one side of a connection says and expects to hear, step by step.
type script []func(*talk) error

func (s script) run(c *talk) error {
	for i, step := range s {
		if err := step(c); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return nil
}

// as runs the script as a client in h.
func (s script) as(ctx context.Context, h *testbed.Host, address string, config *tls.Config) error {
	c, err := h.Open(ctx, address)
	if err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	defer c.Close() //nolint:errcheck // the script has heard all that it wants
	return s.run(&talk{Conn: c, tcp: c, config: config})
}

// serve runs the script for each connection to an address of h. The channel gets the outcome of the first.
func (s script) serve(ctx context.Context, h *testbed.Host, address string, config *tls.Config) <-chan error {
	outcome := make(chan error, 1)
	deadline, _ := ctx.Deadline()
	h.Serve(address, func(c net.Conn) {
		tcp := c.(*net.TCPConn)
		err := errors.Join(c.SetDeadline(deadline), s.run(&talk{Conn: c, tcp: tcp, config: config, server: true}))
		select {
		case outcome <- err:
		default: // mitmproxy has connected once more
		}
	})
	return outcome
}

// say sends text.
func say(text string) func(*talk) error {
	return func(c *talk) error {
		if _, err := io.WriteString(c, text); err != nil {
			return fmt.Errorf("sending %q: %w", text, err)
		}
		return nil
	}
}

// hear reads text, and no more.
func hear(text string) func(*talk) error {
	return func(c *talk) error {
		got := make([]byte, len(text))
		n, err := io.ReadFull(c, got)
		if err != nil || string(got) != text {
			return fmt.Errorf("got %q, %w; want %q", got[:n], err, text)
		}
		return nil
	}
}

// hearEnd reads the end of all data.
func hearEnd(c *talk) error { return hearError(c, io.EOF) }

// hearReset reads a reset.
func hearReset(c *talk) error { return hearError(c, unix.ECONNRESET) }

func hearError(c *talk, want error) error {
	b := make([]byte, 1<<10)
	if n, err := c.Read(b); n > 0 || !errors.Is(err, want) {
		return fmt.Errorf("got %q, %w; want %w", b[:n], err, want)
	}
	return nil
}

// hearGone reads the end of the connection, by a reset or without.
func hearGone(c *talk) error {
	b := make([]byte, 1<<10)
	if n, err := c.Read(b); n > 0 || !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		return fmt.Errorf("got %q, %w; want the end or a reset", b[:n], err)
	}
	return nil
}

// endWriting half-closes the connection.
func endWriting(c *talk) error {
	if err := c.Conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return fmt.Errorf("half-closing: %w", err)
	}
	return nil
}

// reset ends the connection with a reset.
func reset(c *talk) error {
	if err := errors.Join(c.tcp.SetLinger(0), c.tcp.Close()); err != nil {
		return fmt.Errorf("resetting: %w", err)
	}
	return nil
}

// startTLS goes on with TLS.
func startTLS(c *talk) error {
	var conn *tls.Conn
	if c.server {
		conn = tls.Server(c.tcp, c.config)
	} else {
		conn = tls.Client(c.tcp, c.config)
	}
	if err := conn.Handshake(); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	c.Conn = conn
	return nil
}
