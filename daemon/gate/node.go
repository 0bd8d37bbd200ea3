package gate

import (
	"errors"
	"net"
	"net/netip"
	"os"
)

// SourceTo is the address from which this node connects to pod; the zero value if there is no way there. Connections
// to the pod from there are kubelet's probes and those of a proxy that uses the node's network.
func SourceTo(pod netip.Addr) (netip.Addr, error) {
	// To connect a UDP socket looks the route up, and sends nothing; what the port is does not matter.
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(pod, 9)))
	var failed *os.SyscallError
	if errors.As(err, &failed) && failed.Syscall == "connect" {
		return netip.Addr{}, nil // unreachable, by a route of whatever kind
	}
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close() //nolint:errcheck // nothing was sent
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap().WithZone(""), nil
}
