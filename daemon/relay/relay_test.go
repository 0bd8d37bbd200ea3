package relay

import (
	"net/netip"
	"testing"
)

func TestPodAddressHasTheFamilyOfTheSource(t *testing.T) {
	t.Parallel()
	const port = 1234
	four, six := netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")
	for _, tc := range []struct {
		name string
		ips  []netip.Addr
		want netip.AddrPort
	}{
		{"both families", []netip.Addr{six, four}, netip.AddrPortFrom(four, port)},
		{"the first of two", []netip.Addr{four, netip.MustParseAddr("10.1.0.5")}, netip.AddrPortFrom(four, port)},
		{"the other family alone", []netip.Addr{six}, netip.AddrPort{}},
		{"none", nil, netip.AddrPort{}},
	} {
		if got := podAddress(tc.ips, netip.MustParseAddrPort("172.17.0.2:1234")); got != tc.want {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}
