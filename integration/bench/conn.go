package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// A message from a client begins with the operation that the client asks for. The values are not letters, because
// mitmproxy could take letters for HTTP.
const (
	opEcho     byte = 1 + iota // the server sends the message back
	opDownload                 // the server sends as many bytes as the message says
	opUpload                   // the server reads as many bytes as the message says, then sends one byte
)

const (
	messageSize = 64
	chunk       = 256 << 10
)

func message(op byte, bytes int64) []byte {
	m := make([]byte, messageSize)
	m[0] = op
	binary.BigEndian.PutUint64(m[8:], uint64(bytes))
	return m
}

// serve is the server that all connections of the benchmark lead to.
func serve(c net.Conn) {
	m := make([]byte, messageSize)
	for {
		if _, err := io.ReadFull(c, m); err != nil {
			return // the client has closed the connection
		}
		n := int64(binary.BigEndian.Uint64(m[8:]))
		var err error
		switch m[0] {
		case opEcho:
			_, err = c.Write(m)
		case opDownload:
			err = send(c, n)
		case opUpload:
			if err = take(c, n); err == nil {
				_, err = c.Write(m[:1])
			}
		}
		if err != nil {
			return
		}
	}
}

const (
	httpRequest = "GET / HTTP/1.1\r\nHost: " + webAddress + "\r\n\r\n"
	httpAnswer  = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
)

// serveWeb answers HTTP requests.
func serveWeb(c net.Conn) {
	b := make([]byte, 1024)
	for n := 0; ; {
		k, err := c.Read(b[n:])
		if err != nil {
			return // the client has closed the connection
		}
		if n += k; bytes.HasSuffix(b[:n], endOfHeader) {
			if _, err := c.Write([]byte(httpAnswer)); err != nil {
				return
			}
			n = 0
		}
	}
}

// get sends an HTTP request and waits for the whole response.
func get(c conn) error {
	if _, err := c.Write([]byte(httpRequest)); err != nil {
		return err
	}
	_, err := c.readUntil([]byte("\r\n\r\nok"))
	return err
}

var zeros [chunk]byte

func send(w io.Writer, n int64) error {
	for n > 0 {
		k, err := w.Write(zeros[:min(n, chunk)])
		if err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

func take(r io.Reader, n int64) error {
	b := make([]byte, chunk)
	for n > 0 {
		k, err := r.Read(b[:min(n, chunk)])
		if err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

// conn is a client's connection: a blocking socket that one thread in the pod's netns uses. Otherwise the poller of the
// Go runtime would be part of the measurement.
type conn int

// dial connects to an address, through the proxy if that is valid. It asks the proxy by CONNECT.
func dial(proxy, to netip.AddrPort) (conn, error) { return dialBy(conn.requestTunnel, proxy, to) }

// dialBy is dial with another way to ask the proxy.
func dialBy(ask func(conn, netip.AddrPort) error, proxy, to netip.AddrPort) (conn, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	c := conn(fd)
	first := to
	if proxy.IsValid() {
		first = proxy
	}
	err = c.connect(first)
	if err == nil && proxy.IsValid() {
		err = ask(c, to)
	}
	if err != nil {
		c.close()
		return 0, err
	}
	return c, nil
}

func (c conn) connect(to netip.AddrPort) error {
	timeout := unix.Timeval{Sec: 30}
	for _, err := range []error{
		unix.SetsockoptInt(int(c), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.SetsockoptTimeval(int(c), unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptTimeval(int(c), unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout),
	} {
		if err != nil {
			return err
		}
	}
	for {
		err := unix.Connect(int(c), sockaddr(to))
		switch {
		case err == nil, errors.Is(err, unix.EISCONN):
			return nil
		case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EALREADY):
			return fmt.Errorf("connecting to %s: %w", to, err)
		}
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

func connectRequest(to netip.AddrPort) []byte {
	return fmt.Appendf(nil, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", to)
}

var (
	connected   = []byte("HTTP/1.1 200")
	endOfHeader = []byte("\r\n\r\n")
)

// requestTunnel sends a CONNECT request to the proxy and reads the response. No byte follows the response, because the
// server does not send first.
func (c conn) requestTunnel(to netip.AddrPort) error {
	if _, err := c.Write(connectRequest(to)); err != nil {
		return err
	}
	answer, err := c.readUntil(endOfHeader)
	if err != nil {
		return fmt.Errorf("CONNECT to the proxy: %w", err)
	}
	if !bytes.HasPrefix(answer, connected) {
		return fmt.Errorf("the proxy responds %q", answer)
	}
	return nil
}

// readUntil reads until the data end with the given bytes. It fails if the peer closes the connection before that.
func (c conn) readUntil(end []byte) (answer []byte, err error) {
	for b := make([]byte, 1024); !bytes.HasSuffix(answer, end); {
		n, err := c.Read(b)
		if err != nil {
			return nil, fmt.Errorf("reading the response: %w", err)
		}
		answer = append(answer, b[:n]...)
	}
	return answer, nil
}

func (c conn) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(c), p)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (c conn) Write(p []byte) (int, error) {
	for sent := 0; sent < len(p); {
		n, err := unix.Write(int(c), p[sent:])
		if err != nil && !errors.Is(err, unix.EINTR) {
			return sent, err
		}
		sent += max(n, 0)
	}
	return len(p), nil
}

func (c conn) close() { _ = unix.Close(int(c)) } // on a socket, an error of close means no lost data
