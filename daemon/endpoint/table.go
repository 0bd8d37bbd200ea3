// Package endpoint has the network namespaces in which pods are attached. An [Endpoint] is one netns: its attachments,
// its gate, the acceptor that serves the gate, and the connections that wait there. The [Table] has all of them.
//
// The locks, in the order in which they are taken:
//
//   - Endpoint.changing is held by the one goroutine that decides about an endpoint or changes it, from Enter to Leave.
//     It may be held for seconds, while the API server is asked or rules are applied.
//   - Table.mu guards the table's maps.
//   - Endpoint.mu guards the records of one endpoint, and service.mu its gate, for readers that have not entered it.
//
// All but the first are held for moments: nothing is done under them that waits for the network, the disk, another
// process or a pod. A function whose name ends in Locked expects its caller to hold mu.
package endpoint

import (
	"errors"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// Table has the endpoints of this node.
type Table struct {
	accept func(Served) Acceptor
	policy captured.Policy
	log    *slog.Logger

	serving sync.WaitGroup // the acceptors' Serve, and connections that go direct

	// Connections that have waited too long: those that were reset, and those that went direct.
	expired, direct atomic.Uint64

	mu        sync.Mutex // guards the maps
	endpoints map[attach.NetnsID]*Endpoint
	changes   uint64                        // how many times a record was added, replaced or removed
	attached  map[attach.ID]*Endpoint       // the endpoint of each attachment
	inherited map[attach.NetnsID][]*os.File // listeners that another daemon or a proxy has handed over
}

// NewTable makes an empty table. accept makes the acceptor of one endpoint. Connections go where policy lets them.
func NewTable(accept func(Served) Acceptor, policy captured.Policy, log *slog.Logger) *Table {
	return &Table{
		accept: accept, policy: policy, log: log,
		endpoints: map[attach.NetnsID]*Endpoint{}, attached: map[attach.ID]*Endpoint{},
		inherited: map[attach.NetnsID][]*os.File{},
	}
}

// All returns every endpoint. They may change or be dropped at any time.
func (t *Table) All() []*Endpoint {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.endpoints))
}

// Get returns the endpoint of a netns, or nil.
func (t *Table) Get(id attach.NetnsID) *Endpoint {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.endpoints[id]
}

// Attached returns the netns with an attachment, by device and inode, without their cookies.
func (t *Table) Attached() map[attach.NetnsID]bool {
	all := map[attach.NetnsID]bool{}
	for _, e := range t.All() {
		if !e.isEmpty() {
			all[attach.NetnsID{Dev: e.ID.Dev, Ino: e.ID.Ino}] = true
		}
	}
	return all
}

// Find returns the endpoint that has an attachment, or nil.
func (t *Table) Find(id attach.ID) *Endpoint {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.attached[id]
}

// record notes which endpoint has an attachment; nil stands for none. An attachment that another endpoint has by now
// is left there.
func (t *Table) record(id attach.ID, e, was *Endpoint) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changes++
	switch {
	case e != nil:
		t.attached[id] = e
	case t.attached[id] == was:
		delete(t.attached, id)
	}
}

// Changes returns a number that is another one when a record has been added, replaced or removed.
func (t *Table) Changes() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changes
}

// Gone returns the attachments whose netns does not exist any more.
func (t *Table) Gone() []attach.Record {
	var gone []attach.Record
	for _, e := range t.All() {
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

// Captured returns the record of a captured pod with that UID.
func (t *Table) Captured(podUID string) (attach.Record, bool) {
	for _, e := range t.All() {
		for _, r := range e.Records() {
			if r.Pod.UID == podUID && r.State == attach.Captured {
				return r, true
			}
		}
	}
	return attach.Record{}, false
}

// PodState is how far a pod is captured.
type PodState struct {
	// State is that of an attachment that is captured or may be, if the pod has one.
	State attach.State
	// Trouble says why the pod is not in line; it is empty if it is.
	Trouble string
	// Netns is the identity of the attachment's netns.
	Netns attach.NetnsID
	// Left is how many packets left around the upstream, because the provisional capture had expired.
	Left uint64
}

// Pods returns the pods that are attached, without their UIDs.
func (t *Table) Pods() map[attach.Pod]PodState {
	pods := map[attach.Pod]PodState{}
	for _, s := range t.Snapshots() {
		pod := attach.Pod{Namespace: s.record.Pod.Namespace, Name: s.record.Pod.Name}
		if other, ok := pods[pod]; !ok || other.State == attach.Passed {
			pods[pod] = PodState{s.record.State, s.trouble, s.record.NetnsID, s.record.Uncaptured}
		}
	}
	return pods
}

// Remove forgets an attachment, and shuts the gate of its netns if it was the last one there.
func (t *Table) Remove(id attach.ID) (attach.Record, bool) {
	e := t.Find(id)
	if e == nil {
		return attach.Record{}, false
	}
	e = t.Enter(e.ID)
	defer e.Leave()
	return e.remove(id)
}

// Offer stops accepting at each gate and calls send with its listeners, until send fails. Until Release or Resume,
// nothing may change an endpoint.
func (t *Table) Offer(send func(attach.NetnsID, []*os.File) error) error {
	for _, e := range t.All() {
		files, err := e.service.pause()
		if err == nil && files != nil {
			err = send(e.ID, files)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Resume accepts again after an Offer that did not lead to a hand-over.
func (t *Table) Resume() {
	for _, e := range t.All() {
		if err := e.service.resume(); err != nil {
			t.log.Error("accepting cannot be resumed", "netnsID", e.ID.String(), "err", err)
		}
	}
}

// Release closes this process's listeners. Another daemon or a proxy may hold them too. The connections that came
// through the gates go on.
func (t *Table) Release() {
	for _, e := range t.All() {
		e.service.release()
	}
	t.DropInherited()
}

// End resets every connection that came through a gate, and returns when all have ended. Release comes first.
func (t *Table) End() {
	for _, e := range t.All() {
		e.service.end()
	}
	t.serving.Wait()
}

// Drained returns a channel that is closed when every connection has ended. Release comes first.
func (t *Table) Drained() <-chan struct{} {
	done := make(chan struct{})
	go func() { // ends with the connections, or with the process
		defer close(done)
		t.serving.Wait()
	}()
	return done
}

// Expired and Direct count the connections that had waited too long: those that were reset, and those that went direct.
func (t *Table) Expired() uint64 { return t.expired.Load() }

// Direct is described at Expired.
func (t *Table) Direct() uint64 { return t.direct.Load() }
