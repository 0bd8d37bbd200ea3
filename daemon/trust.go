package main

import (
	"cmp"
	"context"
	"fmt"
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

// listTime bounds the wait for the API server's list of pods before the daemon connects to the container runtime.
const listTime = 2 * time.Second

// podTrust connects package trust, which knows containers, with the captured pods.
type podTrust struct {
	*trust.Trust
	table        *endpoint.Table
	hub          *proxies.Hub
	orchestrator agent.Orchestrator

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
		Socket: d.conf.NRISocket, CAFile: d.conf.CAFile, Dir: filepath.Join(d.conf.StateDir, "trust"),
		Hook: d.plugin, Plugin: d.plugin, Proc: findProc(),
		Wanted: t.wanted, Older: t.older, Served: d.served(), Running: running, Stopping: stopping,
		Changed: t.noteChange, Log: d.log,
	})
	return t, err
}

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
	return d
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
}

// run serves the container runtime until ctx ends, and tells proxies and pods of changes until serving ends.
func (t *podTrust) run(ctx, serving context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return t.Run(ctx) })
	group.Go(func() error {
		check := time.NewTicker(checkInterval)
		defer check.Stop()
		for {
			select {
			case <-t.wake:
				t.report()
			case <-check.C:
				t.Check()
			case <-serving.Done():
				return nil
			}
		}
	})
	return group.Wait()
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
	if a.trust.Ready(accepting, a.pod.UID) == nil {
		a.Acceptor.Serve(ctx, accepting, g)
	}
}
