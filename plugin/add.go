package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// codeRefused is the error code of an attachment that the daemon will never take as it is, such as one of
// a pod with a bad annotation. Codes from 100 on are the plugin's own (CNI spec, section 5, "Error").
const codeRefused = 100

// add captures a, or records that it is not captured. After an error the netns is as it was found.
func add(ctx context.Context, conf *netconf.Conf, a attach.Attachment) error {
	if err := a.Validate(); err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
	}
	netns, err := attach.IdentifyNetns(a.Netns)
	if err != nil {
		return types.NewError(types.ErrInvalidNetNS, err.Error(), "")
	}
	p := pod{conf: conf, store: attach.NewStore(conf.StateDir), daemon: attach.NewClient(conf.AgentSocket)}
	p.record = attach.Record{Attachment: a, NetnsID: netns}
	if err := p.lookup(); err != nil {
		return err
	}
	decision, err := p.decide(ctx)
	if err != nil {
		return err
	}
	if err := p.carryOut(ctx, decision); err != nil {
		return errors.Join(fmt.Errorf("attaching %s: %w", a, err), p.undo(ctx))
	}
	if err := p.hold(decision.Late); err != nil {
		if err := p.undo(ctx); err != nil {
			logf("attaching %s: %s", a, err)
		}
		return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("attaching %s: %s", a, err), "the pod is held until the upstream is there")
	}
	return nil
}

// pod is one ADD on its way.
type pod struct {
	conf     *netconf.Conf
	store    attach.Store
	daemon   *attach.Client
	record   attach.Record
	known    bool               // this attachment was added before
	siblings []attach.Record    // other attachments in the same netns
	was      *ruleset.Installed // what is installed in the netns now
	in       *ruleset.Installed // what this ADD installed
}

// lookup finds out whether the netns has a ruleset already: from an earlier ADD of the same attachment,
// or from the container's attachment to another network.
func (p *pod) lookup() error {
	siblings, err := p.store.Siblings(p.record.ID, p.record.NetnsID)
	if err != nil {
		return err
	}
	p.siblings = siblings
	all := siblings
	if r, err := p.store.Read(p.record.ID); err == nil && r.NetnsID == p.record.NetnsID {
		p.known = true
		all = append([]attach.Record{r}, siblings...)
	}
	for _, r := range all {
		if r.Installed != nil {
			p.was = r.Installed
			break
		}
	}
	return nil
}

// decide asks the daemon. Without it nobody knows whether the pod opted in, so it is captured until
// somebody does.
func (p *pod) decide(ctx context.Context) (attach.Decision, error) {
	d, err := p.daemon.Attach(ctx, p.record.Attachment)
	var refused *attach.RefusedError
	switch {
	case err == nil:
		switch {
		case d.Provisional:
			p.record.State = attach.Provisional
		case d.Capture:
			p.record.State = attach.Captured
		default:
			p.record.State = attach.Passed
		}
		return d, nil
	case errors.As(err, &refused) && refused.Final:
		return d, types.NewError(codeRefused, fmt.Sprintf("attaching %s: %s", p.record.Attachment, refused), "")
	case errors.As(err, &refused):
		return d, types.NewError(types.ErrTryAgainLater, fmt.Sprintf("attaching %s: %s", p.record.Attachment, refused), "")
	case p.conf.OnDaemonDown == netconf.Fail:
		return d, types.NewError(types.ErrTryAgainLater, fmt.Sprintf("attaching %s: %s", p.record.Attachment, err), "onDaemonDown is fail")
	}
	logf("attaching %s: %s; its TCP waits until the daemon is there", p.record.Attachment, err)
	p.record.State = attach.Provisional
	r := ruleset.Provisional(p.record.IfName)
	for _, s := range p.siblings {
		if !slices.Contains(r.Interfaces, s.IfName) {
			r.Interfaces = append(r.Interfaces, s.IfName)
		}
	}
	return attach.Decision{Capture: true, Ruleset: &r}, nil
}

// carryOut installs the ruleset, then records it: a record without rules would be a promise not kept.
func (p *pod) carryOut(ctx context.Context, d attach.Decision) error {
	if d.Capture {
		in, err := ruleset.Apply(ctx, p.record.Netns, *d.Ruleset, p.conf.Backend, p.was)
		if err != nil {
			return err
		}
		p.in = &in
		if !in.SYNGate {
			logf("%s: this kernel has no socket match, so no SYN gate: while sluiced is down its connections are refused, not held", p.record.Attachment)
		}
		if err := ruleset.Patience(p.record.Netns, p.record.State == attach.Captured); err != nil {
			logf("%s: gives up sooner if sluiced is late: %s", p.record.Attachment, err)
		}
	} else if p.was != nil && len(p.siblings) == 0 {
		if err := p.was.Remove(ctx, p.record.Netns, nil); err != nil {
			return err
		}
	}
	p.record.Installed = p.in
	if err := p.store.Write(p.record); err != nil || p.in == nil || len(p.siblings) == 0 {
		return err
	}
	return p.store.Share(p.record.ID, p.record.NetnsID, p.in)
}

// maxHold is for a pod that is held without a timeout: runtimes have one, of minutes, and try again.
const maxHold = time.Minute

// hold waits for the upstream, if the pod's policy is to.
func (p *pod) hold(late attach.Late) error {
	if late.Policy != attach.Hold {
		return nil
	}
	limit := cmp.Or(late.Timeout, maxHold)
	if err := attach.WaitUntil(context.Background(), limit, p.daemon.Upstream); err != nil {
		return fmt.Errorf("after %s: %w", limit, err)
	}
	return nil
}

// undo puts the netns back. A ruleset that was there is applied again, never taken away.
func (p *pod) undo(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // what failed may have been the time running out
	var errs []error
	switch {
	case p.was != nil:
		if _, err := ruleset.Apply(ctx, p.record.Netns, p.was.Ruleset, p.conf.Backend, p.was); err != nil {
			errs = append(errs, err)
		}
	case p.in != nil:
		errs = append(errs, p.in.Remove(ctx, p.record.Netns, nil))
	}
	if !p.known {
		errs = append(errs, p.detach(ctx))
	}
	return errors.Join(errs...)
}

func (p *pod) detach(ctx context.Context) error { return detach(ctx, p.daemon, p.record.ID) }
