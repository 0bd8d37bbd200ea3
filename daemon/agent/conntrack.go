package agent

import (
	"errors"
	"fmt"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// waitingSYN matches the conntrack entries of connections that were redirected and wait at the SYN gate.
// Such an entry is confirmed and keeps the redirect: the next SYN would follow it whatever the rules say by
// then. Connections that are established keep theirs.
type waitingSYN struct{}

func (waitingSYN) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	const synSent, synSent2 = 1, 9 // TCP_CONNTRACK_*, linux/netfilter/nf_conntrack_tcp.h
	tcp, is := f.ProtoInfo.(*netlink.ProtoInfoTCP)
	return is && (tcp.State == synSent || tcp.State == synSent2) && f.Reverse.SrcPort == ruleset.OutboundPort
}

// forgetWaiting makes the kernel forget where it redirected the SYNs that wait in the netns at path.
func forgetWaiting(path string) error {
	return ns.WithNetNSPath(path, func(ns.NetNS) error { return forgetWaitingHere() })
}

func forgetWaitingHere() error {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("opening conntrack: %w", err)
	}
	defer h.Close()
	var errs []error
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if _, err := h.ConntrackDeleteFilters(netlink.ConntrackTable, family, waitingSYN{}); err != nil {
			errs = append(errs, fmt.Errorf("deleting conntrack entries of waiting connections: %w", err))
		}
	}
	return errors.Join(errs...)
}
