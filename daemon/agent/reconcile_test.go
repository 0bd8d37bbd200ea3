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

// write puts a record of h in its present netns into the store.
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

func TestReconcileTakesUpRecords(t *testing.T) {
	t.Parallel()
	captured, passed := testbed.NewHost(t, "captured"), testbed.NewHost(t, "passed")
	a := newAgent(t, unknown) // what is settled stays so
	in := &ruleset.Installed{Ruleset: ruleset.Provisional("eth0"), Backend: "nftables", IPv6: true, Revision: ruleset.Revision}
	one, other := a.write(t, captured, attach.Captured, in), a.write(t, passed, attach.Passed, nil)
	if err := os.WriteFile(filepath.Join(a.dir, "corrupt:eth0.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		a.Reconcile(t.Context())
		if !listening(t, captured) || listening(t, passed) {
			t.Errorf("listening in captured %t, in passed %t", listening(t, captured), listening(t, passed))
		}
		s, ok := a.of(one.ID)
		if !ok || s.State != attach.Captured || s.Backend != "nftables" || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "no SYN gate") {
			t.Errorf("captured: got %+v, want a note that there is no SYN gate", s)
		}
		if s, ok := a.of(other.ID); !ok || s.State != attach.Passed {
			t.Errorf("passed: got %+v", s)
		}
	}
	checkRecord(t, a, one.ID, true)
	checkRecord(t, a, other.ID, true)
}

// TestReconcileLearnsFromARecord what the attachment did not say: how it was installed.
func TestReconcileLearnsFromARecord(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	if _, err := a.Attach(t.Context(), attachment(h, "eth0")); err != nil {
		t.Fatal(err)
	}
	r := a.write(t, h, attach.Captured, &ruleset.Installed{Ruleset: ruleset.Provisional("eth0"), Backend: "nftables", SYNGate: true, Revision: ruleset.Revision})
	a.Reconcile(t.Context())
	if s, ok := a.of(r.ID); !ok || s.Backend != "nftables" || len(s.Notes) > 0 {
		t.Errorf("got %+v, want the backend", s)
	}
}

func TestReconcileDropsRecordsOfNetnsThatAreGone(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]bool{"gone": false, "made again at the same path": true} {
		for when, known := range map[string]bool{"before the start": false, "afterwards": true} {
			t.Run(name+" "+when, func(t *testing.T) {
				t.Parallel()
				h := testbed.NewHost(t, "pod")
				a := newAgent(t, capture)
				in := &ruleset.Installed{Ruleset: ruleset.Provisional("eth0"), Backend: "nftables", Revision: ruleset.Revision}
				r := a.write(t, h, attach.Captured, in)
				if known {
					a.Reconcile(t.Context())
					if !listening(t, h) {
						t.Fatal("nobody listens")
					}
				}
				h.Delete()
				if again {
					testbed.Run(t, "ip", "netns", "add", h.Name)
					h.IP("link", "set", "lo", "up")
				}
				a.Reconcile(t.Context())
				checkRecord(t, a, r.ID, false)
				if s, ok := a.of(r.ID); ok {
					t.Errorf("got %+v, want it dropped", s)
				}
				if again && listening(t, h) {
					t.Error("somebody listens in a netns that nobody has attached")
				}
			})
		}
	}
}

func TestReconcileTriesAgain(t *testing.T) {
	// Not parallel: what another test forks would hold the closed sockets until it has become a program.
	h := testbed.NewHost(t, "pod")
	taken := h.Listen("127.0.0.1:15001")
	a := newAgent(t, capture)
	r := a.write(t, h, attach.Captured, &ruleset.Installed{Ruleset: ruleset.Provisional("eth0"), Backend: "nftables", SYNGate: true, Revision: ruleset.Revision})
	a.Reconcile(t.Context())
	if s, ok := a.of(r.ID); !ok || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "address already in use") {
		t.Errorf("the port is taken: got %+v, want a note", s)
	}
	_ = taken.Close()
	a.Reconcile(t.Context())
	if s, ok := a.of(r.ID); !ok || len(s.Notes) > 0 || !listening(t, h) {
		t.Errorf("the port is free again: got %+v, listening %t", s, listening(t, h))
	}
}

// TestEviction: who has had the ports of a captured pod for too long loses them; what is our own already stays.
func TestEviction(t *testing.T) {
	// Not parallel, as above.
	h := testbed.NewHost(t, "pod")
	h.IP("addr", "add", "10.0.0.6/32", "dev", "lo")
	a := newAgent(t, func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		d, err := capture(at, interfaces)
		d.Ruleset.InboundPorts = []ruleset.PortRange{{First: 80, Last: 80}}
		return d, err
	})
	rules := ruleset.Provisional("eth0")
	rules.InboundPorts = []ruleset.PortRange{{First: 80, Last: 80}}
	first := a.write(t, h, attach.Captured, &ruleset.Installed{Ruleset: rules, Backend: "nftables", SYNGate: true, Revision: ruleset.Revision})
	hung, err := gate.Open(h.Path())
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
	if s, ok := a.of(first.ID); !ok || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "address already in use") {
		t.Errorf("too early: got %+v, want a note", s)
	}
	a.evictFrom = time.Now()
	a.Reconcile(t.Context())
	for _, l := range hung.Listeners {
		if _, err := l.Accept(t.Context()); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("the other's listener: got %v, want %v", err, syscall.EINVAL)
		}
	}
	listeners := h.Exec("ss", "-Hltn")
	for _, address := range []string{"0.0.0.0:15001 ", "[::]:15001 ", "10.0.0.6:15006 "} {
		if strings.Count(listeners, address) != 1 {
			t.Errorf("got listeners\n%s, want one of our own at %s", listeners, address)
		}
	}
	if s, _ := a.of(first.ID); len(s.Notes) > 0 {
		t.Errorf("got %+v, want no notes", s)
	}
}

// TestReconcileSurvivesRecordsThatNobodyWrites: one bad file must not take the node's daemon down, again and again.
func TestReconcileSurvivesRecordsThatNobodyWrites(t *testing.T) {
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
