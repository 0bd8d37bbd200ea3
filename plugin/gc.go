package main

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
)

func cmdGC(args *skel.CmdArgs) error {
	conf, err := confForRemoval(args, "cni.dev/valid-attachments")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	return gc(ctx, conf)
}

// gc deletes the network's attachments that the runtime does not list as valid. It goes on after an error.
func gc(ctx context.Context, conf *netconf.Conf) error {
	valid := map[attach.ID]bool{}
	for _, a := range conf.ValidAttachments {
		valid[attach.ID{ContainerID: a.ContainerID, IfName: a.IfName}] = true
	}
	records, err := attach.NewStore(conf.StateDir).List()
	errs := []error{err}
	for _, r := range records {
		if r.Network == conf.Name && !valid[r.ID] {
			errs = append(errs, del(ctx, conf, r.ID, r.Netns))
		}
	}
	return errors.Join(errs...)
}
