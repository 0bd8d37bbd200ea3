package agent

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// chat is a connection of p to an echo server that was there before anything else.
type chat struct{ net.Conn }

func (p *provisional) chat(t *testing.T) chat {
	t.Helper()
	p.world.Serve(server+":7", func(c net.Conn) { _, _ = io.Copy(c, c) }) // until the client ends it
	c, err := p.Dial(t.Context(), "tcp", server+":7")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return chat{c}
}

func (c chat) check(t *testing.T, when string) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(when))
	_, err := io.WriteString(c, when)
	if err == nil {
		_, err = io.ReadFull(c, got)
	}
	if err != nil || string(got) != when {
		t.Errorf("the connection that was open before, %s: got %q, %v", when, got, err)
	}
}

// TestEnrolledAndReleasedLive: a pod that ran before anybody knew of it is captured when its labels say so, and let go
// when they do not any more. What was open before goes on.
func TestEnrolledAndReleasedLive(t *testing.T) {
	t.Parallel()
	p := newProvisional(t)
	before := p.chat(t)
	before.check(t, "untouched")
	o := newOrchestrator()
	pod := attach.Pod{Namespace: "ci", Name: "old-0", UID: "4c1d"}
	const ip = "203.0.113.4" // by which no other test's pod is found
	p.IP("addr", "add", ip+"/32", "dev", "eth0")
	here := optin.Running{Pod: pod, IPs: []netip.Addr{netip.MustParseAddr(ip)}, Facts: optin.Facts{Labels: map[string]string{optin.Label: "true"}}}
	a := newAgentFor(t, o)

	a.Reconsider(t.Context())
	if s := a.table.Status(); len(s) > 0 {
		t.Fatalf("nothing is wanted: got %+v", s)
	}

	o.set(capture, here)
	a.Reconsider(t.Context())
	id := attach.ID{ContainerID: pod.UID, IfName: "eth0"}
	if s, ok := a.of(id); !ok || s.State != attach.Captured || s.Pod != "ci/old-0" {
		t.Fatalf("labelled: got %+v", s)
	}
	before.check(t, "captured")
	p.ask(t, server+":80")
	testbed.Eventually(t, "a new connection waits for the upstream", func() bool {
		s, _ := a.of(id)
		return s.Waiting == 1
	})
	if got := p.served.Load(); got != 0 {
		t.Errorf("%d connections went around", got)
	}
	if _, err := a.store.Read(id); err != nil {
		t.Errorf("no record for the next daemon: %v", err)
	}

	o.set(func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		d, err := capture(at, interfaces)
		d.Ruleset.ExcludePorts = []ruleset.PortRange{{First: 81, Last: 81}}
		return d, err
	}, here)
	a.Reconsider(t.Context())
	if got, want := <-p.ask(t, server+":81"), "hello 198.51.100.2"; got != want {
		t.Errorf("to a port that was excluded by now: got %q, want %q", got, want)
	}

	o.set(pass, here)
	a.Reconsider(t.Context())
	if got, want := <-p.ask(t, server+":80"), "hello 198.51.100.2"; got != want {
		t.Errorf("released: got %q, want %q", got, want)
	}
	if s, _ := a.of(id); s.State != attach.Passed || s.Waiting != 1 {
		t.Errorf("released: got %+v, want the connection that waits to go on waiting", s)
	}
	before.check(t, "released")
	want := []string{
		"ci/old-0 false SluiceCaptured: TCP connections go through the node's proxy (the test says so); connections that were open before stay as they are",
		"ci/old-0 false SluiceReleased: TCP connections go straight out (the test says so); connections that were open before stay as they are",
	}
	if diff := cmp.Diff(want, o.events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestSYNUnderWayIsCaptured: of a connection that was excluded when it began, and has no answer when it is not any more, the
// next SYN goes by the new rules.
func TestSYNUnderWayIsCaptured(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newProvisional(t)
		const nobody = "198.51.100.77"
		p.IP("neigh", "add", nobody, "lladdr", "02:00:00:00:00:06", "dev", "eth0")
		excluding := func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
			d, err := capture(at, interfaces)
			d.Ruleset.ExcludePorts = []ruleset.PortRange{{First: 81, Last: 81}}
			return d, err
		}
		o := newOrchestrator()
		o.set(excluding)
		a := newAgentFor(t, o)
		r := a.write(t, p.Host, attach.Captured, p.apply(t, backend))
		a.Reconcile(t.Context())
		p.ask(t, nobody+":81")
		testbed.Eventually(t, "its SYN has gone out", func() bool { return strings.Contains(p.Exec("conntrack", "-L"), "dst="+nobody+" ") })
		o.set(capture)
		a.Reconsider(t.Context())
		testbed.Eventually(t, "it waits at the gate", func() bool {
			s, _ := a.of(r.ID)
			return s.Waiting == 1
		})
	})
}

// TestRulesOfAnEarlierVersionAreReplaced in pods that were captured by it.
func TestRulesOfAnEarlierVersionAreReplaced(t *testing.T) {
	t.Parallel()
	p := newProvisional(t)
	a := newAgent(t, capture)
	in := p.apply(t, "nftables")
	in.Revision--
	r := a.write(t, p.Host, attach.Captured, in)
	p.Exec("nft", "flush", "chain", "ip", "sluice-filter", "SLUICE_CAPTURE")
	a.reconcile(t.Context(), gatesOnly)
	if drift, err := in.Check(t.Context(), p.Path()); err != nil || len(drift) == 0 {
		t.Errorf("gates come first: got the drift %q, %v; want some", drift, err)
	}
	a.Reconsider(t.Context())
	if drift, err := in.Check(t.Context(), p.Path()); err != nil || len(drift) > 0 {
		t.Errorf("got the drift %q, %v; want none", drift, err)
	}
	if got, err := a.store.Read(r.ID); err != nil || got.Installed.Revision != ruleset.Revision {
		t.Errorf("got the record %+v, %v; want the revision %d", got, err, ruleset.Revision)
	}
}

// TestReleasedConnectionsGoOn: what waits or is relayed when capture ends still needs the kernel's nat. When the
// last has ended, nothing is left.
func TestReleasedConnectionsGoOn(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newProvisional(t)
		o := newOrchestrator()
		o.set(capture)
		a := newAgentFor(t, o)
		r := a.write(t, p.Host, attach.Captured, p.apply(t, backend))
		a.Reconcile(t.Context())
		c, err := p.Dial(t.Context(), "tcp", server+":80")
		if err != nil {
			t.Fatal(err)
		}
		testbed.Eventually(t, "the connection waits", func() bool {
			s, _ := a.of(r.ID)
			return s.Waiting == 1
		})
		o.set(pass)
		a.Reconsider(t.Context())
		if got, want := <-p.ask(t, server+":80"), "hello 198.51.100.2"; got != want {
			t.Errorf("released: got %q, want %q", got, want)
		}
		a.Reconcile(t.Context())
		if _, err := c.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		testbed.Eventually(t, "what it sends arrives in the gate", func() bool {
			return strings.TrimSpace(p.Exec("ss", "-Hnt", "state", "established", "sport = :15001 and dport != :15001")) != "" &&
				strings.HasPrefix(p.Exec("ss", "-Hnt", "state", "established", "sport = :15001"), "1 ")
		})
		if s, _ := a.of(r.ID); s.State != attach.Passed || s.Waiting != 1 {
			t.Errorf("got %+v, want it not captured, and one waiting", s)
		}
		_ = c.Close()
	})
}

func TestNothingIsLeftOfAReleasedPod(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newProvisional(t)
		o := newOrchestrator()
		o.set(capture)
		a := newAgentFor(t, o)
		r := a.write(t, p.Host, attach.Captured, p.apply(t, backend))
		a.Reconcile(t.Context())
		o.set(pass)
		a.Reconsider(t.Context())
		a.Reconcile(t.Context())
		if rules := p.rules(); strings.Contains(strings.ToLower(rules), "sluice") {
			t.Errorf("rules are left:\n%s", rules)
		}
		testbed.Eventually(t, "nobody listens", func() bool { return p.Exec("ss", "-Hlnt", "sport = :15001") == "" })
		if got, err := a.store.Read(r.ID); err != nil || got.State != attach.Passed || got.Installed != nil {
			t.Errorf("record: got %+v, %v", got, err)
		}
	})
}

func TestPodsThatCannotBeCapturedAreTold(t *testing.T) {
	t.Parallel()
	o := newOrchestrator()
	labels := map[string]string{optin.Label: "true"}
	o.set(capture,
		optin.Running{Pod: attach.Pod{Namespace: "ci", Name: "host"}, HostNetwork: true, Facts: optin.Facts{Labels: labels}},
		optin.Running{Pod: attach.Pod{Namespace: "ci", Name: "proxy"}, Facts: optin.Facts{Labels: labels, Upstream: true}},
		optin.Running{Pod: attach.Pod{Namespace: "ci", Name: "plain"}, HostNetwork: true},
	)
	a := newAgentFor(t, o)
	for range 2 {
		a.Reconsider(t.Context())
	}
	want := []string{
		"ci/host true SluiceNotCaptured: the pod uses the host network, so its connections are the node's",
		"ci/proxy true SluiceNotCaptured: the pod runs the upstream: its connections would come back to it",
	}
	if diff := cmp.Diff(want, o.events); diff != "" {
		t.Errorf("events, each once (-want +got):\n%s", diff)
	}
}

// TestLongWaitsAreTold: of connections, not of an upstream that nobody misses.
func TestLongWaitsAreTold(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	o := newOrchestrator()
	o.set(capture)
	a := newAgentFor(t, o)
	at := attachment(h, "eth0")
	if _, err := a.Attach(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	told := func(now time.Time) bool {
		a.tick(now)
		o.mu.Lock()
		defer o.mu.Unlock()
		return slices.ContainsFunc(o.events, func(e string) bool { return strings.Contains(e, endpoint.ReasonWaiting) })
	}
	start := time.Now()
	if told(start) || told(start.Add(time.Hour)) {
		t.Error("nothing waited, and an event says that something did")
	}
	c, err := h.Dial(t.Context(), "tcp", "127.0.0.1:15001")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // nothing was asked
	testbed.Eventually(t, "the connection waits", func() bool {
		s, _ := a.of(at.ID)
		return s.Waiting == 1
	})
	came := start.Add(2 * time.Hour)
	if told(came) || told(came.Add(10*time.Second-time.Millisecond)) {
		t.Error("told before it was long")
	}
	if !told(came.Add(10 * time.Second)) {
		t.Error("not told when it was long")
	}
}
