package netns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// kataSuffix ends the names of the devices by which Kata Containers joins its VM to an interface of the pod: tap0_kata.
const kataSuffix = "_kata"

// OtherStack looks for signs that a pod with these addresses does not use the network stack of its netns, which is the
// one at path. It returns the sign, or "". The VM of Kata Containers is joined to the pod's interface itself, past the
// stack. gVisor takes the addresses off the interface, and sends and receives by packet sockets.
func OtherStack(path string, ips []netip.Addr) (sign string, err error) {
	names, addresses, err := list(path)
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if strings.HasSuffix(name, kataSuffix) {
			return "its network namespace has the interface " + name, nil
		}
	}
	if len(ips) == 0 || slices.ContainsFunc(addresses, func(a Address) bool { return a.IsOf(ips) }) {
		return "", nil
	}
	return fmt.Sprintf("no interface of its network namespace has its address %s", ips[0]), nil
}
