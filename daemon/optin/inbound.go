package optin

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// ExcludeNode excludes from inbound capture the connections that this node and its proxies make to a pod: kubelet's
// probes, and the connections that a proxy has captured and passes on. podIPs are the pod's addresses, proxies those of
// the proxies. The error is ErrUnknown if the node's route to the pod cannot be looked up.
func ExcludeNode(r *ruleset.Ruleset, podIPs, proxies []netip.Addr) error {
	if len(r.InboundPorts) == 0 {
		return nil
	}
	sources := slices.Clone(proxies)
	if r.Upstream.IsValid() {
		sources = append(sources, r.Upstream.Addr())
	}
	for _, pod := range podIPs {
		node, err := netns.SourcesTo(pod)
		if err != nil {
			return fmt.Errorf("%w: the route from this node to %s: %w", ErrUnknown, pod, err)
		}
		sources = append(sources, node...)
	}
	slices.SortFunc(sources, netip.Addr.Compare) // rulesets are compared
	for _, a := range slices.Compact(sources) {
		r.ExcludeSources = append(r.ExcludeSources, netip.PrefixFrom(a, a.BitLen()))
	}
	return nil
}
