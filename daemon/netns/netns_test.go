package netns

import (
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

func TestAddressesOfEveryInterfaceButLoopback(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	for name, addresses := range map[string][]string{"eth0": {"10.1.0.1/24", "fd01::1/64"}, "net1": {"10.2.0.1/24"}} {
		h.IP("link", "add", name, "type", "bridge")
		for _, a := range addresses {
			h.IP("addr", "add", a, "dev", name)
		}
	}
	h.IP("addr", "add", "10.3.0.1/32", "dev", "lo")
	got, err := Addresses(h.Path())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []Address{
		{netip.MustParseAddr("10.1.0.1"), "eth0", false}, {netip.MustParseAddr("fd01::1"), "eth0", false},
		{netip.MustParseAddr("10.2.0.1"), "net1", false}, {netip.MustParseAddr("10.3.0.1"), "lo", true},
	} {
		if !slices.Contains(got, want) {
			t.Errorf("got %v, want %v among them", got, want)
		}
	}
	if _, err := Addresses("/run/netns/does-not-exist"); err == nil {
		t.Error("path without a netns: got no error")
	}
}

// TestSourcesToKnowTentativeAddresses, which the kernel does not use yet: the bridge has no link.
func TestSourcesToKnowTentativeAddresses(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "node")
	h.IP("link", "add", "eth0", "type", "bridge")
	h.IP("addr", "add", "fd02::1/64", "dev", "eth0", "nodad")
	h.IP("link", "set", "eth0", "up")
	h.IP("link", "add", "cni0", "type", "bridge")
	h.IP("addr", "add", "10.1.0.1/24", "dev", "cni0")
	h.IP("addr", "add", "fd01::1/64", "dev", "cni0")
	h.IP("link", "set", "cni0", "up")
	h.IP("route", "add", "fd01::/64", "dev", "cni0")
	for to, want := range map[string][]string{
		"10.1.0.7": {"10.1.0.1"}, "fd01::7": {"fd02::1", "fd01::1"}, "fd02::7": {"fd02::1"}, "192.0.2.7": nil,
		"2001:db8::7": nil,
	} {
		var got []netip.Addr
		err := h.Do(func() (err error) {
			got, err = SourcesTo(netip.MustParseAddr(to))
			return err
		})
		var wanted []netip.Addr
		for _, a := range want {
			wanted = append(wanted, netip.MustParseAddr(a))
		}
		if err != nil || !slices.Equal(got, wanted) {
			t.Errorf("to %s: got %v, %v; want %v", to, got, err, want)
		}
	}
}

func TestSourceToFollowsTheRoutes(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "node")
	h.IP("link", "add", "eth0", "type", "bridge")
	h.IP("addr", "add", "10.1.0.1/24", "dev", "eth0")
	h.IP("addr", "add", "fd01::1/64", "dev", "eth0", "nodad")
	h.IP("link", "set", "eth0", "up")
	h.IP("route", "add", "blackhole", "198.51.100.0/24")
	h.IP("route", "add", "prohibit", "203.0.113.0/24")
	for to, want := range map[string]string{
		"10.1.0.7": "10.1.0.1", "fd01::7": "fd01::1", "192.0.2.7": "", "2001:db8::7": "", "198.51.100.7": "",
		"203.0.113.7": "",
	} {
		var got netip.Addr
		err := h.Do(func() (err error) {
			got, err = SourceTo(netip.MustParseAddr(to))
			return err
		})
		if wanted, _ := netip.ParseAddr(want); err != nil || got != wanted {
			t.Errorf("to %s: got %v, %v; want %q", to, got, err, want)
		}
	}
}
