package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/daemon/relay"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

// testAgent is an agent with its records on disk. Nothing listens at the address of its upstream.
type testAgent struct {
	*Agent
	store attach.Store
	dir   string // where the records are
}

// newAgent makes an agent that gets every decision from decide.
func newAgent(t *testing.T, decide decide) *testAgent {
	t.Helper()
	o := newOrchestrator()
	o.set(decide)
	return newAgentFor(t, o)
}

// newAgentFor makes an agent with that orchestrator. At the end of the test its gates are closed.
func newAgentFor(t *testing.T, o *fakeOrchestrator) *testAgent {
	t.Helper()
	state := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	up := upstream.New(config.Upstream{Address: "127.0.0.1:1", Protocol: config.Connect}, nil, log)
	store := attach.NewStore(state)
	r := relay.New(up, log)
	table := endpoint.NewTable(func(s endpoint.Served) endpoint.Acceptor { return r.For(s, noTrust) },
		captured.Policy{}, log)
	a := New(Config{Orchestrator: o, Store: store, Upstream: up, Table: table, Log: log})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := a.Run(ctx); err != nil { // the end of Run closes every gate
			t.Errorf("Run: %v", err)
		}
	})
	return &testAgent{a, store, filepath.Join(state, "attachments")}
}

func capture(_ attach.Attachment, interfaces []string) (attach.Decision, error) {
	r := ruleset.Provisional("eth0")
	r.Interfaces = interfaces
	return attach.Decision{Capture: true, Ruleset: &r, Reason: "the test says so"}, nil
}

func pass(attach.Attachment, []string) (attach.Decision, error) {
	return attach.Decision{Reason: "the test says so"}, nil
}

func refuse(attach.Attachment, []string) (attach.Decision, error) {
	return attach.Decision{}, errors.New("annotation sluice.dev/quic: bad")
}

func unknown(attach.Attachment, []string) (attach.Decision, error) {
	return attach.Decision{}, fmt.Errorf("%w: the API server is away", optin.ErrUnknown)
}

func attachment(h *testbed.Host, ifName string) attach.Attachment {
	return attach.Attachment{
		ID: attach.ID{ContainerID: h.Name, IfName: ifName}, Network: "pods", Netns: h.Path(),
		Pod: attach.Pod{Namespace: "ci", Name: "web-0"}, IPs: []netip.Addr{netip.MustParseAddr("198.51.100.2")},
	}
}

// listening reports whether the outbound capture port of h is open for both families.
func listening(t *testing.T, h *testbed.Host) bool {
	t.Helper()
	ok := true
	for _, address := range []string{"127.0.0.1:15001", "[::1]:15001"} {
		c, err := h.Dial(t.Context(), "tcp", address)
		if err == nil {
			_ = c.Close()
		} else if ok = false; !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("dialling %s: %v", address, err)
		}
	}
	return ok
}

// statusOf returns the status of an attachment, if the agent has it.
func (a *testAgent) statusOf(id attach.ID) (attach.AttachmentStatus, bool) {
	for _, s := range a.table.Status() {
		if s.Attachment == id.String() {
			return s, true
		}
	}
	return attach.AttachmentStatus{}, false
}

func TestAttachOpensTheGateOfACapturedPod(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	at := attachment(h, "eth0")
	for range 2 { // a runtime may repeat an ADD
		d, err := a.Attach(t.Context(), at)
		if err != nil || !d.Capture || d.Ruleset == nil {
			t.Fatalf("Attach: got %+v, %v", d, err)
		}
		if !listening(t, h) {
			t.Error("Attach has returned, but the capture port is closed")
		}
	}
	if s, ok := a.statusOf(at.ID); !ok || s.State != attach.Captured || s.Pod != "ci/web-0" || s.Netns != h.Path() ||
		len(s.Notes) > 0 {
		t.Errorf("status: got %+v, want the pod captured, without notes", s)
	}
	for range 2 {
		if err := a.Detach(at.ID); err != nil {
			t.Errorf("Detach: %v", err)
		}
	}
	if _, ok := a.statusOf(at.ID); ok || listening(t, h) {
		t.Errorf("after Detach: known %t, listening %t; want neither", ok, listening(t, h))
	}
}

func TestAttachOpensNoGateForAPodThatIsNotCaptured(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, pass)
	d, err := a.Attach(t.Context(), attachment(h, "eth0"))
	if err != nil || d.Capture {
		t.Errorf("Attach: got %+v, %v", d, err)
	}
	if s, ok := a.statusOf(attachment(h, "eth0").ID); !ok || s.State != attach.Passed || listening(t, h) {
		t.Errorf("got %+v, listening %t; want the attachment passed, without a gate", s, listening(t, h))
	}
}

func TestRefusedAttachLeavesNothing(t *testing.T) {
	t.Parallel()
	taken := testbed.NewHost(t, "taken")
	taken.Listen("127.0.0.1:15001")
	free := testbed.NewHost(t, "pod")
	gone := attachment(free, "eth0")
	gone.Netns = "/run/netns/there-is-no-such-netns"
	bad := attachment(free, "eth0")
	bad.ContainerID = "../x"
	for name, tc := range map[string]struct {
		decide decide
		at     attach.Attachment
		final  bool
	}{
		"bad annotation":     {refuse, attachment(free, "eth0"), true},
		"capture port taken": {capture, attachment(taken, "eth0"), false},
		"netns is gone":      {capture, gone, true},
		"bad container ID":   {capture, bad, true},
	} {
		a := newAgent(t, tc.decide)
		d, err := a.Attach(t.Context(), tc.at)
		var refused *attach.RefusedError
		if !errors.As(err, &refused) || refused.Final != tc.final || refused.Message == "" || d.Capture {
			t.Errorf("%s: got %+v, %#v; want a RefusedError with final %t", name, d, err, tc.final)
		}
		if got := a.table.Status(); len(got) > 0 {
			t.Errorf("%s: got %+v, want no attachment", name, got)
		}
	}
}

// TestAttachmentsOfOneNetnsShareAGate: the gate is closed with the last attachment.
func TestAttachmentsOfOneNetnsShareAGate(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h := testbed.NewHost(t, "pod")
	var seen []string
	a := newAgent(t, func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		seen = interfaces
		return capture(at, interfaces)
	})
	for _, ifName := range []string{"net1", "eth0"} {
		if _, err := a.Attach(t.Context(), attachment(h, ifName)); err != nil {
			t.Fatalf("Attach: %v", err)
		}
	}
	if len(seen) != 2 || seen[0] != "eth0" || seen[1] != "net1" {
		t.Errorf("the orchestrator got interfaces %q, want both", seen)
	}
	for i, want := range []bool{true, false} {
		if err := a.Detach(attachment(h, []string{"eth0", "net1"}[i]).ID); err != nil {
			t.Errorf("Detach: %v", err)
		}
		if got := listening(t, h); got != want {
			t.Errorf("after %d calls of Detach: listening %t, want %t", i+1, got, want)
		}
	}
}

// TestAttachKeepsTheCapturePorts of an open gate, before the plugin has recorded rules that lead to it: a later
// decision for the same netns has no others, not even a provisional one.
func TestAttachKeepsTheCapturePorts(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	want := ruleset.Ports{Outbound: 16001, Inbound: 16006}
	with := func(ports ruleset.Ports) decide {
		return func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
			d, err := capture(at, interfaces)
			d.Ruleset.Ports = ports
			return d, err
		}
	}
	o := newOrchestrator()
	a := newAgentFor(t, o)
	for _, tc := range []struct {
		name, ifName string
		decide       decide
	}{
		{"the first", "eth0", with(want)},
		{"the same again", "eth0", with(ruleset.Ports{Outbound: 17001, Inbound: 17006})},
		{"with the default ports", "eth0", with(ruleset.Ports{})},
		{"provisional", "net1", unknown},
	} {
		o.set(tc.decide)
		d, err := a.Attach(t.Context(), attachment(h, tc.ifName))
		if err != nil || d.Ruleset.CapturePorts() != want {
			t.Errorf("%s: got %+v, %v; want the capture ports %+v", tc.name, d.Ruleset, err, want)
		}
	}
}

// TestAttachFollowsAnAttachmentToANewNetns: the container ID and the path stay, the netns is another one.
func TestAttachFollowsAnAttachmentToANewNetns(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	for range 3 {
		if _, err := a.Attach(t.Context(), attachment(h, "eth0")); err != nil {
			t.Fatalf("Attach: %v", err)
		}
		if !listening(t, h) {
			t.Fatal("the capture port is closed")
		}
		h.Delete()
		testbed.Run(t, "ip", "netns", "add", h.Name)
		h.IP("link", "set", "lo", "up")
	}
	if got := len(a.table.Status()); got != 1 {
		t.Errorf("got %d attachments, want 1", got)
	}
}

// TestEndOfRunClosesEveryGate: the rules stay, so connections wait for the next daemon.
func TestEndOfRunClosesEveryGate(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	if _, err := a.Attach(t.Context(), attachment(h, "eth0")); err != nil {
		t.Fatal(err)
	}
	if c, err := h.Dial(t.Context(), "tcp", net.JoinHostPort("127.0.0.1", "15001")); err != nil {
		t.Errorf("while the agent runs: %v", err)
	} else {
		_ = c.Close()
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	if listening(t, h) {
		t.Error("Run has returned, but the capture port is open")
	}
}

func noTrust() attach.PodTrust { return attach.PodTrust{} }
