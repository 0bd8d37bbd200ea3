// Package agent keeps the attachments of the node: it decides about them, has their gates opened and shut, and keeps
// them in line with the records on disk and with the orchestrator.
//
// Every change is made within the tenure (package handover), with the endpoint entered (package endpoint).
package agent

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/handover"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/daemon/watch"
	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	// reconcileInterval is the time between looks at the records, and between ticks of the endpoints.
	reconcileInterval = time.Second
	// cleanUpInterval is the time between looks for netns that are gone and captures that have ended. A look takes some
	// microseconds for each netns.
	cleanUpInterval = 3 * time.Second
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
	events       *events
	settler      settler
	upstream     Upstream
	table        *endpoint.Table
	store        attach.Store
	records      *recordWatch
	returning    time.Duration
	tenure       *handover.Tenure
	watch        *watch.Watcher
	watching     watching
	verifier     verifier // of Run's goroutine
	restored     atomic.Uint64
	uncaptured   uncaptured
	enrolled     atomic.Uint64
	search       netnsSearch
	pulse        pulse
	started      atomic.Bool // Start has succeeded
	log          *slog.Logger

	// Set by Start, before other goroutines use the agent.
	socket    *unixsock.Listener
	evictFrom time.Time // from then on other processes may be evicted from capture ports; zero for never
}

// watching is how far the watched netns are those of the table.
type watching struct {
	sync.Mutex
	synced uint64 // the state of the table whose netns are watched
	failed bool   // the last attempt to watch them failed
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
	events := &events{orchestrator: c.Orchestrator, last: map[string]told{}}
	return &Agent{
		orchestrator: c.Orchestrator, events: events,
		settler:  settler{c.Orchestrator, events, c.Store, c.Log, &atomic.Bool{}},
		upstream: c.Upstream, table: c.Table, store: c.Store, records: &recordWatch{store: c.Store},
		returning: c.ProxyReturn, tenure: handover.NewTenure(), log: c.Log,
		watch: watch.New(), verifier: verifier{restored: map[attach.NetnsID][]time.Time{}},
	}
}

// Run keeps the attachments in line until ctx ends or another daemon has taken over. In the first case it releases
// every gate before it returns. The rules stay, so connections wait for the next daemon, unless a proxy holds the
// listeners. In the second case it returns when the last connection has ended, or resets the rest after drainTimeout.
func (a *Agent) Run(ctx context.Context) error {
	reconcile, reconsider := time.NewTicker(reconcileInterval), time.NewTicker(reconsiderInterval)
	cleanUp := time.NewTicker(cleanUpInterval)
	defer reconcile.Stop()
	defer reconsider.Stop()
	defer cleanUp.Stop()
	defer a.watch.Close()
	a.CleanUp(ctx)
	a.Reconsider(ctx)
	for ctx.Err() == nil && !a.tenure.IsSucceeded() {
		a.pulse.beat()
		a.Reconcile(ctx)
		a.watched()
		select {
		case now := <-reconcile.C:
			_ = a.tenure.Do(func() error { // not while the gates are handed over
				a.tick(now)
				return nil
			})
			a.verifyChanged(ctx, now)
		case <-cleanUp.C:
			a.CleanUp(ctx)
		case <-a.watch.Changed():
			a.verifyChanged(ctx, time.Now())
		case <-reconsider.C:
			a.Reconsider(ctx)
		case <-a.orchestrator.Changed():
			a.Reconsider(ctx)
		case <-ctx.Done():
		case <-a.tenure.Succeeded():
		}
	}
	if a.tenure.IsSucceeded() {
		a.watch.Close() // the successor watches
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
			for _, r := range a.table.Gone() {
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
