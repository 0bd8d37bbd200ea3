package optin

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// TestExcludeNode: the same addresses are excluded in the same order, however they were found, because rulesets are
// compared.
func TestExcludeNode(t *testing.T) {
	t.Parallel()
	one, two := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	// The node connects to both from 127.0.0.1.
	loopback := []netip.Addr{netip.MustParseAddr("127.0.0.7"), netip.MustParseAddr("127.0.0.8")}
	want := []netip.Prefix{
		netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32"),
		netip.MustParsePrefix("127.0.0.1/32"),
	}
	for name, tc := range map[string]struct {
		r       ruleset.Ruleset
		proxies []netip.Addr
	}{
		"by their pods":             {ruleset.Ruleset{}, []netip.Addr{two, one, two}},
		"by the upstream's address": {ruleset.Ruleset{Upstream: netip.AddrPortFrom(two, 8080)}, []netip.Addr{one}},
	} {
		r := tc.r
		r.InboundPorts = []ruleset.PortRange{{First: 80, Last: 80}}
		if err := ExcludeNode(&r, loopback, tc.proxies); err != nil || !slices.Equal(r.ExcludeSources, want) {
			t.Errorf("%s: got %v, %v; want %v", name, r.ExcludeSources, err, want)
		}
	}
	var r ruleset.Ruleset
	if err := ExcludeNode(&r, loopback, []netip.Addr{one}); err != nil || r.ExcludeSources != nil {
		t.Errorf("without inbound ports: got %v, %v; want nothing excluded", r.ExcludeSources, err)
	}
}
