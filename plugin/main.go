// Command sluice is the chained CNI plugin: it captures the TCP connections of the pods that opted in.
// The daemon sluiced decides about each pod; this binary asks it, installs the rules and keeps the record.
package main

import (
	"fmt"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
)

// gitVersion is set when a release is built.
var gitVersion = "dev"

// callTimeout bounds one call of the plugin, without the wait of the policy hold; runtimes have longer timeouts.
const callTimeout = 30 * time.Second

func main() {
	if len(os.Args) > 1 && os.Args[1] == "ca-hook" {
		caHook(os.Args[2:], os.Stdin)
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "ca-repair" {
		os.Exit(caRepair(os.Args[2:]))
	}
	// The iptables tools are in these directories, and not every runtime has them in its PATH.
	_ = os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	skel.PluginMainFuncs(
		skel.CNIFuncs{Add: cmdAdd, Del: cmdDel, Check: cmdCheck, GC: cmdGC, Status: cmdStatus},
		version.PluginSupports(netconf.Versions...),
		"sluice "+gitVersion+": captures pods' TCP for the node's proxy",
	)
}

// confForRemoval ignores the keys that DEL and GC do not need, except for those in needed: a pod whose DEL fails stays
// Terminating.
func confForRemoval(args *skel.CmdArgs, needed ...string) (*netconf.Conf, error) {
	conf, ignored, err := netconf.ParseForRemoval(args.StdinData, needed...)
	if err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, err.Error(), "")
	}
	for _, err := range ignored {
		logf("ignored: %s", err)
	}
	return conf, nil
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

func parsePod(args *skel.CmdArgs) (attach.Pod, error) {
	pod, err := netconf.ParseArgs(args.Args)
	if err != nil {
		return attach.Pod{}, types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
	}
	return pod, nil
}

func idOf(args *skel.CmdArgs) attach.ID {
	return attach.ID{ContainerID: args.ContainerID, IfName: args.IfName}
}

// logf writes to the runtime's log, which takes a plugin's standard error; standard output carries the result.
func logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "sluice: "+format+"\n", args...)
}
