package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// check compares what ADD did with what is there now, and names each difference.
func check(ctx context.Context, conf *netconf.Conf, id attach.ID, netns string) error {
	r, err := attach.NewStore(conf.StateDir).Read(id)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("attachment %s was never recorded: was it added before sluice was in the chain?", id)
	}
	if err != nil {
		return err
	}
	if r.Installed == nil {
		return nil
	}
	now, err := attach.IdentifyNetns(netns)
	if err != nil {
		return err
	}
	if now != r.NetnsID {
		return fmt.Errorf("%s: netns %s is not the one that was captured", r.Attachment, netns)
	}
	drift, err := r.Installed.Check(ctx, netns)
	if err != nil {
		return err
	}
	silent, err := notListening(netns, r.Installed.IPv6)
	if err != nil {
		return err
	}
	if drift = append(drift, silent...); len(drift) > 0 {
		return fmt.Errorf("%s is not captured as it should be: %s", r.Attachment, strings.Join(drift, "; "))
	}
	return nil
}

// notListening names the families in which nobody listens on the capture port.
func notListening(netns string, ipv6 bool) (missing []string, err error) {
	families := []string{"tcp"}
	if ipv6 {
		families = append(families, "tcp6")
	}
	err = ns.WithNetNSPath(netns, func(ns.NetNS) error {
		for _, f := range families {
			listens, err := listening("/proc/thread-self/net/" + f)
			if err != nil {
				return err
			}
			if !listens {
				missing = append(missing, fmt.Sprintf("nothing listens on %s port %d: is sluiced running?", f, ruleset.OutboundPort))
			}
		}
		return nil
	})
	return missing, err
}

// listening reads a table as proc_pid_net(5) describes it: sl, local_address, rem_address, st, …
func listening(table string) (bool, error) {
	f, err := os.Open(table)
	if err != nil {
		return false, err
	}
	defer f.Close() //nolint:errcheck // only read
	const stateListen = "0A"
	port := fmt.Sprintf(":%04X", ruleset.OutboundPort)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		w := strings.Fields(lines.Text())
		if len(w) > 3 && strings.HasSuffix(w[1], port) && w[3] == stateListen {
			return true, nil
		}
	}
	return false, lines.Err()
}
