package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/netconf"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// codeRefused is the error code for an attachment that the daemon refuses for good, such as that of a pod with a
// bad annotation. Codes from 100 on are the plugin's own (CNI spec, section 5, "Error").
const codeRefused = 100

// defaultHold limits the policy hold if it has no timeout: runtimes have one, of minutes, and call ADD again.
const defaultHold = time.Minute

func cmdAdd(args *skel.CmdArgs) error {
	conf, err := validConf(args)
	if err != nil {
		return err
	}
	result, err := conf.Result()
	if err != nil {
		return types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
	}
	pod, err := parsePod(args)
	if err != nil {
		return err
	}
	if !conf.Excluded(pod.Namespace) {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		if err := add(ctx, conf, attachmentOf(args, conf, pod, result)); err != nil {
			return err
		}
	}
	return conf.PrintResult(os.Stdout)
}

func attachmentOf(args *skel.CmdArgs, conf *netconf.Conf, pod attach.Pod, result *current.Result) attach.Attachment {
	at := attach.Attachment{
		ID: idOf(args), Network: conf.Name, Netns: args.Netns, Pod: pod, Annotations: conf.Annotations(),
	}
	for _, ip := range result.IPs {
		if addr, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			at.IPs = append(at.IPs, addr.Unmap())
		}
	}
	return at
}

// add captures at, or records that it is not captured. After an error the netns is as it was before.
func add(ctx context.Context, conf *netconf.Conf, at attach.Attachment) error {
	if err := at.Validate(); err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
	}
	netns, err := attach.IdentifyNetns(at.Netns)
	if err != nil {
		return types.NewError(types.ErrInvalidNetNS, err.Error(), "")
	}
	if err := netns.CheckNotNode(); err != nil {
		return types.NewError(types.ErrInvalidNetNS, fmt.Sprintf("attaching %s: netns %s: %s", at, at.Netns, err), "")
	}
	a := addition{conf: conf, store: attach.NewStore(conf.StateDir), daemon: attach.NewClient(conf.AgentSocket)}
	a.record = attach.Record{Attachment: at, NetnsID: netns}
	optedIn, known := conf.OptedIn()
	optedOut := known && !optedIn
	if err := a.findPrevious(); err != nil && !optedOut {
		return err
	}
	if err := a.clearRemains(ctx); err != nil {
		return fmt.Errorf("attaching %s: removing the rules of an unfinished ADD: %w", at, err)
	}
	if optedOut && a.previous == nil {
		a.pass()
		return nil
	}
	decision, err := a.askDaemon(ctx)
	if err != nil {
		return err
	}
	if err := a.carryOut(ctx, decision); err != nil {
		return errors.Join(fmt.Errorf("attaching %s: %w", at, err), a.undo(ctx))
	}
	if err := a.hold(decision.Late); err != nil {
		if err := a.undo(ctx); err != nil {
			logf("attaching %s: %s", at, err)
		}
		return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("attaching %s: %s", at, err),
			"the pod is held until the upstream is there")
	}
	return nil
}

// addition is one ADD in progress.
type addition struct {
	conf      *netconf.Conf
	store     attach.Store
	daemon    *attach.Client
	record    attach.Record
	earlier   *attach.Record     // the record of a finished ADD of this attachment in this netns; nil if there is none
	remains   bool               // an unfinished ADD of this attachment may have left rules in this netns
	siblings  []attach.Record    // the container's other attachments in the same netns
	previous  *ruleset.Installed // the ruleset in the netns before this ADD; nil if there is none
	recorded  bool               // this ADD has written a record, and may have installed rules
	installed *ruleset.Installed // the ruleset that this ADD installed; nil if it has not
}

// findPrevious finds the ruleset that is in the netns already: from an earlier ADD of the same attachment, or
// from the container's attachment to another network.
func (a *addition) findPrevious() error {
	siblings, err := a.store.Siblings(a.record.ID, a.record.NetnsID)
	if err != nil {
		return err
	}
	a.siblings = siblings
	inNetns := siblings
	r, err := a.store.Read(a.record.ID)
	switch {
	case err != nil:
		a.remains = !errors.Is(err, os.ErrNotExist) // a damaged record does not tell
	case r.NetnsID != a.record.NetnsID:
	case r.State == attach.Adding:
		a.remains = true
	default:
		a.earlier = &r
		inNetns = append([]attach.Record{r}, siblings...)
	}
	for _, r := range inNetns {
		if r.Installed != nil {
			a.previous = r.Installed
			break
		}
	}
	return nil
}

// clearRemains removes the rules of an unfinished ADD, which may have used another backend than this one will. Rules
// that the siblings share are replaced instead.
func (a *addition) clearRemains(ctx context.Context) error {
	if !a.remains || a.previous != nil {
		return nil
	}
	return ruleset.Purge(ctx, a.record.Netns)
}

// pass records that a pod which did not opt in passes. It needs neither the daemon nor the disk: without the record the
// daemon still finds the pod if it gets the label later.
func (a *addition) pass() {
	a.record.State = attach.Passed
	if err := a.store.Write(a.record); err != nil {
		logf("attaching %s: it passes without a record: %s", a.record.Attachment, err)
	}
}

// askDaemon gets the decision, and sets the record's state by it. If the daemon is down it is unknown whether the pod
// opted in, so the pod is captured provisionally, unless onDaemonDown is fail. After an uninstallation no daemon is
// expected, and the pod passes.
func (a *addition) askDaemon(ctx context.Context) (attach.Decision, error) {
	at := a.record.Attachment
	d, err := a.daemon.Attach(ctx, at)
	var refused *attach.RefusedError
	switch {
	case err == nil:
		a.record.State, a.record.Trust = d.State(), d.Trust
		if d.Provisional {
			a.limitHold(d.Ruleset, d.Reason)
		}
		return d, nil
	case errors.As(err, &refused) && refused.Final:
		return d, types.NewError(codeRefused, fmt.Sprintf("attaching %s: %s", at, refused), "")
	case errors.As(err, &refused):
		return d, types.NewError(types.ErrTryAgainLater, fmt.Sprintf("attaching %s: %s", at, refused), "")
	case attach.Uninstalled(a.conf.StateDir):
		logf("attaching %s: sluice was uninstalled from this node, so the pod passes: %s", at, err)
		a.record.State = attach.Passed
		return attach.Decision{}, nil
	case a.conf.OnDaemonDown == netconf.Fail:
		return d, types.NewError(types.ErrTryAgainLater, fmt.Sprintf("attaching %s: %s", at, err),
			"onDaemonDown is fail")
	}
	a.record.State = attach.Provisional
	r := ruleset.Provisional(a.record.IfName).Inherit(a.previous)
	for _, s := range a.siblings {
		if !slices.Contains(r.Interfaces, s.IfName) {
			r.Interfaces = append(r.Interfaces, s.IfName)
		}
	}
	a.limitHold(&r, err.Error())
	return attach.Decision{Capture: true, Ruleset: &r}, nil
}

// limitHold lets the provisional capture r expire, unless something says that the pod may have opted in. It says so in
// the log, because no process may run when the rules expire.
func (a *addition) limitHold(r *ruleset.Ruleset, unknown string) {
	at := a.record.Attachment
	reason, limited := a.holdReason()
	if !limited {
		logf("attaching %s: %s; its TCP waits until the daemon knows its labels: %s", at, unknown, reason)
		return
	}
	r.ExpiresAfter = a.conf.HoldAtMost()
	logf("attaching %s: %s; its TCP waits for %s, and passes UNCAPTURED then unless the daemon has decided: %s",
		at, unknown, r.ExpiresAfter, reason)
}

// holdReason says why a pod with unknown labels is held, and whether for a limited time. Without a reason for a limit
// the pod is held until its labels are known.
func (a *addition) holdReason() (reason string, limited bool) {
	if a.conf.HoldAtMost() == 0 {
		return "provisionalFor is 0", false
	}
	if in, _ := a.conf.OptedIn(); in {
		return "its annotation " + attach.OptInAnnotation + " says that it opted in", false
	}
	if a.previous != nil && a.previous.Ruleset.ExpiresAfter == 0 {
		return "it is captured already", false
	}
	list, err := attach.NewOptedInFile(a.conf.DataDir).Read()
	if err != nil {
		return err.Error(), false
	}
	if list.Has(a.record.Pod.Namespace) {
		return "its namespace opted in, or a pod there did", false
	}
	as := list.AsOf.Format(time.RFC3339)
	return fmt.Sprintf("as of %s nothing in namespace %s had opted in", as, a.record.Pod.Namespace), true
}

// carryOut installs the ruleset, then writes the record: a record never claims rules that are not installed. It
// announces them first, so that DEL finds them if this process is killed in between.
func (a *addition) carryOut(ctx context.Context, d attach.Decision) error {
	// The daemon restores rules that differ from the record. Without a lock, as on a full disk, the record fails too.
	release, err := a.store.Lock(ctx, a.record.NetnsID)
	if errors.Is(err, attach.ErrBusy) {
		return err
	}
	if err == nil {
		defer release()
	}
	if d.Capture {
		if err := a.announce(); err != nil {
			return err
		}
		if err := a.install(ctx, *d.Ruleset); err != nil {
			return err
		}
	} else if a.previous != nil && len(a.siblings) == 0 {
		if err := a.previous.Remove(ctx, a.record.Netns, nil); err != nil {
			return err
		}
	}
	a.record.Installed = a.installed
	if err := a.store.Write(a.record); err != nil {
		return err
	}
	a.recorded = true
	if a.installed == nil || len(a.siblings) == 0 {
		return nil
	}
	return a.store.Share(a.record.ID, a.record.NetnsID, a.installed)
}

// announce records that rules may be in the netns from now on, unless an earlier record says so.
func (a *addition) announce() error {
	if a.earlier != nil && a.earlier.Installed != nil {
		return nil
	}
	r := a.record
	r.State = attach.Adding
	if err := a.store.Write(r); err != nil {
		return err
	}
	a.recorded = true
	return nil
}

func (a *addition) install(ctx context.Context, r ruleset.Ruleset) error {
	installed, err := ruleset.Apply(ctx, a.record.Netns, r, a.conf.Backend, a.previous)
	if err != nil {
		return err
	}
	a.installed = &installed
	if r.ExpiresAfter > 0 && installed.Ruleset.ExpiresAfter == 0 {
		logf("%s: this kernel lacks nftables, so its TCP waits without a limit", a.record.Attachment)
	}
	if !installed.SYNGate {
		logf("%s: this kernel has no socket match, so there is no SYN gate: "+
			"while sluiced is down its connections are refused, not held", a.record.Attachment)
	}
	if installed.Wall != ruleset.WallFull {
		logf("%s: this kernel lacks nftables or its hook for frames, so the wall does not see all packets that leave "+
			"the pod", a.record.Attachment)
	}
	if err := ruleset.Patience(a.record.Netns, a.record.State == attach.Captured); err != nil {
		logf("%s: its connections time out sooner if sluiced is late: %s", a.record.Attachment, err)
	}
	return nil
}

// hold waits for the upstream if the policy is to hold. The time that it takes is not part of callTimeout.
func (a *addition) hold(late attach.Late) error {
	if late.Policy != attach.Hold {
		return nil
	}
	timeout := cmp.Or(late.Timeout, defaultHold)
	if err := attach.WaitUntil(context.Background(), timeout, a.daemon.Upstream); err != nil {
		return fmt.Errorf("after %s: %w", timeout, err)
	}
	return nil
}

// undo restores the netns and the record. A ruleset that was there before is applied again and never removed, so that
// there is no moment without capture. If the rules cannot be removed, the record that announces them stays, for DEL.
func (a *addition) undo(ctx context.Context) error {
	// The error to undo may be the end of ctx.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	if err := a.undoLocked(ctx); err != nil || a.earlier != nil {
		return err
	}
	return detach(ctx, a.daemon, a.record.ID) // after the record, as in del
}

// undoLocked restores the rules and the record. The daemon does not change them meanwhile.
func (a *addition) undoLocked(ctx context.Context) error {
	defer lock(ctx, a.store, a.record.ID, a.record.Netns)()
	if a.recorded && a.previous == nil {
		announce(a.store, a.record)
	}
	if err := a.undoRules(ctx); err != nil {
		return err
	}
	switch {
	case a.earlier != nil && a.recorded:
		return a.store.Write(*a.earlier)
	case a.earlier != nil:
		return nil
	}
	return a.store.Remove(a.record.ID)
}

func (a *addition) undoRules(ctx context.Context) error {
	switch {
	case a.previous != nil:
		_, err := ruleset.Apply(ctx, a.record.Netns, a.previous.Ruleset, a.conf.Backend, a.previous)
		return err
	case a.recorded: // an error of Apply may leave a part of them
		return removeRules(ctx, a.record.Netns, a.installed)
	default:
		return nil
	}
}
