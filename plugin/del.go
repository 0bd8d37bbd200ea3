package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

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
	return del(ctx, conf, idOf(args), args.Netns)
}

// del undoes an ADD. A record, ruleset or netns that is gone already is no error: the runtime repeats a DEL that
// fails, and the pod could never be deleted. If the rules cannot be removed all stays as it is, for the next DEL. netns
// is the path that the runtime names. It may be empty; without a record no rules are removed then.
func del(ctx context.Context, conf *netconf.Conf, id attach.ID, netns string) error {
	if id.Validate() != nil {
		return nil // ADD does not accept such an ID
	}
	store := attach.NewStore(conf.StateDir)
	captured, err := removeAttachment(ctx, store, id, netns)
	if err != nil {
		return fmt.Errorf("detaching %s: %w", id, err)
	}
	if !captured {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, forgetTimeout)
		defer cancel()
	}
	// First the record, then the daemon: a daemon that starts in between must not find the record and take on the pod.
	return detach(ctx, attach.NewClient(conf.AgentSocket), id)
}

// forgetTimeout bounds how long the DEL of a pod without rules waits for a daemon that hangs. The daemon closes nothing
// for such a pod, and finds out by itself that the netns has gone.
const forgetTimeout = time.Second

// removeAttachment removes the rules of an attachment and its record, and reports whether it may have had rules. The
// daemon does not change the rules meanwhile.
func removeAttachment(ctx context.Context, store attach.Store, id attach.ID, netns string) (captured bool, err error) {
	defer lock(ctx, store, id, netns)()
	record, err := store.Read(id)
	captured = !errors.Is(err, os.ErrNotExist) && (record.State != attach.Passed || record.Installed != nil)
	switch {
	case err == nil:
		announce(store, record)
		err = uninstall(ctx, store, record)
	case errors.Is(err, os.ErrNotExist):
		err = uninstallUnrecorded(ctx, store, netns)
	default:
		logf("%s; its rules are removed by their names", err)
		err = uninstallUnrecorded(ctx, store, netns)
	}
	if err != nil {
		return captured, err
	}
	return captured, store.Remove(id)
}

// lock keeps the daemon from restoring rules while they are removed. A netns that is gone needs no lock.
func lock(ctx context.Context, store attach.Store, id attach.ID, path string) (release func()) {
	if path == "" {
		return func() {}
	}
	netns, err := attach.IdentifyNetns(path)
	if err == nil {
		release, err = store.Lock(ctx, netns)
	}
	if err == nil {
		return release
	}
	if !errors.Is(err, attach.ErrNetnsGone) {
		logf("detaching %s: %s", id, err)
	}
	return func() {}
}

// announce writes into the record that its rules go. The daemon, which restores rules that it misses, leaves the netns
// alone from then on, also if this DEL fails or is killed.
func announce(store attach.Store, r attach.Record) {
	if r.Installed == nil {
		return
	}
	r.State = attach.Removing
	if err := store.Write(r); err != nil { // such as on a full disk
		logf("detaching %s: %s", r.Attachment, err)
	}
}

// uninstall removes the rules from a netns that outlives its last attachment. While the container has other
// attachments in the netns, it only removes the interface of r from the rules.
func uninstall(ctx context.Context, store attach.Store, r attach.Record) error {
	netns, err := attach.IdentifyNetns(r.Netns)
	if errors.Is(err, attach.ErrNetnsGone) || err == nil && netns != r.NetnsID {
		return nil // its rules are gone with it
	}
	if r.Installed == nil && r.State != attach.Adding {
		return uninstallUnrecorded(ctx, store, r.Netns) // the daemon may have been killed while it captured the pod
	}
	siblings, err := store.Siblings(r.ID, r.NetnsID)
	if err != nil {
		logf("detaching %s: %s", r.Attachment, err) // a damaged record: no other verb can do anything with it either
	}
	for _, s := range siblings {
		if s.Installed != nil {
			return withdraw(ctx, store, r, *s.Installed)
		}
	}
	if slices.ContainsFunc(siblings, func(s attach.Record) bool { return s.State == attach.Adding }) {
		return nil // the last of them removes the rules
	}
	if err := removeRules(ctx, r.Netns, r.Installed); err != nil {
		return err
	}
	if err := ruleset.EndPatience(r.Netns); err != nil {
		logf("detaching %s: %s", r.Attachment, err) // the netns ends later
	}
	return nil
}

// withdraw removes the interface of r from the rules that the container's other attachments share.
func withdraw(ctx context.Context, store attach.Store, r attach.Record, shared ruleset.Installed) error {
	others := shared.Ruleset
	others.Interfaces = slices.DeleteFunc(slices.Clone(others.Interfaces), func(name string) bool {
		return name == r.IfName
	})
	installed, err := ruleset.Apply(ctx, r.Netns, others, shared.Backend, &shared)
	if err != nil {
		return err
	}
	if err := store.Share(r.ID, r.NetnsID, &installed); err != nil {
		// Such as on a full disk. The records still lead to the rules, and name one interface too many.
		logf("detaching %s: %s", r.Attachment, err)
	}
	return nil
}

// removeRules removes the rules from a netns. installed is nil if an ADD has not finished. Without the tools that
// installed them, the rules of iptables-nft can be removed nevertheless.
func removeRules(ctx context.Context, netns string, installed *ruleset.Installed) error {
	if installed == nil {
		return ruleset.Purge(ctx, netns)
	}
	err := installed.Remove(ctx, netns, nil)
	if err == nil {
		return nil
	}
	if purged := ruleset.Purge(ctx, netns); purged != nil {
		return errors.Join(err, purged)
	}
	logf("%s; removed by their names", err)
	return nil
}

// uninstallUnrecorded removes the rules of sluice from a netns, unless another attachment there has them. The netns of
// nearly every pod without a record is that of an excluded pod, and has none.
func uninstallUnrecorded(ctx context.Context, store attach.Store, netns string) error {
	if netns == "" {
		return nil
	}
	id, err := attach.IdentifyNetns(netns)
	if errors.Is(err, attach.ErrNetnsGone) {
		return nil
	}
	if err == nil {
		err = id.CheckNotNode() // a node may be a captured pod of another node
	}
	found := false
	if err == nil {
		found, err = ruleset.Leftover(ctx, netns)
	}
	if !found {
		if err != nil {
			logf("looking for rules in netns %s: %s", netns, err) // no reason to keep a pod that has none
		}
		return nil
	}
	records, err := store.List()
	if err != nil {
		logf("%s", err)
	}
	for _, r := range records {
		if r.NetnsID == id && (r.Installed != nil || r.State == attach.Adding) {
			return nil
		}
	}
	return ruleset.Purge(ctx, netns)
}

// detach tells the daemon that the attachment is gone. A daemon that is down is no error: when it starts, it finds
// no record to take on.
func detach(ctx context.Context, daemon *attach.Client, id attach.ID) error {
	if err := daemon.Detach(ctx, id); err != nil && !errors.Is(err, attach.ErrDaemonDown) {
		return err
	}
	return nil
}
