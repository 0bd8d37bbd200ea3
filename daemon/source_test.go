package main

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// TestExempt: the same addresses are excluded in the same order, whichever way they were found; rulesets are compared.
func TestExempt(t *testing.T) {
	t.Parallel()
	one, two := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	loopback := []netip.Addr{netip.MustParseAddr("127.0.0.7"), netip.MustParseAddr("127.0.0.8")} // connected to from 127.0.0.1
	want := []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32"), netip.MustParsePrefix("127.0.0.1/32")}
	for name, tc := range map[string]struct {
		r       ruleset.Ruleset
		proxies []netip.Addr
	}{
		"by their pods":             {ruleset.Ruleset{}, []netip.Addr{two, one, two}},
		"by the upstream's address": {ruleset.Ruleset{Upstream: netip.AddrPortFrom(two, 8080)}, []netip.Addr{one}},
	} {
		r := tc.r
		r.InboundPorts = []ruleset.PortRange{{First: 80, Last: 80}}
		if err := exempt(&r, loopback, func() []netip.Addr { return tc.proxies }); err != nil || !slices.Equal(r.ExcludeSources, want) {
			t.Errorf("%s: got %v, %v; want %v", name, r.ExcludeSources, err, want)
		}
	}
	var r ruleset.Ruleset
	if err := exempt(&r, loopback, func() []netip.Addr { return []netip.Addr{one} }); err != nil || r.ExcludeSources != nil {
		t.Errorf("without inbound ports: got %v, %v; want nothing excluded", r.ExcludeSources, err)
	}
	if err := exempt(nil, loopback, nil); err != nil {
		t.Errorf("not captured: got %v", err)
	}
}
