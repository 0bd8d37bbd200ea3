package captured

import (
	"net/netip"
	"testing"
)

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
