package main

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-cni/sluice/daemon/agent"
	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/kube"
	"github.com/sluice-cni/sluice/daemon/nested"
	"github.com/sluice-cni/sluice/daemon/proxies"
	"github.com/sluice-cni/sluice/daemon/trust"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// reasonNotTrusted is the reason of the events about containers that do not trust the proxy's CA.
const reasonNotTrusted = "SluiceCANotTrusted"

// checkInterval is the time between looks for containers that are to be given the CA since an annotation has changed,
// or for another time.
const checkInterval = time.Minute

// watchInterval is the time between looks for pods that have opted in for nested containers.
const watchInterval = time.Second

// listTime bounds the wait for the API server's list of pods before the daemon connects to the container runtime.
const listTime = 2 * time.Second

// podTrust connects package trust, which knows containers, with the captured pods.
type podTrust struct {
	*trust.Trust
	nested       *nested.Engine
	table        *endpoint.Table
	hub          *proxies.Hub
	orchestrator agent.Orchestrator

	watching sync.Mutex // held while the pods are listed and told: the last list counts

	mu      sync.Mutex      // guards changed
	changed map[string]bool // UIDs of pods whose state may have changed
	wake    chan struct{}   // receives when there are some

	reported map[string]string // the last event on each pod, by its UID; of the goroutine of report
}

func newPodTrust(
	d daemon, node *kube.Node, table *endpoint.Table, hub *proxies.Hub, orchestrator agent.Orchestrator,
) (*podTrust, error) {
	t := &podTrust{
		table: table, hub: hub, orchestrator: orchestrator,
		changed: map[string]bool{}, wake: make(chan struct{}, 1), reported: map[string]string{},
	}
	var stopping func() bool
	var running func(string) []string
	if node != nil {
		running = node.RunningContainers
		listed := time.Now().Add(listTime)
		stopping = func() bool {
			if node.Ready() != nil && time.Now().Before(listed) {
				return true // the pods are not known yet
			}
			return node.Terminating()
		}
	}
	var err error
	t.Trust, err = trust.New(trust.Config{
		Socket: d.conf.NRISocket, CAFile: d.conf.CAFile, Dir: d.trustDir(),
		Hook: d.plugin, Plugin: d.plugin, Proc: findProc(),
		Wanted: t.wanted, Older: t.older, Served: d.served(), Running: running, Stopping: stopping,
		Changed: t.noteChange, CAChanged: func() { t.nested.Update() }, Log: d.log,
	})
	t.nested = nested.New(nested.Config{
		CAFile: filepath.Join(d.trustDir(), trust.CAName), Proc: findProc(), Changed: t.noteChange, Tell: t.tell,
		Log: d.log,
	})
	return t, err
}

// trustDir is the folder of package trust.
func (d daemon) trustDir() string { return filepath.Join(d.conf.StateDir, "trust") }

// served returns the UIDs of the pods whose connections a proxy may have gone on to serve while no daemon ran: it keeps
// their listeners. Without such a proxy connections wait for the daemon.
func (d daemon) served() []string {
	if d.conf.Upstream.Protocol != config.Sockets {
		return nil
	}
	records, _ := attach.NewStore(d.conf.StateDir).List() // the agent reports records that cannot be read
	var uids []string
	for _, r := range records {
		if r.State == attach.Captured {
			uids = append(uids, r.Pod.UID)
		}
	}
	return uids
}

// hostProc is where the DaemonSet mounts the node's /proc.
const hostProc = "/host/proc"

// findProc returns the folder of the node's processes.
func findProc() string {
	if _, err := os.Stat(filepath.Join(hostProc, "1")); err == nil {
		return hostProc
	}
	return "/proc"
}

// wanted reports whether the containers of a pod are to be given the CA.
func (t *podTrust) wanted(podUID string) bool {
	r, ok := t.table.Captured(podUID)
	return ok && podUID != "" && r.Trust.CA && t.hasPart(r)
}

// older reports whether a pod ran before it was captured.
func (t *podTrust) older(podUID string) bool {
	r, ok := t.table.Captured(podUID)
	return ok && r.Installed != nil && r.Installed.Ruleset.KeepOlder
}

// watchNested has the nested containers looked after in the pods that have opted in.
func (t *podTrust) watchNested() {
	t.watching.Lock()
	defer t.watching.Unlock()
	pods := map[uint32]string{}
	for _, e := range t.table.All() {
		for _, r := range e.Records() {
			if isNestedWanted(r) {
				pods[uint32(e.ID.Ino)] = r.Pod.UID // the kernel's inodes of namespaces have 32 bits
			}
		}
	}
	t.nested.Watch(pods)
}

// isNestedWanted reports whether a pod has opted in. One that declines the CA has not: with the policy to inspect, the
// TLS of all its nested containers is inspected, because their users say that these have the CA already.
func isNestedWanted(r attach.Record) bool {
	return r.State == attach.Captured && r.Pod.UID != "" && r.Trust.CA && r.Trust.Nested == attach.Inspect
}

// of describes the trust of the pod with these records.
func (t *podTrust) of(records []attach.Record) attach.PodTrust {
	for _, r := range records {
		if r.State == attach.Captured {
			return t.ofRecord(r)
		}
	}
	return attach.PodTrust{}
}

// hasPart reports whether sluice has a part in the trust of a pod with this record: there is a policy for it, or a CA.
func (t *podTrust) hasPart(r attach.Record) bool {
	return r.Trust.TLS != "" || r.Trust.Nested != "" || t.HasCA()
}

// ofRecord describes the trust of a pod with this record. It is empty if sluice has no part in it.
func (t *podTrust) ofRecord(r attach.Record) attach.PodTrust {
	if !t.hasPart(r) {
		return attach.PodTrust{}
	}
	d := attach.PodTrust{TLS: r.Trust.TLS, Nested: r.Trust.Nested, State: string(truststore.Unknown)}
	if t.HasCA() {
		d.TLS, d.Nested = cmp.Or(d.TLS, attach.Pass), cmp.Or(d.Nested, attach.Pass)
	}
	if r.Trust.CA {
		d.State = string(t.State(r.Pod.UID).State)
	}
	if isNestedWanted(r) {
		t.addNested(&d, r.Pod.UID)
	}
	return d
}

// maxTold bounds the nested containers that proxies are told of. The TLS of others is passed through.
const maxTold = 256

// addNested adds the states of nested containers. Those in the pod's own network cannot be told from the pod.
func (t *podTrust) addNested(d *attach.PodTrust, podUID string) {
	d.Containers = map[netip.Addr]string{}
	containers, _ := t.nested.State(podUID)
	for _, c := range containers {
		if c.PodNetwork {
			d.State = worse(d.State, c.State)
			continue
		}
		for _, a := range c.Addresses {
			if len(d.Containers) < maxTold {
				d.Containers[a] = worse(cmp.Or(d.Containers[a], string(truststore.Trusted)), c.State)
			}
		}
	}
}

// worse is the worst of two states.
func worse(a string, b truststore.State) string {
	return string(truststore.Worst(truststore.State(a), b))
}

// status adds the trust of an attachment's containers to its status.
func (t *podTrust) status(a *attach.AttachmentStatus) {
	id, err := attach.ParseID(a.Attachment)
	if err != nil {
		return
	}
	e := t.table.Find(id)
	if e == nil {
		return // removed meanwhile
	}
	r, ok := e.Record(id)
	if !ok || r.State != attach.Captured || !r.Trust.CA || !t.hasPart(r) {
		return
	}
	pod := t.State(r.Pod.UID)
	a.Trust = string(pod.State)
	if pod.Note != "" {
		a.Notes = append(a.Notes, "trust in the proxy's CA: "+pod.Note)
	}
	for _, c := range pod.Containers {
		a.Containers = append(a.Containers, attach.ContainerTrust{Name: c.Name, Trust: string(c.State), Note: c.Note})
		if c.Note != "" {
			a.Notes = append(a.Notes, fmt.Sprintf("container %s, trust in the proxy's CA: %s", c.Name, c.Note))
		}
	}
	if r.Trust.Nested == attach.Inspect {
		t.nestedStatus(a, r.Pod.UID)
	}
}

// nestedStatus adds the nested containers to the status of an attachment.
func (t *podTrust) nestedStatus(a *attach.AttachmentStatus, podUID string) {
	containers, problem := t.nested.State(podUID)
	if problem != "" {
		a.Notes = append(a.Notes, "TLS of nested containers is passed through: "+problem)
	}
	for _, c := range containers {
		a.Nested = append(a.Nested, attach.ContainerTrust{Name: c.Name, Trust: string(c.State), Note: c.Note})
		if c.Note != "" {
			a.Notes = append(a.Notes, fmt.Sprintf("nested container %s, trust in the proxy's CA: %s", c.Name, c.Note))
		}
	}
}

// run serves the container runtime until ctx ends, and tells proxies and pods of changes until serving ends.
func (t *podTrust) run(ctx, serving context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return t.Run(ctx) })
	group.Go(func() error { return t.nested.Run(serving) })
	group.Go(func() error {
		check, watch := time.NewTicker(checkInterval), time.NewTicker(watchInterval)
		defer check.Stop()
		defer watch.Stop()
		changes := t.table.Changes()
		for {
			select {
			case <-t.wake:
				t.report()
			case <-check.C:
				t.Check()
				t.watchNested() // a failure is tried again
			case <-watch.C:
				if now := t.table.Changes(); now != changes {
					changes = now
					t.watchNested()
				}
			case <-serving.Done():
				return nil
			}
		}
	})
	return group.Wait()
}

// tellTime bounds the wait until a proxy knows that a container trusts the CA. The TLS of one that it does not know is
// passed through. It takes milliseconds, and more only with a proxy that is busy or has stopped.
const tellTime = time.Second

// tell implements nested.Config.Tell.
func (t *podTrust) tell() {
	ctx, cancel := context.WithTimeout(context.Background(), tellTime)
	defer cancel()
	t.hub.Tell(ctx)
}

// noteChange implements trust.Config.Changed.
func (t *podTrust) noteChange(podUID string) {
	t.hub.Refresh() // a message to a proxy takes less time than the start of the container's process
	t.mu.Lock()
	t.changed[podUID] = true
	t.mu.Unlock()
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// report makes events on pods with containers that do not trust the CA.
func (t *podTrust) report() {
	t.mu.Lock()
	changed := t.changed
	t.changed = map[string]bool{}
	t.mu.Unlock()
	for uid := range changed {
		r, ok := t.table.Captured(uid)
		if !ok {
			delete(t.reported, uid)
			continue
		}
		var messages []string
		for _, c := range t.State(uid).Containers {
			if c.State != truststore.Trusted && !c.Pending {
				messages = append(messages, fmt.Sprintf("container %s (%s): %s", c.Name, c.State, c.Note))
			}
		}
		message := strings.Join(messages, "\n")
		if message != "" && message != t.reported[uid] {
			t.orchestrator.Report(r.Pod, true, reasonNotTrusted, "the proxy's CA is not trusted in full: "+message)
		}
		t.reported[uid] = message
	}
}

// trusting accepts the connections of a pod once its containers have been given the CA. They wait until then.
type trusting struct {
	endpoint.Acceptor
	pod   attach.Pod
	trust *podTrust
}

// Serve implements endpoint.Acceptor.
func (a trusting) Serve(ctx, accepting context.Context, g *gate.Gate) {
	a.trust.watchNested()
	if a.trust.Ready(accepting, a.pod.UID) == nil {
		a.Acceptor.Serve(ctx, accepting, g)
	}
}
