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

// earlier is a connection to an echo server that a pod made before the agent existed.
type earlier struct{ net.Conn }

func (p *testPod) connectEarlier(t *testing.T) earlier {
	t.Helper()
	p.world.Serve(server+":7", func(c net.Conn) { _, _ = io.Copy(c, c) }) // until the client closes the connection
	c, err := p.Dial(t.Context(), "tcp", server+":7")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return earlier{c}
}

// check sends a message and wants it back.
func (c earlier) check(t *testing.T, when string) {
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
		t.Errorf("the earlier connection, pod %s: got echo %q, %v", when, got, err)
	}
}

// TestRunningPodIsEnrolledAndReleased: a pod without an ADD is captured when its labels say so, and released when they
// no longer do. Connections that were open before stay open.
func TestRunningPodIsEnrolledAndReleased(t *testing.T) {
	t.Parallel()
	p := newTestPod(t)
	before := p.connectEarlier(t)
	before.check(t, "untouched")
	o := newOrchestrator()
	pod := attach.Pod{Namespace: "ci", Name: "old-0", UID: "4c1d"}
	const ip = "203.0.113.4" // no other test has a pod with this address
	p.IP("addr", "add", ip+"/32", "dev", "eth0")
	running := optin.Running{
		Pod: pod, IPs: []netip.Addr{netip.MustParseAddr(ip)},
		Facts: optin.Facts{Labels: map[string]string{optin.Label: "true"}},
	}
	a := newAgentFor(t, o)

	a.Reconsider(t.Context())
	if s := a.table.Status(); len(s) > 0 {
		t.Fatalf("no running pod: got %+v, want no attachment", s)
	}

	o.set(capture, running)
	a.Reconsider(t.Context())
	if got, missing := a.Enrolled(), a.Uncaptured(); got != 1 || len(missing) > 0 {
		t.Errorf("labelled: got %d enrolled, and %+v uncaptured; want 1 and none", got, missing)
	}
	id := attach.ID{ContainerID: pod.UID, IfName: "eth0"}
	if s, ok := a.statusOf(id); !ok || s.State != attach.Captured || s.Pod != "ci/old-0" {
		t.Fatalf("labelled: got %+v, want the pod captured", s)
	}
	before.check(t, "captured")
	p.ask(t, server+":80")
	testbed.Eventually(t, "a new connection waits for the upstream", func() bool {
		s, _ := a.statusOf(id)
		return s.Waiting == 1
	})
	if got := p.served.Load(); got != 0 {
		t.Errorf("%d connections bypassed the gate, want none", got)
	}
	if _, err := a.store.Read(id); err != nil {
		t.Errorf("no record for the next daemon: %v", err)
	}

	o.set(func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		d, err := capture(at, interfaces)
		d.Ruleset.ExcludePorts = []ruleset.PortRange{{First: 81, Last: 81}}
		return d, err
	}, running)
	a.Reconsider(t.Context())
	if got, want := <-p.ask(t, server+":81"), "hello 198.51.100.2"; got != want {
		t.Errorf("to a port that is excluded now: got %q, want %q", got, want)
	}

	o.set(pass, running)
	a.Reconsider(t.Context())
	if got, want := <-p.ask(t, server+":80"), "hello 198.51.100.2"; got != want {
		t.Errorf("released: got %q, want %q", got, want)
	}
	if s, _ := a.statusOf(id); s.State != attach.Passed || s.Waiting != 1 {
		t.Errorf("released: got %+v, want it passed, and the waiting connection still waiting", s)
	}
	before.check(t, "released")
	want := []string{
		"ci/old-0 false SluiceCaptured: TCP connections go through the node's proxy (the test says so); " +
			"connections that were open before stay as they are",
		"ci/old-0 false SluiceReleased: TCP connections go straight out (the test says so); " +
			"connections that were open before stay as they are",
	}
	if diff := cmp.Diff(want, o.events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestUnansweredSYNFollowsNewRules: a connection to an excluded destination has sent a SYN. The rules change before an
// answer comes, and the next SYN is captured.
func TestUnansweredSYNFollowsNewRules(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newTestPod(t)
		const unused = "198.51.100.77"
		p.IP("neigh", "add", unused, "lladdr", "02:00:00:00:00:06", "dev", "eth0")
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
		p.ask(t, unused+":81")
		testbed.Eventually(t, "the SYN has left the pod", func() bool {
			return strings.Contains(p.Exec("conntrack", "-L"), "dst="+unused+" ")
		})
		o.set(capture)
		a.Reconsider(t.Context())
		testbed.Eventually(t, "the connection waits at the gate", func() bool {
			s, _ := a.statusOf(r.ID)
			return s.Waiting == 1
		})
	})
}

// TestRulesOfAnEarlierVersionAreReplaced also in pods that are captured: first the gates open, then the rules change.
func TestRulesOfAnEarlierVersionAreReplaced(t *testing.T) {
	t.Parallel()
	p := newTestPod(t)
	a := newAgent(t, capture)
	in := p.apply(t, "nftables")
	in.Revision = 2 // the last without the wall
	r := a.write(t, p.Host, attach.Captured, in)
	p.Exec("nft", "flush", "chain", "ip", "sluice-nat", "SLUICE_CAPTURE")
	a.reconcile(t.Context(), gatesOnly)
	if drift, err := in.Check(t.Context(), p.Path()); err != nil || len(drift) == 0 {
		t.Errorf("gatesOnly: got drift %q, %v; want the old rules", drift, err)
	}
	a.Reconsider(t.Context())
	got, err := a.store.Read(r.ID)
	if err != nil || got.Installed.Revision != ruleset.Revision || !got.Installed.Ruleset.KeepOlder {
		t.Fatalf("got record %+v, %v; want revision %d that keeps older connections", got, err, ruleset.Revision)
	}
	if drift, err := got.Installed.Check(t.Context(), p.Path()); err != nil || len(drift) > 0 {
		t.Errorf("Reconsider: got drift %q, %v; want none", drift, err)
	}
}

// TestConnectionsOutliveTheRelease: connections that wait or are relayed when capture ends still need the kernel's nat,
// so the rules stay until the last of them has ended.
func TestConnectionsOutliveTheRelease(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newTestPod(t)
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
			s, _ := a.statusOf(r.ID)
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
		testbed.Eventually(t, "its data arrives at the gate", func() bool {
			established := func(filter string) string { return p.Exec("ss", "-Hnt", "state", "established", filter) }
			return strings.TrimSpace(established("sport = :15001 and dport != :15001")) != "" &&
				strings.HasPrefix(established("sport = :15001"), "1 ")
		})
		if s, _ := a.statusOf(r.ID); s.State != attach.Passed || s.Waiting != 1 {
			t.Errorf("got %+v, want the attachment passed, and 1 connection waiting", s)
		}
		_ = c.Close()
	})
}

func TestReleaseRemovesRulesAndGate(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newTestPod(t)
		o := newOrchestrator()
		o.set(capture)
		a := newAgentFor(t, o)
		r := a.write(t, p.Host, attach.Captured, p.apply(t, backend))
		a.Reconcile(t.Context())
		o.set(pass)
		a.Reconsider(t.Context())
		a.CleanUp(t.Context())
		if rules := p.rules(); strings.Contains(strings.ToLower(rules), "sluice") {
			t.Errorf("rules are left:\n%s", rules)
		}
		testbed.Eventually(t, "the capture port is closed", func() bool {
			return p.Exec("ss", "-Hlnt", "sport = :15001") == ""
		})
		if got, err := a.store.Read(r.ID); err != nil || got.State != attach.Passed || got.Installed != nil {
			t.Errorf("record: got %+v, %v; want it passed, without rules", got, err)
		}
	})
}

func TestPodsThatCannotBeCapturedGetAnEvent(t *testing.T) {
	t.Parallel()
	o := newOrchestrator()
	labels := map[string]string{optin.Label: "true"}
	named := func(name string) attach.Pod { return attach.Pod{Namespace: "ci", Name: name} }
	o.set(capture,
		optin.Running{Pod: named("host"), HostNetwork: true, Facts: optin.Facts{Labels: labels}},
		optin.Running{Pod: named("proxy"), Facts: optin.Facts{Labels: labels, Upstream: true}},
		optin.Running{Pod: named("plain"), HostNetwork: true},
	)
	a := newAgentFor(t, o)
	for range 2 {
		a.Reconsider(t.Context())
	}
	want := []string{
		"ci/host true SluiceNotCaptured: the pod uses the host's network, so its connections are the node's",
		"ci/proxy true SluiceNotCaptured: the pod runs the upstream: its connections would come back to it",
	}
	if diff := cmp.Diff(want, o.events); diff != "" {
		t.Errorf("events, each once (-want +got):\n%s", diff)
	}
}

// TestUncapturedPods: each pod that opted in and is not captured is listed with the reason, and no other.
func TestUncapturedPods(t *testing.T) {
	t.Parallel()
	o := newOrchestrator()
	opted := optin.Facts{Labels: map[string]string{optin.Label: "true"}}
	named := func(name string) attach.Pod { return attach.Pod{Namespace: "ci", Name: name} }
	o.set(capture,
		optin.Running{Pod: named("host"), HostNetwork: true, Facts: opted},
		optin.Running{Pod: named("hidden"), IPs: []netip.Addr{netip.MustParseAddr("203.0.113.7")}, Facts: opted},
		optin.Running{Pod: named("proxy"), Facts: optin.Facts{Labels: opted.Labels, Upstream: true}},
		optin.Running{Pod: named("plain")},
	)
	a := newAgentFor(t, o)
	a.Reconsider(t.Context())
	want := []attach.UncapturedPod{
		{Pod: "ci/hidden", Reason: "the pod started without the plugin, and no network namespace in /run/netns has " +
			"its addresses"},
		{Pod: "ci/host", Reason: "the pod uses the host's network, so its connections are the node's"},
	}
	if diff := cmp.Diff(want, a.Uncaptured()); diff != "" {
		t.Errorf("uncaptured (-want +got):\n%s", diff)
	}
	if slices.ContainsFunc(o.events, func(e string) bool { return strings.HasPrefix(e, "ci/hidden") }) {
		t.Errorf("got events %q; want none about a pod that may be about to end", o.events)
	}
	a.uncaptured.since[named("hidden")] = time.Now().Add(-reconsiderInterval)
	a.Reconsider(t.Context())
	if event := "ci/hidden true SluiceNotCaptured: " + want[0].Reason; !slices.Contains(o.events, event) {
		t.Errorf("got events %q, want %q", o.events, event)
	}
	o.set(capture)
	a.Reconsider(t.Context())
	if got := a.Uncaptured(); len(got) > 0 || a.Enrolled() > 0 {
		t.Errorf("the pods are gone: got %+v uncaptured, and %d enrolled; want none", got, a.Enrolled())
	}
}

// TestRunningPodThatListensAtTheCapturePort is not captured, and its event says what to do.
func TestRunningPodThatListensAtTheCapturePort(t *testing.T) {
	t.Parallel()
	p := newTestPod(t)
	const ip = "203.0.113.5" // no other test has a pod with this address
	p.IP("addr", "add", ip+"/32", "dev", "eth0")
	p.Listen(":15001")
	o := newOrchestrator()
	pod := attach.Pod{Namespace: "ci", Name: "busy-0", UID: "4c1e"}
	o.set(capture, optin.Running{
		Pod: pod, IPs: []netip.Addr{netip.MustParseAddr(ip)},
		Facts: optin.Facts{Labels: map[string]string{optin.Label: "true"}},
	})
	a := newAgentFor(t, o)
	for range 2 {
		a.Reconsider(t.Context())
	}
	const want = "another process in the pod listens there; stop it, or set capture.ports to ports that no pod uses"
	if len(o.events) != 1 || !strings.HasPrefix(o.events[0], "ci/busy-0 true SluiceNotCaptured: ") ||
		!strings.Contains(o.events[0], "port 15001 of 0.0.0.0: bind: address already in use: "+want) {
		t.Errorf("got events %q, want one that says %q", o.events, want)
	}
	s, ok := a.statusOf(attach.ID{ContainerID: pod.UID, IfName: "eth0"})
	missing := a.Uncaptured()
	if len(missing) != 1 || missing[0].Pod != "ci/busy-0" || !strings.Contains(missing[0].Reason, want) ||
		a.Enrolled() != 0 {
		t.Errorf("got %+v uncaptured, and %d enrolled; want the pod, with %q", missing, a.Enrolled(), want)
	}
	if !ok || s.State != attach.Passed || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], want) {
		t.Errorf("got %+v, want the pod not captured, with a note that says %q", s, want)
	}
}

// TestLongWaitsAreReported: an upstream that is late is reported only while connections wait for it.
func TestLongWaitsAreReported(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	o := newOrchestrator()
	o.set(capture)
	a := newAgentFor(t, o)
	at := attachment(h, "eth0")
	if _, err := a.Attach(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	reported := func(now time.Time) bool {
		a.tick(now)
		o.mu.Lock()
		defer o.mu.Unlock()
		return slices.ContainsFunc(o.events, func(e string) bool { return strings.Contains(e, endpoint.ReasonWaiting) })
	}
	start := time.Now()
	if reported(start) || reported(start.Add(time.Hour)) {
		t.Error("no connection waits, but an event says that connections wait")
	}
	c, err := h.Dial(t.Context(), "tcp", "127.0.0.1:15001")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // it only waits
	testbed.Eventually(t, "the connection waits", func() bool {
		s, _ := a.statusOf(at.ID)
		return s.Waiting == 1
	})
	arrived := start.Add(2 * time.Hour)
	if reported(arrived) || reported(arrived.Add(10*time.Second-time.Millisecond)) {
		t.Error("reported before the wait was long")
	}
	if !reported(arrived.Add(10 * time.Second)) {
		t.Error("not reported when the wait was long")
	}
}

// TestNodeIsNotEnrolled: a netns in /run/netns may be the node's own. The thread's netns stands for that.
func TestNodeIsNotEnrolled(t *testing.T) {
	t.Parallel()
	node := testbed.NewHost(t, "node")
	const ip = "203.0.113.6" // no other test has a pod with this address
	node.IP("link", "add", "eth0", "type", "veth", "peer", "name", "nowhere")
	node.IP("addr", "add", ip+"/32", "dev", "eth0")
	o := newOrchestrator()
	o.set(capture, optin.Running{
		Pod: attach.Pod{Namespace: "ci", Name: "host-0", UID: "9ab2"}, IPs: []netip.Addr{netip.MustParseAddr(ip)},
		Facts: optin.Facts{Labels: map[string]string{optin.Label: "true"}},
	})
	a := newAgentFor(t, o)
	for range 2 {
		if err := node.Do(func() error { a.Reconsider(t.Context()); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if s := a.table.Status(); len(s) > 0 || listening(t, node) || node.Traces() != "" {
		t.Errorf("got attachments %+v, traces %q; want the node untouched", s, node.Traces())
	}
	want := []string{"ci/host-0 true SluiceNotCaptured: netns " + node.Path() + ": " + attach.ErrNodeNetns.Error() +
		": sluice runs in it"}
	if diff := cmp.Diff(want, o.events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}
