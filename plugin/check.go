package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

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
	listeners, err := checkListeners(netns, r)
	if err != nil {
		return err
	}
	sysctls, err := ruleset.CheckPatience(netns)
	if err != nil {
		return err
	}
	before, err := r.Installed.Before(netns)
	if err != nil {
		return err
	}
	if drift = slices.Concat(drift, before, listeners, sysctls); len(drift) > 0 {
		return fmt.Errorf("%s is not captured as it should be: %s", r.Attachment, strings.Join(drift, "; "))
	}
	return nil
}
