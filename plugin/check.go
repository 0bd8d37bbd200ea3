package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func cmdCheck(args *skel.CmdArgs) error {
	conf, err := validConf(args)
	if err != nil {
		return err
	}
	if _, err := conf.Result(); err != nil {
		return types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
	}
	pod, err := parsePod(args)
	if err != nil {
		return err
	}
	if conf.Excluded(pod.Namespace) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	return check(ctx, conf, idOf(args), args.Netns)
}

// check compares the record of an ADD with the rules and the listeners in the netns, and names each difference.
func check(ctx context.Context, conf *netconf.Conf, id attach.ID, netns string) error {
	r, err := attach.NewStore(conf.StateDir).Read(id)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("attachment %s was never recorded: was it added before sluice was in the chain?", id)
	}
	if err != nil {
		return err
	}
	if r.State == attach.Adding {
		return fmt.Errorf("%s: its ADD has not finished", r.Attachment)
	}
	if r.Installed == nil {
		return nil
	}
	netnsID, err := attach.IdentifyNetns(netns)
	if err != nil {
		return err
	}
	if netnsID != r.NetnsID {
		return fmt.Errorf("%s: netns %s is not the one that was captured", r.Attachment, netns)
	}
	drift, err := r.Installed.Check(ctx, netns)
	if err != nil {
		return err
	}
	missing, err := missingListeners(netns, r.Installed)
	if err != nil {
		return err
	}
	if drift = append(drift, missing...); len(drift) > 0 {
		return fmt.Errorf("%s is not captured as it should be: %s", r.Attachment, strings.Join(drift, "; "))
	}
	return nil
}

// missingListeners names the families in which no socket listens on the outbound capture port.
func missingListeners(netns string, in *ruleset.Installed) (missing []string, err error) {
	families := []string{"tcp"}
	if in.IPv6 {
		families = append(families, "tcp6")
	}
	port := in.Ruleset.CapturePorts().Outbound
	err = ns.WithNetNSPath(netns, func(ns.NetNS) error {
		for _, f := range families {
			listens, err := hasListener("/proc/thread-self/net/"+f, port)
			if err != nil {
				return err
			}
			if !listens {
				missing = append(missing, fmt.Sprintf("nothing listens on %s port %d: is sluiced running?", f, port))
			}
		}
		return nil
	})
	return missing, err
}

// hasListener looks for a port in a table of sockets. The columns of the table are sl, local_address, rem_address, st,
// … (proc_pid_net(5)).
func hasListener(table string, port uint16) (bool, error) {
	f, err := os.Open(table)
	if err != nil {
		return false, err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	const stateListen = "0A"
	suffix := fmt.Sprintf(":%04X", port)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		columns := strings.Fields(lines.Text())
		if len(columns) > 3 && strings.HasSuffix(columns[1], suffix) && columns[3] == stateListen {
			return true, nil
		}
	}
	return false, lines.Err()
}
