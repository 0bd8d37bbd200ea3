package relay

import (
	"io"
	"net/netip"
	"testing"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestPermitted(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]bool{
		"192.0.2.7": true, "10.0.0.1": true, "2001:db8::7": true, "fd00::1": true, "100.64.0.1": true, "::ffff:192.0.2.7": true,
		"fd00:ec2::253": true, "1.1.1.1": true,
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

func TestSource(t *testing.T) {
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
		p := Pod{ips: tc.ips}
		if got := p.source(netip.MustParseAddrPort("172.17.0.2:1234")); got != tc.want {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestCounts(t *testing.T) {
	t.Parallel()
	far, near := pair(t)
	var p Pod
	p.opened(near)
	send(t, far, "four")
	checkReads(t, "near", near, "four")
	send(t, near, "three")
	checkReads(t, "far", far, "three")
	want := gate.Counts{Open: 1, Bytes: 9}
	testbed.Eventually(t, "all bytes are acknowledged and counted", func() bool { return p.Counts() == want })
	p.closed(near, 9)
	want.Open = 0
	if got := p.Counts(); got != want {
		t.Errorf("after its end: got %+v, want %+v", got, want)
	}
}

// TestEnded: a connection that the app has reset has ended, one that it has only shut has not.
func TestEnded(t *testing.T) {
	t.Parallel()
	far, near := pair(t)
	if ended(near) {
		t.Error("an open connection: got ended")
	}
	send(t, far, "unread")
	shut(t, far)
	checkReads(t, "near", near, "unread")
	checkEnd(t, "near", near, io.EOF)
	if ended(near) {
		t.Error("a half shut connection: got ended")
	}
	gate.Reset(far)
	testbed.Eventually(t, "a reset connection has ended", func() bool { return ended(near) })
	_ = near.Close()
	if !ended(near) {
		t.Error("a closed connection: got not ended")
	}
}
