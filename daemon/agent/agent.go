// Package agent keeps the attachments of the node: it decides about them, has their gates opened and shut, and keeps
// them in line with the records on disk and with the orchestrator.
//
// Every change is made within the tenure (package handover), with the endpoint entered (package endpoint).
package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/handover"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	// reconcileInterval is the time between looks at the records and the netns, and between ticks of the endpoints.
	reconcileInterval = time.Second
	// reconsiderInterval is the time between attempts to bring attachments in line that could not be before.
	reconsiderInterval = 10 * time.Second
	// drainTimeout bounds how long a daemon that has handed over goes on with the connections that are open.
	drainTimeout = 5 * time.Minute
)

// Upstream tells whether the proxies that accept connections are there.
type Upstream interface {
	Status() attach.UpstreamStatus
}

// Agent is the daemon's part of the conversation with the plugin.
type Agent struct {
	orchestrator Orchestrator
	events       events
	store        attach.Store
	upstream     Upstream
	table        *endpoint.Table
	returning    time.Duration
	log          *slog.Logger
	tenure       *handover.Tenure

	// Set by Start, before other goroutines use the agent.
	socket    *unixsock.Listener
	evictFrom time.Time // from then on other processes may be evicted from capture ports; zero for never

	mu      sync.Mutex // guards watched; no lock is taken under it
	watched time.Time  // the state of the record directory that was read last; zero to read it again
}

// Config is the parts that an agent works with.
type Config struct {
	Orchestrator Orchestrator
	Store        attach.Store
	Upstream     Upstream
	Table        *endpoint.Table
	// ProxyReturn is how long proxies may take to return listeners of a daemon that hangs. Then, or at once if it is 0,
	// the agent closes those listeners.
	ProxyReturn time.Duration
	Log         *slog.Logger
}

// New makes an agent.
func New(c Config) *Agent {
	return &Agent{
		orchestrator: c.Orchestrator, events: events{orchestrator: c.Orchestrator, last: map[string]string{}},
		store: c.Store, upstream: c.Upstream, table: c.Table, returning: c.ProxyReturn, log: c.Log,
		tenure: handover.NewTenure(),
	}
}

// Run keeps the attachments in line until ctx ends or another daemon has taken over. In the first case it releases
// every gate before it returns. The rules stay, so connections wait for the next daemon, unless a proxy holds the
// listeners. In the second case it returns when the last connection has ended, or resets the rest after drainTimeout.
func (a *Agent) Run(ctx context.Context) error {
	reconcile, reconsider := time.NewTicker(reconcileInterval), time.NewTicker(reconsiderInterval)
	defer reconcile.Stop()
	defer reconsider.Stop()
	a.Reconsider(ctx)
	for ctx.Err() == nil && !a.tenure.IsSucceeded() {
		a.Reconcile(ctx)
		select {
		case now := <-reconcile.C:
			a.tick(now)
		case <-reconsider.C:
			a.Reconsider(ctx)
		case <-a.orchestrator.Changed():
			a.Reconsider(ctx)
		case <-ctx.Done():
		case <-a.tenure.Succeeded():
		}
	}
	if a.tenure.IsSucceeded() {
		a.drain()
	}
	a.tenure.End() // no ADD opens a gate after Release
	a.table.Release()
	a.table.End()
	return nil
}

// drain waits until the last connection has ended, but no longer than drainTimeout. Waiting connections keep their
// timeout. The connections of pods that go end: the next daemon does not know them, and they would pin the netns.
func (a *Agent) drain() {
	rescan := time.NewTicker(reconcileInterval)
	defer rescan.Stop()
	drained, timeout := a.table.Drained(), time.After(drainTimeout)
	for {
		select {
		case now := <-rescan.C:
			a.tick(now)
			for _, r := range a.gone() {
				a.table.Remove(r.ID)
			}
		case <-drained:
			return
		case <-timeout:
			return
		}
	}
}

// tick ends waits that have lasted too long, and passes the warnings on to the pods.
func (a *Agent) tick(now time.Time) {
	a.table.Tick(now, a.upstream.Status(), func(e *endpoint.Endpoint, n endpoint.Notice) {
		if a.tenure.IsSucceeded() { // the successor reports
			return
		}
		for _, r := range e.Records() {
			a.orchestrator.Report(r.Pod, true, n.Reason, n.Message)
		}
	})
}

// gone returns the attachments whose netns does not exist any more.
func (a *Agent) gone() []attach.Record {
	var gone []attach.Record
	for _, e := range a.table.All() {
		for _, r := range e.Records() {
			if isGone(r.Netns, e.ID) {
				gone = append(gone, r)
			}
		}
	}
	return gone
}

// isGone compares without the cookie: while a gate is open, its netns cannot have been replaced by one with the same
// inode.
func isGone(path string, id attach.NetnsID) bool {
	now, err := attach.StatNetns(path)
	return err == nil && !now.SameFile(id) || errors.Is(err, attach.ErrNetnsGone)
}

// wasDeleted reports whether a DEL has removed the record meanwhile.
func (a *Agent) wasDeleted(r attach.Record) bool {
	_, err := a.store.Read(r.ID)
	return errors.Is(err, os.ErrNotExist)
}
