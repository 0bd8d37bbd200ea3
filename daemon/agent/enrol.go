package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// netnsDir is where runtimes mount the network namespaces of pods.
const netnsDir = "/run/netns"

// enrol captures the running pods that opted in and were never attached: they ran before sluice was installed. It
// reports why the others cannot be captured.
func (a *Agent) enrol(ctx context.Context) {
	var missing []optin.Running
	for _, p := range a.orchestrator.Running() {
		switch {
		case !optin.Wanted(p.Facts):
		case p.HostNetwork:
			a.events.report(p.Pod, true, reasonNotCaptured,
				"the pod uses the host's network, so its connections are the node's")
		case p.Facts.Upstream:
			a.events.report(p.Pod, true, reasonNotCaptured,
				"the pod runs the upstream: its connections would come back to it")
		case !a.table.HasPod(p.Pod):
			missing = append(missing, p)
		}
	}
	if len(missing) == 0 {
		return
	}
	found, err := findNetns(missing)
	if err != nil {
		a.log.Error("the netns of running pods cannot be searched", "err", err)
	}
	for _, at := range found {
		err := a.enrolOne(ctx, at)
		if err == nil {
			continue
		}
		if !errors.Is(err, attach.ErrNodeNetns) { // that stays as it is; the event is made once
			a.log.Error("running pod cannot be captured yet; trying again", "pod", at.Pod.String(), "err", err)
		}
		a.events.report(at.Pod, true, reasonNotCaptured, err.Error())
	}
}

func (a *Agent) enrolOne(ctx context.Context, at attach.Attachment) error {
	id, err := attach.IdentifyNetns(at.Netns)
	if err != nil {
		return err
	}
	if err := id.CheckNotNode(); err != nil {
		return fmt.Errorf("netns %s: %w", at.Netns, err)
	}
	e := a.table.Enter(id)
	defer e.Leave()
	if len(e.Records()) > 0 {
		return nil // its ADD came first
	}
	r := attach.Record{Attachment: at, NetnsID: id, State: attach.Passed}
	if err := a.store.Write(r); err != nil {
		return err
	}
	e.Add(r)
	return a.settler.settle(ctx, e, r)
}

// findNetns finds the netns of pods by their addresses.
func findNetns(pods []optin.Running) ([]attach.Attachment, error) {
	entries, err := os.ReadDir(netnsDir)
	if err != nil {
		return nil, fmt.Errorf("looking for the netns of running pods: %w", err)
	}
	var found []attach.Attachment
	var errs []error
	for _, entry := range entries {
		path := filepath.Join(netnsDir, entry.Name())
		addresses, err := netns.Addresses(path)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, p := range pods {
			i := slices.IndexFunc(addresses, func(a netns.Address) bool {
				return !a.Loopback && slices.Contains(p.IPs, a.Addr)
			})
			if i < 0 {
				continue
			}
			found = append(found, attach.Attachment{
				// No runtime knows this ID, so no DEL names it. The attachment goes with the netns.
				ID:    attach.ID{ContainerID: p.Pod.UID, IfName: addresses[i].Interface},
				Netns: path, Pod: p.Pod, IPs: p.IPs,
			})
		}
	}
	return found, errors.Join(errs...)
}
