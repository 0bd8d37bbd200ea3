package main

import (
	"context"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func cmdStatus(args *skel.CmdArgs) error {
	conf, err := validConf(args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	return status(ctx, conf)
}

// status fails only if the ADD of every pod would fail now, or if the operator asked for more (statusNeedsUpstream):
// while STATUS fails, the whole node starts no pods, opted in or not. With optIn: annotation a pod that did not opt in
// needs nothing of sluice, so ADD fails for the others, one by one.
func status(ctx context.Context, conf *netconf.Conf) error {
	daemon := attach.NewClient(conf.AgentSocket)
	if conf.OptIn != netconf.OptInAnnotation {
		if err := addFails(ctx, conf, daemon); err != nil {
			return err
		}
	}
	if conf.StatusNeedsUpstream {
		if err := daemon.Upstream(ctx); err != nil {
			return types.NewError(types.ErrLimitedConnectivity, "statusNeedsUpstream is true", err.Error())
		}
	}
	return nil
}

// addFails returns the reason for which the ADD of a pod would fail now, if the plugin does not know that the pod did
// not opt in.
func addFails(ctx context.Context, conf *netconf.Conf, daemon *attach.Client) error {
	if err := ruleset.Available(conf.Backend); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "no netfilter backend", err.Error())
	}
	if err := attach.NewStore(conf.StateDir).Writable(); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "attachments cannot be recorded", err.Error())
	}
	if conf.OnDaemonDown == netconf.Fail {
		// The code is 51, not 50: it says that existing containers have limited connectivity too (CNI spec, section 2,
		// "STATUS"), as connections of captured pods wait until both the daemon and the upstream are there.
		if _, err := daemon.Summary(ctx); err != nil {
			return types.NewError(types.ErrLimitedConnectivity, "onDaemonDown is fail", err.Error())
		}
	}
	return nil
}
