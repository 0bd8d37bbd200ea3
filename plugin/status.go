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

// status fails only if an ADD would fail now, or if the operator asked for more (statusNeedsUpstream): while STATUS
// fails, the whole node starts no pods, opted in or not.
func status(ctx context.Context, conf *netconf.Conf) error {
	if err := ruleset.Available(conf.Backend); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "no netfilter backend", err.Error())
	}
	if err := attach.NewStore(conf.StateDir).Writable(); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "attachments cannot be recorded", err.Error())
	}
	// From here on the code is 51, not 50: it says that existing containers have limited connectivity too (CNI spec,
	// section 2, "STATUS"), as connections of captured pods wait until both the daemon and the upstream are there.
	daemon := attach.NewClient(conf.AgentSocket)
	switch {
	case conf.StatusNeedsUpstream:
		if err := daemon.Upstream(ctx); err != nil {
			return types.NewError(types.ErrLimitedConnectivity, "statusNeedsUpstream is true", err.Error())
		}
	case conf.OnDaemonDown == netconf.Fail:
		if _, err := daemon.Summary(ctx); err != nil {
			return types.NewError(types.ErrLimitedConnectivity, "onDaemonDown is fail", err.Error())
		}
	}
	return nil
}
