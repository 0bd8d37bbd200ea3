package endpoint

import (
	"errors"
	"os"
	"testing"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// openGate opens a gate of another process in the netns of h.
func openGate(t *testing.T, h *testbed.Host) *gate.Gate {
	t.Helper()
	g, err := gate.Open(h.Path(), ruleset.DefaultPorts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.Close() })
	return g
}

// TestReturnKeepsWantedListeners: the endpoint is captured and has no gate.
func TestReturnKeepsWantedListeners(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	r := record(t, h, attach.Captured)
	e := table.Enter(r.NetnsID)
	e.Add(r)
	e.Leave()
	proxy := openGate(t, h)
	dial(t, h) // waits in the accept queue
	if !table.Return(r.NetnsID.String(), passed(t, proxy.Files())) {
		t.Fatal("Return: got unwanted, want wanted")
	}
	again := passed(t, proxy.Files())
	if table.Return(r.NetnsID.String(), again) || !isClosed(again) {
		t.Errorf("second Return: listeners closed %t; want them unwanted and closed", isClosed(again))
	}
	e = table.Enter(r.NetnsID)
	defer e.Leave()
	if err := e.Open(r.Attachment, outboundOnly()); err != nil {
		t.Fatal(err)
	}
	checkSame(t, e.service.current().Files(), proxy.Files())
	if n, err := e.service.current().Queued(); n != 1 || err != nil {
		t.Errorf("got %d connections queued, %v; want 1", n, err)
	}
}

// TestReturnClosesUnwantedListeners. The listeners that other processes hold stay open.
func TestReturnClosesUnwantedListeners(t *testing.T) {
	t.Parallel()
	for name, state := range map[string]attach.State{"passed": attach.Passed, "provisional": attach.Provisional} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := testbed.NewHost(t, "pod")
			table := newTable(t)
			r := record(t, h, state)
			e := table.Enter(r.NetnsID)
			e.Add(r)
			e.Leave()
			checkUnwanted(t, table, r.NetnsID, openGate(t, h))
		})
	}
	t.Run("unknown netns", func(t *testing.T) {
		t.Parallel()
		h := testbed.NewHost(t, "pod")
		checkUnwanted(t, newTable(t), identify(t, h), openGate(t, h))
	})
	t.Run("listeners of another netns", func(t *testing.T) {
		t.Parallel()
		h := testbed.NewHost(t, "pod")
		table := newTable(t)
		r := record(t, h, attach.Captured)
		e := table.Enter(r.NetnsID)
		e.Add(r)
		e.Leave()
		checkUnwanted(t, table, r.NetnsID, openGate(t, testbed.NewHost(t, "other")))
	})
	t.Run("endpoint with a gate", func(t *testing.T) {
		t.Parallel()
		h := testbed.NewHost(t, "pod")
		table := newTable(t)
		e := table.capture(t, h, attach.Late{})
		before := passed(t, e.service.current().Files())
		checkUnwanted(t, table, e.ID, e.service.current())
		checkSame(t, e.service.current().Files(), before)
	})
}

// checkUnwanted returns the listeners of g for a netns, and checks that only the returned descriptors are closed.
func checkUnwanted(t *testing.T, table *testTable, id attach.NetnsID, g *gate.Gate) {
	t.Helper()
	files := passed(t, g.Files())
	if table.Return(id.String(), files) || !isClosed(files) {
		t.Errorf("Return: listeners closed %t; want them unwanted and closed", isClosed(files))
	}
	if isClosed(g.Files()) {
		t.Error("the listeners of the other process are closed")
	}
}

// TestResumeAcceptsAgain after an Offer that failed. Connections that came meanwhile are accepted then.
func TestResumeAcceptsAgain(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	table := newTable(t)
	table.accepting = true
	e := table.capture(t, h, attach.Late{})
	a := table.acceptor(e)
	failure := errors.New("the other daemon has gone")
	if err := table.Offer(func(attach.NetnsID, []*os.File) error { return failure }); !errors.Is(err, failure) {
		t.Errorf("Offer: got %v, want %v", err, failure)
	}
	if err := receive(t, a.ended); !errors.Is(err, ErrHandedOver) {
		t.Errorf("cause of the end of accepting: got %v, want %v", err, ErrHandedOver)
	}
	dial(t, h)
	testbed.Eventually(t, "the connection waits", func() bool {
		n, err := e.service.current().Queued()
		return n == 1 && err == nil
	})
	if len(a.accepted) > 0 {
		t.Error("a connection was accepted after Offer")
	}
	table.Resume()
	_ = receive(t, a.accepted).Close()
	dial(t, h)
	_ = receive(t, a.accepted).Close()
}

// TestReleasedListenersLiveOnElsewhere: the process that received them accepts the connections.
func TestReleasedListenersLiveOnElsewhere(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	old, next := newTable(t), newTable(t)
	next.accepting = true
	e := old.capture(t, h, attach.Late{})
	passing := testbed.NewHost(t, "passed") // has no gate, so nothing of it is offered
	r := record(t, passing, attach.Passed)
	plain := old.Enter(r.NetnsID)
	plain.Add(r)
	plain.Leave()
	dial(t, h)
	received := map[attach.NetnsID][]*os.File{}
	err := old.Offer(func(id attach.NetnsID, files []*os.File) error {
		received[id] = passed(t, files)
		return nil
	})
	if err != nil || len(received) != 1 || received[e.ID] == nil {
		t.Fatalf("Offer: got listeners of %d netns, %v; want those of %s", len(received), err, e.ID)
	}
	checkSame(t, received[e.ID], e.service.current().Files())
	next.Inherit(received)
	old.Release()
	if err := receive(t, old.acceptor(e).ended); !errors.Is(err, ErrHandedOver) {
		t.Errorf("cause of the end of accepting: got %v, want %v", err, ErrHandedOver)
	}
	receive(t, old.Drained())
	a := next.acceptor(next.capture(t, h, attach.Late{}))
	_ = receive(t, a.accepted).Close() // it waited before the hand-over
	dial(t, h)
	_ = receive(t, a.accepted).Close()
}
