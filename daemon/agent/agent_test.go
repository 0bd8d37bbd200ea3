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

// testAgent is an agent whose upstream never comes, with its records.
type testAgent struct {
	*Agent
	store attach.Store
	dir   string // of the records
}

// newAgent makes an agent for which decide makes every decision.
func newAgent(t *testing.T, decide decide) *testAgent {
	t.Helper()
	o := newOrchestrator()
	o.set(decide)
	return newAgentFor(t, o)
}

func newAgentFor(t *testing.T, o *fakeOrchestrator) *testAgent {
	t.Helper()
	state := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	up := upstream.New(config.Upstream{Address: "127.0.0.1:1", Protocol: config.Connect}, nil, log)
	store := attach.NewStore(state)
	r := relay.New(up, log)
	table := endpoint.NewTable(func(s endpoint.Served) endpoint.Acceptor { return r.For(s) }, log)
	a := New(Config{Orchestrator: o, Store: store, Upstream: up, Table: table, Log: log})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := a.Run(ctx); err != nil { // closes every gate
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

// listening tells whether somebody accepts connections on the capture port of h.
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

// of is the status of an attachment.
func (a *testAgent) of(id attach.ID) (attach.AttachmentStatus, bool) {
	for _, s := range a.table.Status() {
		if s.Attachment == id.String() {
			return s, true
		}
	}
	return attach.AttachmentStatus{}, false
}

func TestAttachToCapture(t *testing.T) {
	// Not parallel: what another test forks would hold the closed sockets until it has become a program.
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	at := attachment(h, "eth0")
	for range 2 { // a runtime may ask again
		d, err := a.Attach(t.Context(), at)
		if err != nil || !d.Capture || d.Ruleset == nil {
			t.Fatalf("Attach: got %+v, %v", d, err)
		}
		if !listening(t, h) {
			t.Error("answered, but nobody listens")
		}
	}
	if s, ok := a.of(at.ID); !ok || s.State != attach.Captured || s.Pod != "ci/web-0" || s.Netns != h.Path() || len(s.Notes) > 0 {
		t.Errorf("Status: got %+v", s)
	}
	for range 2 {
		if err := a.Detach(at.ID); err != nil {
			t.Errorf("Detach: %v", err)
		}
	}
	if _, ok := a.of(at.ID); ok || listening(t, h) {
		t.Errorf("detached: known %t, listening %t; want neither", ok, listening(t, h))
	}
}

func TestAttachNotToCapture(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, pass)
	d, err := a.Attach(t.Context(), attachment(h, "eth0"))
	if err != nil || d.Capture {
		t.Errorf("Attach: got %+v, %v", d, err)
	}
	if s, ok := a.of(attachment(h, "eth0").ID); !ok || s.State != attach.Passed || listening(t, h) {
		t.Errorf("got %+v, listening %t", s, listening(t, h))
	}
}

func TestAttachIsRefused(t *testing.T) {
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
		"an annotation is bad": {refuse, attachment(free, "eth0"), true},
		"the port is taken":    {capture, attachment(taken, "eth0"), false},
		"the netns is gone":    {capture, gone, true},
		"the ID is bad":        {capture, bad, true},
	} {
		a := newAgent(t, tc.decide)
		d, err := a.Attach(t.Context(), tc.at)
		var refused *attach.RefusedError
		if !errors.As(err, &refused) || refused.Final != tc.final || refused.Message == "" || d.Capture {
			t.Errorf("%s: got %+v, %#v; want it refused, final %t", name, d, err, tc.final)
		}
		if got := a.table.Status(); len(got) > 0 {
			t.Errorf("%s: got %+v, want it forgotten", name, got)
		}
	}
}

// TestAttachmentsOfOneNetnsShareAGate: the last one closes it.
func TestAttachmentsOfOneNetnsShareAGate(t *testing.T) {
	// Not parallel: what another test forks would hold the closed sockets until it has become a program.
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
		t.Errorf("decided with interfaces %q, want both", seen)
	}
	for i, want := range []bool{true, false} {
		if err := a.Detach(attachment(h, []string{"eth0", "net1"}[i]).ID); err != nil {
			t.Errorf("Detach: %v", err)
		}
		if got := listening(t, h); got != want {
			t.Errorf("%d detached: listening %t, want %t", i+1, got, want)
		}
	}
}

// TestAttachAgainInANewNetns: the same attachment, and the same path, but another netns.
func TestAttachAgainInANewNetns(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	for range 3 {
		if _, err := a.Attach(t.Context(), attachment(h, "eth0")); err != nil {
			t.Fatalf("Attach: %v", err)
		}
		if !listening(t, h) {
			t.Fatal("nobody listens")
		}
		h.Delete()
		testbed.Run(t, "ip", "netns", "add", h.Name)
		h.IP("link", "set", "lo", "up")
	}
	if got := len(a.table.Status()); got != 1 {
		t.Errorf("got %d attachments, want one", got)
	}
}

// TestRunClosesEveryGate: the rules stay, so connections wait for the next daemon.
func TestRunClosesEveryGate(t *testing.T) {
	// Not parallel: what another test forks would hold the closed sockets until it has become a program.
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	if _, err := a.Attach(t.Context(), attachment(h, "eth0")); err != nil {
		t.Fatal(err)
	}
	if c, err := h.Dial(t.Context(), "tcp", net.JoinHostPort("127.0.0.1", "15001")); err != nil {
		t.Errorf("while it runs: %v", err)
	} else {
		_ = c.Close()
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	if listening(t, h) {
		t.Error("Run has returned, but somebody listens")
	}
}
