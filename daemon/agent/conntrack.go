package agent

import (
	"errors"
	"fmt"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// waitingSYN matches the conntrack entries of connections whose SYN has no answer yet: those that were redirected and wait
// at the SYN gate, and those that were let go and wait for a destination. Such an entry keeps what nat did, or did not do:
// the next SYN would follow it, or be dropped, whatever the rules say by then. Connections that are established keep
// theirs, and those that sluiced lets go direct.
type waitingSYN struct{}

func (waitingSYN) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	const synSent, synSent2 = 1, 9 // TCP_CONNTRACK_*, linux/netfilter/nf_conntrack_tcp.h
	tcp, is := f.ProtoInfo.(*netlink.ProtoInfoTCP)
	return is && (tcp.State == synSent || tcp.State == synSent2) && f.Mark != ruleset.DirectMark
}

// forgetWaiting makes the kernel forget where the SYNs that wait in the netns at path were going.
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
