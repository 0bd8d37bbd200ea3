package main

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/daemon/trust"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// leave prepares the end of this daemon. If sluice is being removed from the node for good, it uninstalls the plugin,
// removes the taint, releases the pods, and reports that. It does not before an update, a reboot, a drain or an
// eviction, nor if the reason of the end is not known: captured pods then wait for the next daemon.
func (d daemon) leave(ctx context.Context, p parts) (removed bool) {
	if p.node == nil || d.keeper == nil || p.agent.IsSucceeded() {
		return false
	}
	var reason string
	err := insist(ctx, func(ctx context.Context) (err error) {
		reason, err = p.node.Removed(ctx)
		return err
	})
	switch {
	case err != nil:
		d.log.Warn("the plugin stays installed, because it is not known whether sluice is being removed from this node",
			"err", err)
		return false
	case reason == "":
		d.log.Info("the plugin stays installed; connections of captured pods wait for the next daemon")
		return false
	}
	d.log.Info("sluice is being removed from this node: the plugin is uninstalled, and all pods are released",
		"reason", reason)
	// The entry goes first, so that no new pod is captured. If that fails the pods are released all the same: the mark
	// of the uninstallation lets new pods pass. If the mark fails the entry goes all the same.
	if _, err := d.keeper.Uninstall(); err != nil {
		d.log.Error("the plugin cannot be uninstalled", "err", err)
	}
	if err := insist(ctx, p.node.RemoveTaint); err != nil {
		d.log.Error("the node's taint cannot be removed, and keeps new pods off the node", "err", err)
	}
	p.agent.Dissolve(ctx)
	p.trust.watchNested()         // no pod is captured: mounts in containers go away
	return !p.agent.IsSucceeded() // else the next daemon has installed the plugin again
}

// An API server that has just started refuses requests until it knows the roles. kubelet gives the daemon minutes to
// end, and its listeners serve meanwhile.
const (
	askTime  = 15 * time.Second       // for which the daemon asks an API server that does not answer, or refuses
	askPause = 500 * time.Millisecond // between two requests
)

// insist calls ask, which sends requests to the API server, again and again while it fails.
func insist(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	for {
		if err := ask(ctx); err == nil || pause.For(ctx, askPause) != nil {
			return err
		}
	}
}

// removeFiles removes the rest of sluice's files from the node, when all parts of the daemon have ended. runtime is the
// node's container runtime.
func (d daemon) removeFiles(runtime string) error {
	errs := []error{
		attach.NewOptedInFile(d.conf.DataDir).Remove(), trust.RemoveHookFiles(d.trustDir()),
	}
	// containerd takes the plugins of a DEL from its configuration, which does not name sluice any more. CRI-O keeps
	// the configuration of the pod's ADD, and needs the binary until these pods are gone.
	if runtime == "containerd" {
		errs = append(errs, attach.NewStore(d.conf.StateDir).RemovePassed())
	}
	if err := errors.Join(append(errs, d.keeper.RemovePlugin())...); err != nil {
		return err
	}
	d.log.Info("sluice is removed from this node")
	return nil
}
