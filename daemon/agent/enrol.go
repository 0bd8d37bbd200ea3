package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// netnsDir is where runtimes mount the network namespaces of pods.
const netnsDir = "/run/netns"

// enrol captures the running pods that opted in and were never attached: they ran before sluice was installed. It
// also says of those that cannot be captured why not.
func (a *Agent) enrol(ctx context.Context) {
	var wanting []optin.Running
	for _, p := range a.source.Running() {
		switch {
		case !optin.Wanted(p.Facts):
		case p.HostNetwork:
			a.report(p.Pod, true, reasonNotCaptured, "the pod uses the host's network: what it sends is the node's")
		case p.Facts.Upstream:
			a.report(p.Pod, true, reasonNotCaptured, "the pod runs the upstream: what it sends would come back to it")
		case !a.attached(p.Pod):
			wanting = append(wanting, p)
		}
	}
	if len(wanting) == 0 {
		return
	}
	found, err := findNetns(wanting)
	a.complain(err)
	for _, at := range found {
		if err := a.enrolOne(ctx, at); err != nil {
			a.log.Error("pod not captured; will try again", "pod", at.Pod.String(), "err", err)
			a.report(at.Pod, true, reasonNotCaptured, err.Error())
		}
	}
}

func (a *Agent) attached(pod attach.Pod) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, n := range a.byID {
		if p := n.attachments[id].Pod; p.Namespace == pod.Namespace && p.Name == pod.Name {
			return true
		}
	}
	return false
}

func (a *Agent) enrolOne(ctx context.Context, at attach.Attachment) error {
	id, err := attach.IdentifyNetns(at.Netns)
	if err != nil {
		return err
	}
	n := a.enter(id)
	defer a.leave(n)
	if len(a.records(n)) > 0 {
		return nil // its own ADD was quicker
	}
	r := attach.Record{Attachment: at, NetnsID: id, State: attach.Passed}
	if err := a.store.Write(r); err != nil {
		return err
	}
	a.join(n, &r)
	return a.settle(ctx, n, r)
}

// findNetns finds the netns of pods by their addresses.
func findNetns(pods []optin.Running) ([]attach.Attachment, error) {
	entries, err := os.ReadDir(netnsDir)
	if err != nil {
		return nil, fmt.Errorf("looking for the netns of running pods: %w", err)
	}
	var found []attach.Attachment
	var errs []error
	for _, e := range entries {
		path := filepath.Join(netnsDir, e.Name())
		addresses, err := addressesIn(path)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, p := range pods {
			i := slices.IndexFunc(p.IPs, func(ip netip.Addr) bool { return addresses[ip] != "" })
			if i < 0 {
				continue
			}
			found = append(found, attach.Attachment{
				// No runtime knows it by this ID; when the netns goes, so does the attachment.
				ID: attach.ID{ContainerID: p.Pod.UID, IfName: addresses[p.IPs[i]]}, Netns: path, Pod: p.Pod, IPs: p.IPs,
			})
		}
	}
	return found, errors.Join(errs...)
}

// addressesIn maps the addresses in a netns to the interfaces that have them.
func addressesIn(path string) (map[netip.Addr]string, error) {
	found := map[netip.Addr]string{}
	err := ns.WithNetNSPath(path, func(ns.NetNS) error {
		interfaces, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, i := range slices.DeleteFunc(interfaces, func(i net.Interface) bool { return i.Flags&net.FlagLoopback != 0 }) {
			addrs, err := i.Addrs()
			if err != nil {
				return err
			}
			for _, a := range addrs {
				if n, ok := a.(*net.IPNet); ok {
					if ip, ok := netip.AddrFromSlice(n.IP); ok {
						found[ip.Unmap()] = i.Name
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing addresses in netns %s: %w", path, err)
	}
	return found, nil
}
