package upstream

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
)

// SOCKS5, RFC 1928: the parts that a client without authentication needs.
const (
	socksVersion  = 5
	socksNoAuth   = 0
	socksConnect  = 1
	socksIPv4     = 1
	socksName     = 3
	socksIPv6     = 4
	socksRefuseIt = 0xff // no acceptable method
)

// askSOCKS5 asks with SOCKS5. It reads no byte beyond the answer, so it never returns first bytes.
func askSOCKS5(conn net.Conn, req Request) ([]byte, error) {
	method, err := exchange(conn, []byte{socksVersion, 1, socksNoAuth}, 2)
	if err != nil {
		return nil, err
	}
	switch {
	case method[0] != socksVersion:
		return nil, fmt.Errorf("%w: the answer is not SOCKS5", ErrMisconfigured)
	case method[1] == socksRefuseIt:
		return nil, fmt.Errorf("%w: the proxy requires a user and a password, and sluice has none", ErrMisconfigured)
	case method[1] != socksNoAuth:
		return nil, fmt.Errorf("%w: the proxy chose the authentication method %#x, which was not offered",
			ErrMisconfigured, method[1])
	}
	kind := byte(socksIPv4)
	if req.Destination.Addr().Is6() {
		kind = socksIPv6
	}
	ask := append([]byte{socksVersion, socksConnect, 0, kind}, req.Destination.Addr().AsSlice()...)
	ask = binary.BigEndian.AppendUint16(ask, req.Destination.Port())
	reply, err := exchange(conn, ask, 4)
	if err != nil {
		return nil, err
	}
	if reply[0] != socksVersion {
		return nil, fmt.Errorf("%w: the reply is not SOCKS5", ErrMisconfigured)
	}
	if err := socksError(reply[1]); err != nil {
		return nil, err
	}
	return nil, skipBound(conn, reply[3])
}

// exchange writes a message and reads an answer of exactly n bytes.
func exchange(conn net.Conn, message []byte, n int) ([]byte, error) {
	if _, err := conn.Write(message); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLate, err)
	}
	answer := make([]byte, n)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return nil, fmt.Errorf("%w: the connection ended before the answer: %w", ErrLate, err)
	}
	return answer, nil
}

// socksError interprets the reply field (RFC 1928, section 6).
func socksError(reply byte) error {
	switch reply {
	case 0:
		return nil
	case 1:
		return &unclearError{ErrLate, "SOCKS5 reply 1, general failure"}
	case 2, 3, 4, 5, 6, 8: // not allowed, network or host unreachable, refused, TTL expired, address type
		return fmt.Errorf("%w: SOCKS5 reply %d", ErrUnreachable, reply)
	default: // the command is not supported, or the reply is not assigned
		return &unclearError{ErrMisconfigured, fmt.Sprintf("SOCKS5 reply %d", reply)}
	}
}

// skipBound reads past the address that the proxy has bound, which is not needed.
func skipBound(conn net.Conn, kind byte) error {
	n := map[byte]int{socksIPv4: 4, socksIPv6: 16}[kind]
	if kind == socksName {
		length := make([]byte, 1)
		if _, err := io.ReadFull(conn, length); err != nil {
			return fmt.Errorf("%w: the connection ended within the answer: %w", ErrLate, err)
		}
		n = int(length[0])
	} else if n == 0 {
		return fmt.Errorf("%w: SOCKS5 reply with address type %d", ErrMisconfigured, kind)
	}
	if _, err := io.ReadFull(conn, make([]byte, n+2)); err != nil {
		return fmt.Errorf("%w: the connection ended within the answer: %w", ErrLate, err)
	}
	return nil
}
