package upstream

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// The header of the PROXY protocol, version 2 (section 2.2 of proxy-protocol.txt in HAProxy's documentation).
const (
	proxySignature = "\r\n\r\n\x00\r\nQUIT\n"
	proxyCommand   = 0x21 // version 2, for a connection of another host
	proxyTCP4      = 0x11
	proxyTCP6      = 0x21
)

// The types of sluice's fields in that header. 0xE0 to 0xEF are for applications.
const (
	fieldNamespace = 0xe0 + iota
	fieldName
	fieldUID
	fieldDirection
)

// maxField bounds a field. Names of Kubernetes have at most 253 bytes.
const maxField = 255

// announce sends the header. There is no answer: the upstream has the connection when its kernel has accepted it. The
// watch of an idle connection goes on until the first bytes from the upstream: the next reader waits for its end.
func announce(conn net.Conn, req Request) ([]byte, error) {
	send := func(b []byte) error { _, err := conn.Write(b); return err }
	if req.More != nil && req.More() {
		send = func(b []byte) error { return socket.SendMore(conn.(syscall.Conn), b) }
	}
	if err := send(proxyHeader(req)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLate, err)
	}
	if idle, is := conn.(*idleConn); is {
		idle.asked()
	}
	return nil, nil
}

func proxyHeader(req Request) []byte {
	kind, source := byte(proxyTCP4), req.Source
	if req.Destination.Addr().Is6() {
		kind = proxyTCP6
	}
	if source.Addr().BitLen() != req.Destination.Addr().BitLen() { // the pod has no address of this family
		source = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
		if kind == proxyTCP6 {
			source = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
		}
	}
	body := append(source.Addr().AsSlice(), req.Destination.Addr().AsSlice()...)
	body = binary.BigEndian.AppendUint16(body, source.Port())
	body = binary.BigEndian.AppendUint16(body, req.Destination.Port())
	for _, f := range []struct {
		kind  byte
		value string
	}{
		{fieldNamespace, req.Pod.Namespace},
		{fieldName, req.Pod.Name},
		{fieldUID, req.Pod.UID},
		{fieldDirection, direction(req)},
	} {
		if f.value != "" {
			value := f.value[:min(len(f.value), maxField)]
			body = binary.BigEndian.AppendUint16(append(body, f.kind), uint16(len(value)))
			body = append(body, value...)
		}
	}
	header := append([]byte(proxySignature), proxyCommand, kind)
	return append(binary.BigEndian.AppendUint16(header, uint16(len(body))), body...)
}
