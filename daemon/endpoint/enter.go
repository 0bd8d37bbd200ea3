package endpoint

import (
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func newEndpoint(t *Table, id attach.NetnsID) *Endpoint {
	s := &service{table: t, id: id}
	e := &Endpoint{
		ID: id, table: t, service: s, lateness: lateness{service: s}, attachments: map[attach.ID]attach.Record{},
	}
	s.records = e.Records
	return e
}

// Enter returns the endpoint of a netns, for the caller alone to decide about and to change until Leave.
func (t *Table) Enter(id attach.NetnsID) *Endpoint {
	for {
		t.mu.Lock()
		e := t.endpoints[id]
		if e == nil {
			e = newEndpoint(t, id)
			t.endpoints[id] = e
		}
		t.mu.Unlock()
		e.changing.Lock()
		t.mu.Lock()
		current := t.endpoints[id] == e
		t.mu.Unlock()
		if current {
			return e
		}
		e.changing.Unlock() // the endpoint was dropped while we waited
	}
}

// Leave lets others enter the endpoint, and drops it if nothing is attached to it.
func (e *Endpoint) Leave() {
	defer e.changing.Unlock()
	if !e.isEmpty() {
		return
	}
	e.Shut() // before another endpoint can take its place
	e.table.drop(e)
}

func (e *Endpoint) isEmpty() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.attachments) == 0
}

// drop removes an endpoint without attachments from the table, and closes listeners that were inherited for it
// meanwhile.
func (t *Table) drop(e *Endpoint) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.endpoints, e.ID)
	unixsock.Close(t.inherited[e.ID])
	delete(t.inherited, e.ID)
}
