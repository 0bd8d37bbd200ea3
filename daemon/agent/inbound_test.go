package agent

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// captureInbound decides to capture inbound port 8080 too.
func captureInbound(at attach.Attachment, interfaces []string) (attach.Decision, error) {
	d, err := capture(at, interfaces)
	d.Ruleset.InboundPorts = []ruleset.PortRange{{First: 8080, Last: 8080}}
	return d, err
}

// TestInboundPortsChange while the pod is captured: outbound connections and waiting ones are not disturbed.
func TestInboundPortsChange(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newTestPod(t)
		p.Serve(":8080", func(c net.Conn) { _, _ = c.Write([]byte("served")) })
		p.world, p.Host = p.Host, p.world // ask dials from the world
		pod := p.world
		const service = "198.51.100.2:8080"
		o := newOrchestrator()
		o.set(capture)
		a := newAgentFor(t, o)
		in, err := ruleset.Apply(t.Context(), pod.Path(), ruleset.Provisional("eth0"), backend, nil)
		if err != nil {
			t.Fatal(err)
		}
		r := a.write(t, pod, attach.Captured, &in)
		a.Reconcile(t.Context())
		inbound := func() int { return strings.Count(pod.Exec("ss", "-Hltn", "sport = :15006"), "198.51.100.2:15006") }
		waits := func(n int) func() bool {
			return func() bool {
				s, _ := a.statusOf(r.ID)
				return s.Waiting == n
			}
		}
		check := func(when string) {
			t.Helper()
			if got := <-p.ask(t, service); got != "served" {
				t.Errorf("%s: got %q, want the server's answer", when, got)
			}
		}
		check("no inbound ports")
		if inbound() > 0 {
			t.Error("port 15006 is open without inbound ports")
		}
		out, err := pod.Dial(t.Context(), "tcp", server+":80") // captured
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close() //nolint:errcheck // it only waits
		testbed.Eventually(t, "an outbound connection waits", waits(1))

		for range 2 { // the second round opens the listener again
			o.set(captureInbound)
			a.Reconsider(t.Context())
			a.CleanUp(t.Context())
			if got := inbound(); got != 1 {
				t.Fatalf("inbound ports: got %d listeners, want 1", got)
			}
			o.set(capture)
			a.Reconsider(t.Context())
			a.CleanUp(t.Context())
			check("inbound ports removed")
			if inbound() > 0 {
				t.Error("port 15006 is still open")
			}
		}

		o.set(captureInbound)
		a.Reconsider(t.Context())
		p.ask(t, service)
		testbed.Eventually(t, "an inbound connection waits as well", waits(2))
		o.set(capture)
		a.Reconsider(t.Context())
		a.CleanUp(t.Context())
		check("inbound ports removed while a connection waits")
		if !waits(2)() || inbound() != 1 {
			t.Errorf("inbound ports removed: both connections wait %t, %d inbound listeners; want true, 1",
				waits(2)(), inbound())
		}
		o.set(pass)
		a.Reconsider(t.Context())
		a.CleanUp(t.Context())
		check("released")
		if !waits(2)() {
			t.Error("released: the connections do not wait any more")
		}
	})
}

// TestInboundListenersCoverEveryAddress of a pod, of all its attachments, and no other address.
func TestInboundListenersCoverEveryAddress(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, captureInbound)
	first, second := attachment(h, "eth0"), attachment(h, "net1")
	second.IPs = []netip.Addr{netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8::2")}
	for _, step := range []struct {
		at   attach.Attachment
		want string
	}{
		{first, "198.51.100.2:15006"},
		{second, "198.51.100.2:15006 203.0.113.2:15006 [2001:db8::2]:15006"},
		{first, "198.51.100.2:15006 203.0.113.2:15006 [2001:db8::2]:15006"},
	} {
		if _, err := a.Attach(t.Context(), step.at); err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(h.Exec("ss", "-Hltn", "sport = :15006")) {
			got = append(got, strings.Fields(line)[3])
		}
		slices.Sort(got)
		want := strings.Fields(step.want)
		if strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("%s: got listeners at %q, want %q", step.at.IfName, got, want)
		}
	}
	nowhere := attachment(testbed.NewHost(t, "nowhere"), "eth0")
	nowhere.IPs = nil
	_, err := a.Attach(t.Context(), nowhere)
	if err == nil || !strings.Contains(err.Error(), "addresses are not known") {
		t.Errorf("without an address: got %v, want an error about the unknown addresses", err)
	}
}

// TestDetachClosesReturnedListeners: they would pin the netns and the connections in their accept queues.
func TestDetachClosesReturnedListeners(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h := testbed.NewHost(t, "pod")
	h.IP("link", "set", "lo", "up")
	for _, state := range []attach.State{attach.Captured, attach.Passed} {
		a := newAgent(t, pass)
		at := attachment(h, "eth0")
		id, err := attach.IdentifyNetns(at.Netns)
		if err != nil {
			t.Fatal(err)
		}
		g, err := gate.Open(h.Path(), ruleset.DefaultPorts)
		if err != nil {
			t.Fatal(err)
		}
		e := a.table.Enter(id)
		e.Add(attach.Record{Attachment: at, NetnsID: id, State: state})
		e.Leave()
		a.Returned(id.String(), g.Files())
		if err := a.Detach(at.ID); err != nil {
			t.Fatal(err)
		}
		if listening(t, h) {
			t.Errorf("%s: the capture port is still open", state)
		}
	}
}
