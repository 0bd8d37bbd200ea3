package main

import (
	"context"
	"errors"
	"os"
	"slices"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// del undoes an ADD. What is not there any more is no error, or the pod would never go away.
func del(ctx context.Context, conf *netconf.Conf, id attach.ID) error {
	if id.Validate() != nil {
		return nil // ADD would not have taken it
	}
	store := attach.NewStore(conf.StateDir)
	var errs []error
	record, err := store.Read(id)
	switch {
	case err == nil:
		errs = append(errs, uninstall(ctx, store, record))
	case !errors.Is(err, os.ErrNotExist):
		logf("%s; its rules go with the netns", err)
	}
	// The record goes before the daemon is told: one that starts in between must not take it up again.
	errs = append(errs, store.Remove(id))
	errs = append(errs, detach(ctx, attach.NewClient(conf.AgentSocket), id))
	return errors.Join(errs...)
}

// uninstall takes the rules out of a netns that outlives its last attachment; what is left of several keeps
// those that are its own.
func uninstall(ctx context.Context, store attach.Store, r attach.Record) error {
	if r.Installed == nil {
		return nil
	}
	if now, err := attach.IdentifyNetns(r.Netns); errors.Is(err, attach.ErrNetnsGone) || err == nil && now != r.NetnsID {
		return nil
	}
	siblings, err := store.Siblings(r.ID, r.NetnsID)
	if err != nil {
		return err
	}
	if len(siblings) == 0 {
		return r.Installed.Remove(ctx, r.Netns, nil)
	}
	rest := r.Installed.Ruleset
	rest.Interfaces = slices.DeleteFunc(slices.Clone(rest.Interfaces), func(name string) bool { return name == r.IfName })
	in, err := ruleset.Apply(ctx, r.Netns, rest, r.Installed.Backend, r.Installed)
	if err != nil {
		return err
	}
	return store.Share(r.ID, r.NetnsID, &in)
}

// detach tells the daemon, if it is there. One that is not will find neither record nor netns.
func detach(ctx context.Context, daemon *attach.Client, id attach.ID) error {
	if err := daemon.Detach(ctx, id); err != nil && !errors.Is(err, attach.ErrDaemonDown) {
		return err
	}
	return nil
}
