package netns

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
)

// kataSuffix ends the names of the devices by which Kata Containers joins its VM to an interface of the pod: tap0_kata.
const kataSuffix = "_kata"

// OtherStack looks for signs that a pod with these addresses does not use the network stack of its netns, which is the
// one at path. It returns the sign, or "". The VM of Kata Containers is joined to the pod's interface itself, past the
// stack. gVisor takes the addresses off the interface, and sends and receives by packet sockets.
func OtherStack(path string, ips []netip.Addr) (sign string, err error) {
	var names []string
	err = ns.WithNetNSPath(path, func(ns.NetNS) error {
		interfaces, err := net.Interfaces()
		for _, i := range interfaces {
			names = append(names, i.Name)
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("listing interfaces in netns %s: %w", path, err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, kataSuffix) {
			return "its network namespace has the interface " + name, nil
		}
	}
	addresses, err := Addresses(path)
	if err != nil || len(ips) == 0 {
		return "", err
	}
	if slices.ContainsFunc(addresses, func(a Address) bool { return !a.Loopback && slices.Contains(ips, a.Addr) }) {
		return "", nil
	}
	return fmt.Sprintf("no interface of its network namespace has its address %s", ips[0]), nil
}
