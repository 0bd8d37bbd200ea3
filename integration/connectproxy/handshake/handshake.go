// Package handshake is the part of a proxy that reads a request for a connection, in each protocol in which sluiced
// asks for one: HTTP CONNECT, SOCKS5, and the PROXY protocol version 2.
package handshake

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/netip"
)

// Request is a request for a connection.
type Request struct {
	Destination string
	// Header is that of a CONNECT request.
	Header http.Header
	// Connected and Failed are the answers. They are empty with the PROXY protocol, which has none.
	Connected, Failed string
}

// Read reads a request in the protocol that its first byte shows, and answers the greeting of SOCKS5. The error is
// io.EOF if the connection ends without a byte, as one does that only shows whether the proxy is there.
func Read(out io.Writer, in *bufio.Reader) (Request, error) {
	first, err := in.Peek(1)
	if err != nil {
		return Request{}, err
	}
	switch first[0] {
	case socksVersion:
		return readSOCKS5(out, in)
	case '\r':
		return readProxyHeader(in)
	default:
		return readConnect(out, in)
	}
}

func readConnect(out io.Writer, in *bufio.Reader) (Request, error) {
	req, err := http.ReadRequest(in)
	if err != nil {
		return Request{}, fmt.Errorf("reading a CONNECT request: %w", err)
	}
	if req.Method != http.MethodConnect {
		fmt.Fprint(out, "HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")
		return Request{}, fmt.Errorf("the request is a %s", req.Method)
	}
	return Request{
		Destination: req.Host, Header: req.Header,
		Connected: "HTTP/1.1 200 Connection established\r\n\r\n",
		Failed:    "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
	}, nil
}

const socksVersion = 5

func readSOCKS5(out io.Writer, in *bufio.Reader) (Request, error) {
	if _, err := io.ReadFull(in, make([]byte, 3)); err != nil { // sluiced offers one method
		return Request{}, fmt.Errorf("reading the greeting of SOCKS5: %w", err)
	}
	fmt.Fprint(out, "\x05\x00")
	destination, err := ReadSOCKS5Request(in)
	reply := func(code byte) string { return string([]byte{socksVersion, code, 0, 1, 0, 0, 0, 0, 0, 0}) }
	return Request{Destination: destination, Connected: reply(0), Failed: reply(4)}, err
}

// ReadSOCKS5Request reads the request that follows the greeting, and returns its destination.
func ReadSOCKS5Request(in io.Reader) (destination string, err error) {
	head := make([]byte, 4) // version, command, reserved, address type
	if _, err := io.ReadFull(in, head); err != nil {
		return "", fmt.Errorf("reading a SOCKS5 request: %w", err)
	}
	length := 4
	if head[3] == 4 {
		length = 16
	}
	rest := make([]byte, length+2)
	if _, err := io.ReadFull(in, rest); err != nil {
		return "", fmt.Errorf("reading the destination of a SOCKS5 request: %w", err)
	}
	return address(rest[:length], rest[length:]), nil
}

func readProxyHeader(in *bufio.Reader) (Request, error) {
	head := make([]byte, 16) // signature, command, family, length
	if _, err := io.ReadFull(in, head); err != nil {
		return Request{}, fmt.Errorf("reading a PROXY header: %w", err)
	}
	body := make([]byte, binary.BigEndian.Uint16(head[14:]))
	if _, err := io.ReadFull(in, body); err != nil {
		return Request{}, fmt.Errorf("reading the addresses of a PROXY header: %w", err)
	}
	length := 4
	if head[13]>>4 == 2 {
		length = 16
	}
	if len(body) < 2*length+4 {
		return Request{}, fmt.Errorf("a PROXY header has %d bytes of addresses", len(body))
	}
	return Request{Destination: address(body[length:2*length], body[2*length+2:2*length+4])}, nil
}

func address(ip, port []byte) string {
	a, _ := netip.AddrFromSlice(ip) // has the length of one
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port)).String()
}
