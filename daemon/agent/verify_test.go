package agent

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// undo deletes a part of the pod's rules.
func (p *testPod) undo() { p.Exec("nft", "delete", "table", "inet", "sluice-wall") }

// verified is a captured pod whose agent verifies its rules.
type verified struct {
	*testPod
	agent        *testAgent
	orchestrator *fakeOrchestrator
	record       attach.Record
	now          time.Time
}

func newVerified(t *testing.T, backend string) *verified {
	t.Helper()
	v := &verified{testPod: newTestPod(t), orchestrator: newOrchestrator(), now: time.Now()}
	v.orchestrator.set(capture)
	v.agent = newAgentFor(t, v.orchestrator)
	v.record = v.agent.write(t, v.Host, attach.Captured, v.apply(t, backend))
	v.agent.Reconcile(t.Context())
	v.verify(t)
	return v
}

// verify takes the changes that the kernel has reported, and lets more time pass than the rest between two looks.
func (v *verified) verify(t *testing.T) {
	t.Helper()
	v.now = v.now.Add(2 * time.Second)
	v.agent.verifyChanged(t.Context(), v.now)
}

func (v *verified) inLine(t *testing.T) bool {
	t.Helper()
	r, err := v.agent.store.Read(v.record.ID)
	if err != nil {
		t.Fatal(err)
	}
	drift, err := r.Installed.Check(t.Context(), v.Path())
	return err == nil && len(drift) == 0
}

// reasons are those of the events so far, about rules and packets.
func (v *verified) reasons() (reasons []string) {
	for _, e := range v.orchestrator.events {
		reason, _, _ := strings.Cut(strings.Fields(e)[2], ":")
		if reason != reasonCaptured {
			reasons = append(reasons, reason)
		}
	}
	return reasons
}

// TestRulesAreRestored: each time at once, with an event. The third time within minutes the event says that the pod
// undoes them, and then there is no more.
func TestRulesAreRestored(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		v := newVerified(t, backend)
		for range 4 {
			v.undo()
			testbed.Eventually(t, "the rules are restored", func() bool {
				v.verify(t)
				return v.inLine(t)
			})
		}
		want := []string{reasonRestored, reasonRestored, reasonUndone}
		// Without the table the rest of the wall stops what the kernel sends of its own accord, such as reports of
		// multicast listener discovery.
		got := slices.DeleteFunc(v.reasons(), func(r string) bool { return r == reasonStopped })
		if !slices.Equal(got, want) {
			t.Errorf("got events %q, want %q", v.orchestrator.events, want)
		}
		if got := v.agent.Restored(); got != 4 {
			t.Errorf("restored %d times, want 4", got)
		}
	})
}

// TestLegacyRulesAreRestored although the kernel does not report that they have changed.
func TestLegacyRulesAreRestored(t *testing.T) {
	t.Parallel()
	v := newVerified(t, "iptables-legacy")
	v.Exec("iptables-legacy", "-t", "nat", "-F", "SLUICE_OUTPUT")
	testbed.Eventually(t, "the rules are restored", func() bool {
		v.verify(t)
		return v.inLine(t)
	})
}

// TestPodsWithStoppedPacketsAreVerifiedFirst, where the kernel does not report changes of the rules: with many pods a
// round takes long.
func TestPodsWithStoppedPacketsAreVerifiedFirst(t *testing.T) {
	t.Parallel()
	v := newVerified(t, "iptables-legacy") // the round has looked at it
	other := newTestPod(t)
	next := v.agent.write(t, other.Host, attach.Captured, other.apply(t, "iptables-legacy"))
	v.agent.Reconcile(t.Context())
	v.agent.watched()
	v.agent.watch.Take(v.now)
	for _, p := range []*testPod{v.testPod, other} {
		p.Exec("iptables-legacy", "-t", "nat", "-F", "SLUICE_OUTPUT")
	}
	v.sendFrame()
	v.agent.Count()
	v.now = v.now.Add(roundInterval)
	v.agent.verifyChanged(t.Context(), v.now)
	if r, err := v.agent.store.Read(next.ID); err != nil || !v.inLine(t) {
		t.Errorf("the rules of %s are not restored (%v)", r, err)
	} else if drift, err := r.Installed.Check(t.Context(), other.Path()); err != nil || len(drift) == 0 {
		t.Errorf("the other pod: got %q, %v; want its rules not looked at yet", drift, err)
	}
}

// TestEndingAttachmentsAreNotRestored: DEL removes the rules.
func TestEndingAttachmentsAreNotRestored(t *testing.T) {
	t.Parallel()
	for _, state := range []attach.State{attach.Removing, attach.Adding} {
		v := newVerified(t, "nftables")
		r := v.record
		r.State = state
		if err := v.agent.store.Write(r); err != nil {
			t.Fatal(err)
		}
		v.undo()
		for range 3 {
			v.verify(t)
		}
		if v.inLine(t) || v.agent.Restored() > 0 {
			t.Errorf("the record is in the state %q, and the rules were restored", state)
		}
	}
}

// TestRulesFollowAddresses: an address more changes nothing, and one that goes is no fault of the pod.
func TestRulesFollowAddresses(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		v := newVerified(t, backend)
		before := v.record.Installed.Interfaces
		v.Exec("ip", "addr", "add", "198.51.100.77/24", "dev", "eth0")
		for range 3 {
			v.verify(t)
		}
		if r, err := v.agent.store.Read(v.record.ID); err != nil || !slices.Equal(r.Installed.Interfaces, before) {
			t.Errorf("another address: got rules for %v (%v), want them for %v", r.Installed.Interfaces, err, before)
		}
		v.Exec("ip", "addr", "flush", "dev", "eth0", "scope", "global")
		v.Exec("ip", "addr", "add", "198.51.100.78/24", "dev", "eth0")
		testbed.Eventually(t, "the rules are those for the new address", func() bool {
			v.verify(t)
			r, err := v.agent.store.Read(v.record.ID)
			return err == nil && r.Installed.Interfaces[0].IPv4.String() == "198.51.100.78" && v.inLine(t)
		})
		if got := v.reasons(); len(got) > 0 || v.agent.Restored() > 0 {
			t.Errorf("got events %q and %d restored, want none", v.orchestrator.events, v.agent.Restored())
		}
	})
}

// TestForeignChainIsReported once: the daemon cannot remove it for good.
func TestForeignChainIsReported(t *testing.T) {
	t.Parallel()
	v := newVerified(t, "nftables")
	for range 2 {
		v.Exec("nft", "add table ip foreign; add chain ip foreign out { type nat hook output priority -150; }")
		testbed.Eventually(t, "the foreign chain is reported", func() bool {
			v.verify(t)
			return slices.Equal(v.reasons(), []string{reasonUndone})
		})
	}
}

// TestSettlingSeesDELOfAnother attachment of the pod, which goes on after the decision was made.
func TestSettlingSeesDELOfAnother(t *testing.T) {
	t.Parallel()
	p, o := newTestPod(t), newOrchestrator()
	o.set(capture)
	a := newAgentFor(t, o)
	both := ruleset.Provisional("eth0")
	both.Interfaces = []string{"eth0", "net1"}
	in, err := ruleset.Apply(t.Context(), p.Path(), both, "nftables", nil)
	if err != nil {
		t.Fatal(err)
	}
	first := a.write(t, p.Host, attach.Captured, &in)
	second := first
	second.IfName = "net1"
	if err := a.store.Write(second); err != nil {
		t.Fatal(err)
	}
	a.Reconcile(t.Context())
	del := sync.OnceValue(func() error { // as the plugin does
		alone := both
		alone.Interfaces = []string{"eth0"}
		now, err := ruleset.Apply(t.Context(), p.Path(), alone, "nftables", &in)
		return errors.Join(err, a.store.Share(second.ID, second.NetnsID, &now), a.store.Remove(second.ID))
	})
	o.set(func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		d, err := capture(at, interfaces)
		d.Ruleset.RejectQUIC = false
		return d, errors.Join(err, del())
	})
	a.Reconsider(t.Context())
	r, err := a.store.Read(first.ID)
	if err != nil || r.Installed.Ruleset.RejectQUIC || !slices.Equal(r.Installed.Ruleset.Interfaces, []string{"eth0"}) {
		t.Errorf("got %+v, %v; want the rules settled for eth0 alone", r.Installed, err)
	}
	checkRecord(t, a, second.ID, false)
}

// TestBusyNetnsIsVerifiedLater: while the plugin changes the rules, they may differ from the record.
func TestBusyNetnsIsVerifiedLater(t *testing.T) {
	t.Parallel()
	v := newVerified(t, "nftables")
	release, err := v.agent.store.Lock(t.Context(), v.record.NetnsID)
	if err != nil {
		t.Fatal(err)
	}
	v.undo()
	for range 3 {
		v.verify(t)
	}
	if v.inLine(t) {
		t.Error("restored while another process had the netns locked")
	}
	release()
	testbed.Eventually(t, "the rules are restored", func() bool {
		v.verify(t)
		return v.inLine(t)
	})
}

// sendFrame sends a SYN by a packet socket.
func (p *testPod) sendFrame() {
	to := netip.MustParseAddrPort(server + ":80")
	testbed.SendFrames(p.Host, "eth0", testbed.FrameOptions{}, testbed.Segment{From: to, To: to, Flags: 2}.Frame())
}

// TestStoppedPacketsAreReported once for each cause, on their pod and in the status.
func TestStoppedPacketsAreReported(t *testing.T) {
	t.Parallel()
	v := newVerified(t, "nftables")
	for range 4 {
		v.sendFrame()
		v.agent.Count()
	}
	if got := v.reasons(); !slices.Equal(got, []string{reasonStopped}) {
		t.Errorf("got events %q, want one about stopped packets", v.orchestrator.events)
	}
	s, _ := v.agent.statusOf(v.record.ID)
	if s.Stopped["packet"] != 4 || len(s.Stopped) != 1 {
		t.Errorf("got %v stopped, want 4 of packet sockets", s.Stopped)
	}
}
