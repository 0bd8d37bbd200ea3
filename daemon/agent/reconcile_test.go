package agent

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// installed is the ruleset of a captured pod as the plugin records it.
func installed() *ruleset.Installed {
	return &ruleset.Installed{
		Ruleset: ruleset.Provisional("eth0"), Backend: "nftables", SYNGate: true, Revision: ruleset.Revision,
		Wall: ruleset.WallFull,
	}
}

// write stores a record of an attachment of h, with the identity that its netns has now.
func (a *testAgent) write(t *testing.T, h *testbed.Host, state attach.State, in *ruleset.Installed) attach.Record {
	t.Helper()
	id, err := attach.IdentifyNetns(h.Path())
	if err != nil {
		t.Fatal(err)
	}
	r := attach.Record{Attachment: attachment(h, "eth0"), NetnsID: id, State: state, Installed: in}
	if err := a.store.Write(r); err != nil {
		t.Fatal(err)
	}
	return r
}

// checkRecord checks whether the store has a record of the attachment.
func checkRecord(t *testing.T, a *testAgent, id attach.ID, want bool) {
	t.Helper()
	_, err := a.store.Read(id)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if got := err == nil; got != want {
		t.Errorf("%s: recorded %t, want %t", id, got, want)
	}
}

func TestReconcileAddsRecords(t *testing.T) {
	t.Parallel()
	captured, passed := testbed.NewHost(t, "captured"), testbed.NewHost(t, "passed")
	a := newAgent(t, unknown) // settled attachments keep their state
	in := installed()
	in.IPv6, in.SYNGate = true, false
	one, other := a.write(t, captured, attach.Captured, in), a.write(t, passed, attach.Passed, nil)
	if err := os.WriteFile(filepath.Join(a.dir, "corrupt:eth0.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		a.Reconcile(t.Context())
		if !listening(t, captured) || listening(t, passed) {
			t.Errorf("listening in the captured netns %t, in the passed one %t; want the first alone",
				listening(t, captured), listening(t, passed))
		}
		s, ok := a.statusOf(one.ID)
		if !ok || s.State != attach.Captured || s.Backend != "nftables" || len(s.Notes) != 1 ||
			!strings.Contains(s.Notes[0], "no SYN gate") {
			t.Errorf("captured: got %+v, want a note that there is no SYN gate", s)
		}
		if s, ok := a.statusOf(other.ID); !ok || s.State != attach.Passed {
			t.Errorf("passed: got %+v, want state passed", s)
		}
	}
	checkRecord(t, a, one.ID, true)
	checkRecord(t, a, other.ID, true)
}

// TestReconcileCompletesAnAttachment with the part of the record that an ADD does not have: the installed rules.
func TestReconcileCompletesAnAttachment(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	if _, err := a.Attach(t.Context(), attachment(h, "eth0")); err != nil {
		t.Fatal(err)
	}
	r := a.write(t, h, attach.Captured, installed())
	a.Reconcile(t.Context())
	if s, ok := a.statusOf(r.ID); !ok || s.Backend != "nftables" || len(s.Notes) > 0 {
		t.Errorf("got %+v, want the backend, and no notes", s)
	}
}

// TestReconcileLeavesAnUnfinishedADD to the plugin: it opens no gate, and does not take it for a capture.
func TestReconcileLeavesAnUnfinishedADD(t *testing.T) {
	t.Parallel()
	for name, decide := range map[string]decide{"captured": capture, "not captured": pass, "unknown": unknown} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := testbed.NewHost(t, "pod")
			a := newAgent(t, decide)
			r := a.write(t, h, attach.Adding, nil)
			for range 2 {
				a.Reconsider(t.Context())
				s, ok := a.statusOf(r.ID)
				if !ok || s.State != attach.Adding || len(s.Notes) != 1 || listening(t, h) || h.Traces() != "" {
					t.Errorf("got %+v, traces %q; want an unfinished ADD, and the netns untouched", s, h.Traces())
				}
				if got, err := a.store.Read(r.ID); err != nil || got.State != attach.Adding {
					t.Errorf("the record is %+v, %v; want it unchanged", got, err)
				}
			}
			h.Delete()
			a.CleanUp(t.Context())
			checkRecord(t, a, r.ID, false)
		})
	}
}

// TestReconcileDuringAnADD that the agent has decided about: its gate stays open, and the next record completes it.
func TestReconcileDuringAnADD(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	if _, err := a.Attach(t.Context(), attachment(h, "eth0")); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		state attach.State
		in    *ruleset.Installed
	}{{attach.Adding, nil}, {attach.Captured, installed()}} {
		r := a.write(t, h, step.state, step.in)
		a.Reconsider(t.Context())
		if s, ok := a.statusOf(r.ID); !ok || s.State != attach.Captured || !listening(t, h) {
			t.Errorf("%s: got %+v, listening %t; want it captured with its gate open", step.state, s, listening(t, h))
		}
	}
}

func TestReconcileRemovesRecordsOfGoneNetns(t *testing.T) {
	t.Parallel()
	for name, replaced := range map[string]bool{"gone": false, "replaced at the same path": true} {
		for when, known := range map[string]bool{"before Reconcile": false, "between two looks": true} {
			t.Run(name+" "+when, func(t *testing.T) {
				t.Parallel()
				h := testbed.NewHost(t, "pod")
				a := newAgent(t, capture)
				in := installed()
				in.SYNGate = false
				r := a.write(t, h, attach.Captured, in)
				if known {
					a.Reconcile(t.Context())
					if !listening(t, h) {
						t.Fatal("the capture port is closed")
					}
				}
				h.Delete()
				if replaced {
					testbed.Run(t, "ip", "netns", "add", h.Name)
					h.IP("link", "set", "lo", "up")
				}
				a.CleanUp(t.Context())
				a.Reconcile(t.Context())
				checkRecord(t, a, r.ID, false)
				if s, ok := a.statusOf(r.ID); ok {
					t.Errorf("got %+v, want no attachment", s)
				}
				if replaced && listening(t, h) {
					t.Error("the capture port is open in a netns without an attachment")
				}
			})
		}
	}
}

func TestReconcileRetriesToOpenAGate(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h := testbed.NewHost(t, "pod")
	taken := h.Listen("127.0.0.1:15001")
	a := newAgent(t, capture)
	r := a.write(t, h, attach.Captured, installed())
	a.Reconcile(t.Context())
	if s, ok := a.statusOf(r.ID); !ok || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "address already in use") {
		t.Errorf("the port is taken: got %+v, want a note", s)
	}
	_ = taken.Close()
	a.Reconcile(t.Context())
	if s, ok := a.statusOf(r.ID); !ok || len(s.Notes) > 0 || !listening(t, h) {
		t.Errorf("the port is free again: got %+v, listening %t; want a gate, and no note", s, listening(t, h))
	}
}

// TestReconcileEvictsOtherListeners: after a grace period, other processes lose their listeners at the capture ports of
// a pod. The agent's own listeners stay.
func TestReconcileEvictsOtherListeners(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h := testbed.NewHost(t, "pod")
	h.IP("addr", "add", "10.0.0.6/32", "dev", "lo")
	a := newAgent(t, func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		d, err := capture(at, interfaces)
		d.Ruleset.InboundPorts = []ruleset.PortRange{{First: 80, Last: 80}}
		return d, err
	})
	in := installed()
	in.Ruleset.InboundPorts = []ruleset.PortRange{{First: 80, Last: 80}}
	first := a.write(t, h, attach.Captured, in)
	hung, err := gate.Open(h.Path(), ruleset.DefaultPorts)
	if err != nil {
		t.Fatal(err)
	}
	if hung, err = hung.Widen(h.Path(), []netip.Addr{netip.MustParseAddr("10.0.0.6")}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = hung.Close() })
	second := first
	second.IfName, second.IPs = "net1", []netip.Addr{netip.MustParseAddr("10.0.0.6")}
	if err := a.store.Write(second); err != nil {
		t.Fatal(err)
	}
	a.Reconcile(t.Context())
	s, ok := a.statusOf(first.ID)
	if !ok || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "address already in use") {
		t.Errorf("within the grace period: got %+v, want a note", s)
	}
	a.evictFrom = time.Now()
	a.Reconcile(t.Context())
	for _, l := range hung.Listeners {
		if _, err := l.Accept(); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("Accept at the other listener: got %v, want %v", err, syscall.EINVAL)
		}
	}
	listeners := h.Exec("ss", "-Hltn")
	for _, address := range []string{"0.0.0.0:15001 ", "[::]:15001 ", "10.0.0.6:15006 "} {
		if strings.Count(listeners, address) != 1 {
			t.Errorf("got listeners\n%s, want one of the agent at %s", listeners, address)
		}
	}
	if s, _ := a.statusOf(first.ID); len(s.Notes) > 0 {
		t.Errorf("got %+v, want no notes", s)
	}
}

// TestReconcileSurvivesInvalidRecords: one bad file must not crash the node's daemon at every start.
func TestReconcileSurvivesInvalidRecords(t *testing.T) {
	t.Parallel()
	for _, state := range []attach.State{attach.Provisional, attach.Captured, "", "unheard of"} {
		for name, decide := range map[string]decide{"captured": capture, "not captured": pass} {
			h := testbed.NewHost(t, "pod")
			a := newAgent(t, decide)
			a.write(t, h, state, nil)
			func() {
				defer func() {
					if r := recover(); r != nil {
						t.Errorf("state %q without rules, %s: Reconcile panics: %v", state, name, r)
					}
				}()
				a.Reconcile(t.Context())
			}()
		}
	}
}
