// Command sluice is the chained CNI plugin: it captures the TCP connections of the pods that opted in.
// What that takes is decided by sluiced; this binary asks it, installs the rules and keeps the record.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// gitVersion is set when a release is built.
var gitVersion = "dev"

// patience bounds one call of the plugin; runtimes have longer ones of their own.
const patience = 30 * time.Second

func main() {
	// Runtimes are started with all kinds of PATH; the iptables tools live here.
	_ = os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	skel.PluginMainFuncs(skel.CNIFuncs{
		Add: cmdAdd, Del: cmdDel, Check: cmdCheck, GC: cmdGC, Status: cmdStatus,
	}, version.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0"), "sluice "+gitVersion+": captures pods' TCP for the node's proxy")
}

func cmdAdd(args *skel.CmdArgs) error {
	conf, err := validConf(args)
	if err != nil {
		return err
	}
	result, err := conf.Result()
	if err != nil {
		return types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
	}
	pod, err := netconf.ParseArgs(args.Args)
	if err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
	}
	if !conf.Excluded(pod.Namespace) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := add(ctx, conf, attachmentOf(args, conf, pod, result)); err != nil {
			return err
		}
	}
	return conf.PrintResult(os.Stdout)
}

func cmdDel(args *skel.CmdArgs) error {
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		return types.NewError(types.ErrDecodingFailure, err.Error(), "")
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return del(ctx, conf, attach.ID{ContainerID: args.ContainerID, IfName: args.IfName})
}

func cmdCheck(args *skel.CmdArgs) error {
	conf, err := validConf(args)
	if err != nil {
		return err
	}
	if _, err := conf.Result(); err != nil {
		return types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
	}
	pod, err := netconf.ParseArgs(args.Args)
	if err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
	}
	if conf.Excluded(pod.Namespace) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return check(ctx, conf, attach.ID{ContainerID: args.ContainerID, IfName: args.IfName}, args.Netns)
}

func cmdGC(args *skel.CmdArgs) error {
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		return types.NewError(types.ErrDecodingFailure, err.Error(), "")
	}
	valid := map[attach.ID]bool{}
	for _, v := range conf.ValidAttachments {
		valid[attach.ID{ContainerID: v.ContainerID, IfName: v.IfName}] = true
	}
	records, err := attach.NewStore(conf.StateDir).List()
	errs := []error{err}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, r := range records {
		if r.Network == conf.Name && !valid[r.ID] {
			errs = append(errs, del(ctx, conf, r.ID))
		}
	}
	return errors.Join(errs...)
}

// cmdStatus says when ADD could not be served: the whole node takes no pods then, so no sooner.
func cmdStatus(args *skel.CmdArgs) error {
	conf, err := validConf(args)
	if err != nil {
		return err
	}
	if err := ruleset.Available(conf.Backend); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "no netfilter backend", err.Error())
	}
	if err := attach.NewStore(conf.StateDir).Writable(); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "attachments cannot be recorded", err.Error())
	}
	if conf.OnDaemonDown == netconf.Hold && !conf.StatusNeedsUpstream {
		return nil // ADD is served without the daemon
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// Not 50: the connections of captured pods wait until both are there.
	daemon := attach.NewClient(conf.AgentSocket)
	if conf.StatusNeedsUpstream {
		if err := daemon.Upstream(ctx); err != nil {
			return types.NewError(types.ErrLimitedConnectivity, "statusNeedsUpstream is true", err.Error())
		}
		return nil
	}
	if _, err := daemon.Summary(ctx); err != nil {
		return types.NewError(types.ErrLimitedConnectivity, "onDaemonDown is fail", err.Error())
	}
	return nil
}

func validConf(args *skel.CmdArgs) (*netconf.Conf, error) {
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, err.Error(), "")
	}
	if err := conf.Validate(); err != nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
	}
	return conf, nil
}

func attachmentOf(args *skel.CmdArgs, conf *netconf.Conf, pod attach.Pod, result *current.Result) attach.Attachment {
	a := attach.Attachment{
		ID:      attach.ID{ContainerID: args.ContainerID, IfName: args.IfName},
		Network: conf.Name, Netns: args.Netns, Pod: pod, Annotations: conf.Annotations(),
	}
	for _, ip := range result.IPs {
		if addr, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			a.IPs = append(a.IPs, addr.Unmap())
		}
	}
	return a
}

// logf tells whoever reads the runtime's log; standard output is the result's.
func logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "sluice: "+format+"\n", args...)
}
