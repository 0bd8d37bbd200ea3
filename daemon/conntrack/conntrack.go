// Package conntrack reads and changes the kernel's connection tracking in the netns of pods. It does four things: it
// reads the original destination of a captured connection, it looks up the client of a connection, it deletes the
// entries of SYNs that wait for an answer, and it enters a connection that is exempt from capture before its first
// segment is sent.
package conntrack

import (
	"errors"
	"fmt"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// unanswered matches the entries of connections whose SYN has no answer yet: SYNs that were redirected and wait at the
// SYN gate, and SYNs that left the pod and wait for their destination. Such an entry keeps the translation that nat
// chose, or its absence. Later SYNs of the connection follow the entry even if the rules have changed. Entries of
// established connections stay, and so do those of connections that sluiced makes for the policy direct.
type unanswered struct{}

// TCP_CONNTRACK_SYN_SENT and TCP_CONNTRACK_SYN_SENT2, linux/netfilter/nf_conntrack_tcp.h.
const synSent, synSent2 = 1, 9

func (unanswered) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	tcp, ok := f.ProtoInfo.(*netlink.ProtoInfoTCP)
	return ok && (tcp.State == synSent || tcp.State == synSent2) && f.Mark != ruleset.DirectMark
}

// ForgetUnanswered deletes the entries of unanswered SYNs in the netns at path.
func ForgetUnanswered(path string) error {
	return ns.WithNetNSPath(path, func(ns.NetNS) error { return ForgetUnansweredHere() })
}

// ForgetUnansweredHere is ForgetUnanswered for the netns of the calling thread.
func ForgetUnansweredHere() error {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("opening conntrack: %w", err)
	}
	defer h.Close()
	var errs []error
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if _, err := h.ConntrackDeleteFilters(netlink.ConntrackTable, family, unanswered{}); err != nil {
			errs = append(errs, fmt.Errorf("deleting conntrack entries of waiting connections: %w", err))
		}
	}
	return errors.Join(errs...)
}
