package captured

import (
	"fmt"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

func TestPermittedRefusesAddressesOfTheNode(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]bool{
		"192.0.2.7": true, "10.0.0.1": true, "2001:db8::7": true, "fd00::1": true, "100.64.0.1": true,
		"::ffff:192.0.2.7": true, "fd00:ec2::253": true, "1.1.1.1": true,
		"127.0.0.1": false, "127.255.255.254": false, "::1": false, "::ffff:127.0.0.1": false,
		"0.0.0.0": false, "::": false, "::ffff:0.0.0.0": false,
		"169.254.169.254": false, "169.254.0.1": false, "fe80::1": false, "::ffff:169.254.169.254": false,
		"224.0.0.1": false, "239.1.2.3": false, "ff02::1": false, "255.255.255.255": false,
		"fd00:ec2::254": false, "fd20:ce::254": false,
	} {
		if err := permitted(netip.AddrPortFrom(netip.MustParseAddr(address), 80)); (err == nil) != want {
			t.Errorf("%s: got %v, want permitted %t", address, err, want)
		}
	}
}

// TestToNodeRefusesAddressesThatMeanTheNode, unless the policy lets connections go there.
func TestToNodeRefusesAddressesThatMeanTheNode(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "node")
	for name, addresses := range map[string][]string{
		"eth0": {"192.0.2.1/24", "2001:db8::1/64"}, "kube-ipvs0": {"10.96.0.1/32", "fd00:96::1/128"},
	} {
		h.IP("link", "add", name, "type", "bridge")
		h.IP("link", "set", name, "up")
		for _, a := range addresses {
			h.IP("addr", "add", a, "dev", name, "nodad")
		}
	}
	err := h.Do(func() error {
		for address, want := range map[string]bool{
			"192.0.2.7": true, "2001:db8::7": true, "10.96.0.1": true, "fd00:96::1": true, "198.51.100.7": true,
			"168.63.129.17": true,
			"192.0.2.1":     false, "::ffff:192.0.2.1": false, "2001:db8::1": false, "168.63.129.16": false,
			"100.100.100.200": false,
		} {
			dst := netip.AddrPortFrom(netip.MustParseAddr(address), 80)
			if err := (Policy{}).toNode(dst); (err == nil) != want {
				t.Errorf("%s: got %v, want permitted %t", address, err, want)
			}
			if err := (Policy{Node: true}).toNode(dst); err != nil {
				t.Errorf("%s, which the policy allows: got %v", address, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestCausesAreFew: the log is throttled by them, and a pod chooses the destinations.
func TestCausesAreFew(t *testing.T) {
	t.Parallel()
	causes := map[string]bool{}
	for i := range 200 {
		dst := netip.AddrFrom4([4]byte{169, 254, 1, byte(i)})
		causes[Cause(permitted(netip.AddrPortFrom(dst, 80)))] = true
		causes[Cause(fmt.Errorf("looking up the route to %s: socket: %w", dst, unix.ENOBUFS))] = true
	}
	if len(causes) != 2 {
		t.Errorf("got %d causes of two kinds of errors: %v", len(causes), causes)
	}
}
