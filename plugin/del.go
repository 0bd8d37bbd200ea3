package main

import (
	"context"
	"errors"
	"os"
	"slices"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func cmdDel(args *skel.CmdArgs) error {
	conf, err := confForRemoval(args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	return del(ctx, conf, idOf(args))
}

// del undoes an ADD. A record, ruleset or netns that is gone already is no error: the runtime repeats a DEL that
// fails, and the pod could never be deleted.
func del(ctx context.Context, conf *netconf.Conf, id attach.ID) error {
	if id.Validate() != nil {
		return nil // ADD does not accept such an ID
	}
	store := attach.NewStore(conf.StateDir)
	var errs []error
	record, err := store.Read(id)
	switch {
	case err == nil:
		errs = append(errs, uninstall(ctx, store, record))
	case !errors.Is(err, os.ErrNotExist):
		logf("%s; its rules are not removed, but end with the netns", err)
	}
	// First the record, then the daemon: a daemon that starts in between must not find the record and take on the pod.
	errs = append(errs, store.Remove(id))
	errs = append(errs, detach(ctx, attach.NewClient(conf.AgentSocket), id))
	return errors.Join(errs...)
}

// uninstall removes the rules from a netns that outlives its last attachment. While the container has other
// attachments in the netns, it only removes the interface of r from the rules.
func uninstall(ctx context.Context, store attach.Store, r attach.Record) error {
	if r.Installed == nil {
		return nil
	}
	netns, err := attach.IdentifyNetns(r.Netns)
	if errors.Is(err, attach.ErrNetnsGone) || err == nil && netns != r.NetnsID {
		return nil // its rules are gone with it
	}
	siblings, err := store.Siblings(r.ID, r.NetnsID)
	if err != nil {
		return err
	}
	if len(siblings) == 0 {
		return r.Installed.Remove(ctx, r.Netns, nil)
	}
	others := r.Installed.Ruleset
	others.Interfaces = slices.DeleteFunc(slices.Clone(others.Interfaces), func(name string) bool {
		return name == r.IfName
	})
	installed, err := ruleset.Apply(ctx, r.Netns, others, r.Installed.Backend, r.Installed)
	if err != nil {
		return err
	}
	return store.Share(r.ID, r.NetnsID, &installed)
}

// detach tells the daemon that the attachment is gone. A daemon that is down is no error: when it starts, it finds
// no record to take on.
func detach(ctx context.Context, daemon *attach.Client, id attach.ID) error {
	if err := daemon.Detach(ctx, id); err != nil && !errors.Is(err, attach.ErrDaemonDown) {
		return err
	}
	return nil
}
