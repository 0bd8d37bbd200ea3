package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/agent"
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

// testAPI is an API with an agent that gets every decision from decide. Nothing listens at the address of its upstream.
type testAPI struct {
	*API
	store attach.Store
}

// decide is an orchestrator that decides with a function.
type decide func(at attach.Attachment, interfaces []string) (attach.Decision, error)

// Decision implements agent.Orchestrator.
func (d decide) Decision(_ context.Context, at attach.Attachment, interfaces []string, _ bool) (
	attach.Decision, error,
) {
	return d(at, interfaces)
}

// Running implements agent.Orchestrator.
func (decide) Running() []optin.Running { return nil }

// Changed implements agent.Orchestrator.
func (decide) Changed() <-chan struct{} { return nil }

// Report implements agent.Orchestrator.
func (decide) Report(attach.Pod, bool, string, string) {}

func newAPI(t *testing.T, d decide) *testAPI {
	t.Helper()
	return newAPIWith(t, d, attach.NewStore(t.TempDir()))
}

func newAPIWith(t *testing.T, d decide, store attach.Store) *testAPI {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	up := upstream.New(config.Upstream{Address: "127.0.0.1:1", Protocol: config.Connect}, nil, log)
	r := relay.New(up, log)
	table := endpoint.NewTable(func(s endpoint.Served) endpoint.Acceptor { return r.For(s, noTrust) },
		captured.Policy{}, log)
	a := agent.New(agent.Config{Orchestrator: d, Store: store, Upstream: up, Table: table, Log: log})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := a.Run(ctx); err != nil { // the end of Run closes every gate
			t.Errorf("Run: %v", err)
		}
	})
	return &testAPI{&API{Agent: a, Table: table, Upstream: up, Log: log}, store}
}

func capture(_ attach.Attachment, interfaces []string) (attach.Decision, error) {
	r := ruleset.Provisional("eth0")
	r.Interfaces = interfaces
	return attach.Decision{Capture: true, Ruleset: &r, Reason: "the test says so"}, nil
}

func pass(attach.Attachment, []string) (attach.Decision, error) {
	return attach.Decision{Reason: "the test says so"}, nil
}

func attachment(h *testbed.Host) attach.Attachment {
	return attach.Attachment{
		ID: attach.ID{ContainerID: h.Name, IfName: "eth0"}, Network: "pods", Netns: h.Path(),
		Pod: attach.Pod{Namespace: "ci", Name: "web-0"}, IPs: []netip.Addr{netip.MustParseAddr("198.51.100.2")},
	}
}

// socketPath returns a path in a directory that Start has to make.
func socketPath(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "run", "agent.sock")
}

// serveAt starts the agent and serves a at path until the test ends.
func serveAt(t *testing.T, a *testAPI, path string) {
	t.Helper()
	l, err := a.Agent.Start(t.Context(), path)
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- a.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
}

// serve serves a until the test ends, and returns a client.
func serve(t *testing.T, a *testAPI) *attach.Client {
	t.Helper()
	path := socketPath(t)
	serveAt(t, a, path)
	return attach.NewClient(path)
}

func TestServerRefusesInvalidRequests(t *testing.T) {
	t.Parallel()
	a := newAPI(t, capture)
	path := socketPath(t)
	serveAt(t, a, path)
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
	const attachments = "http://sluiced" + attach.PathAttachments
	const post, invalid = "POST", "the request is not an attachment"
	for _, tc := range []struct{ name, method, url, body, want string }{
		{"an empty body", post, attachments, "", invalid},
		{"not JSON", post, attachments, "containerID=4f2a", invalid},
		{"another type", post, attachments, `{"containerID":7}`, "containerID"},
		{"a list", post, attachments, `[]`, invalid},
		{"an unknown field", post, attachments, `{"containerID":"4f2a","force":true}`, `unknown field "force"`},
		{"no netns", post, attachments, `{"containerID":"4f2a","ifName":"eth0"}`, "no netns path"},
		{"no container ID", post, attachments, `{"ifName":"eth0","netns":"/n"}`, `container ID ""`},
		{
			"a bad container ID", post, attachments,
			`{"containerID":"../x","ifName":"eth0","netns":"/n"}`, `container ID "../x"`,
		},
		{
			"a bad interface", post, attachments,
			`{"containerID":"4f2a","ifName":"eth/0","netns":"/n"}`, `"eth/0" is not an interface name`,
		},
		{
			"a bad pod", post, attachments,
			`{"containerID":"4f2a","ifName":"eth0","netns":"/n","pod":{"name":"a\r\nb"}}`, "pod name",
		},
		{
			"a bad address", post, attachments,
			`{"containerID":"4f2a","ifName":"eth0","netns":"/n","ips":["x"]}`, invalid,
		},
		{
			"a path without a netns", post, attachments,
			`{"containerID":"4f2a","ifName":"eth0","netns":"/no/such/netns"}`, "netns is gone",
		},
		{
			"an oversized body", post, attachments,
			`{"containerID":"` + strings.Repeat("a", attach.MaxRequest) + `"}`, "too large",
		},
		{"detach with a bad container ID", "DELETE", attachments + "/..%2fx/eth0", "", `container ID "../x"`},
		{
			"detach with a bad interface", "DELETE", attachments + "/4f2a/eth%200", "",
			`"eth 0" is not an interface name`,
		},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tc.method, tc.url, strings.NewReader(tc.body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		var got attach.RefusedError
		err = json.NewDecoder(resp.Body).Decode(&got)
		_ = resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusUnprocessableEntity || !got.Final ||
			!strings.Contains(got.Message, tc.want) {
			t.Errorf("%s: got %s, %+v, %v; want 422, final, with %q", tc.name, resp.Status, got, err, tc.want)
		}
	}
	if got := a.Table.Status(); len(got) > 0 {
		t.Errorf("got %+v, want no attachment", got)
	}
}

// TestEachRequestOverTheSocket: attach, list, status and detach.
func TestEachRequestOverTheSocket(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	c := serve(t, newAPI(t, capture))
	at := attachment(h)
	d, err := c.Attach(t.Context(), at)
	if err != nil || !d.Capture || d.Ruleset.Validate() != nil || d.Reason == "" {
		t.Errorf("Attach: got %+v, %v", d, err)
	}
	l, err := c.List(t.Context())
	if err != nil || len(l) != 1 || l[0].Attachment != at.ID.String() {
		t.Errorf("List: got %+v, %v", l, err)
	}
	s, err := c.Status(t.Context())
	if err != nil || len(s.Attachments) != 1 || s.Upstream.Ready || s.Upstream.Protocol != "connect" {
		t.Errorf("Status: got %+v, %v", s, err)
	}
	for range 2 {
		if err := c.Detach(t.Context(), at.ID); err != nil {
			t.Errorf("Detach: %v", err)
		}
	}
	h.Listen("127.0.0.1:15001")
	var refused *attach.RefusedError
	if _, err := c.Attach(t.Context(), at); !errors.As(err, &refused) || refused.Final {
		t.Errorf("Attach while the port is taken: got %v, want a RefusedError that is not final", err)
	}
}

// TestStartReplacesTheSocket of an earlier daemon while that daemon serves it.
func TestStartReplacesTheSocket(t *testing.T) {
	t.Parallel()
	path := socketPath(t)
	for _, before := range []string{"no daemon", "another daemon"} {
		serveAt(t, newAPI(t, pass), path)
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("after %s: got mode %v, %v; want 0600", before, info.Mode(), err)
		}
		if _, err := attach.NewClient(path).Status(t.Context()); err != nil {
			t.Errorf("after %s: %v", before, err)
		}
	}
}

// TestOtherUsersAreTurnedAway, even if the mode of the socket would let them in.
func TestOtherUsersAreTurnedAway(t *testing.T) {
	t.Parallel()
	path := socketPath(t)
	serveAt(t, newAPI(t, capture), path)
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(path); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for uid, want := range map[int]string{0: "HTTP/1.1 200 OK", 65534: ""} {
		got, err := statusLine(path, uid)
		if err != nil || got != want {
			t.Errorf("user %d: got %q, %v; want %q", uid, got, err, want)
		}
	}
}

// statusLine asks for the status as another user, and returns the first line of the answer, or "" if the server
// hung up.
func statusLine(path string, uid int) (line string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so that the thread ends, and its user ID with it
		line, err = askAs(path, uid)
	}()
	<-done
	return line, err
}

// askAs makes the request of statusLine on a thread that it changes.
func askAs(path string, uid int) (string, error) {
	same := ^uintptr(0)
	// The raw system call changes this thread alone.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(uid), same); errno != 0 {
		return "", fmt.Errorf("becoming user %d, for which this test must be run as root: %w", uid, errno)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() //nolint:errcheck // read to its end
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return "", err
	}
	_, err = f.WriteString("GET " + attach.PathStatus + " HTTP/1.0\r\n\r\n")
	if err != nil && !errors.Is(err, unix.EPIPE) {
		return "", err
	}
	answer, err := io.ReadAll(f)
	if errors.Is(err, unix.ECONNRESET) {
		err = nil
	}
	line, _, _ := strings.Cut(string(answer), "\r\n")
	return strings.Replace(line, "HTTP/1.0", "HTTP/1.1", 1), err
}

// TestMetrics: among others, the containers of a pod with two attachments count once.
func TestMetrics(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAPI(t, capture)
	a.Upstream = threeProxies{}
	a.Trust = func(s *attach.AttachmentStatus) {
		s.Containers = []attach.ContainerTrust{{Name: "app", Trust: "trusted"}, {Name: "helper", Trust: "unknown"}}
	}
	a.Runtime = func() (asks, needed bool) { return true, true }
	first := attachment(h)
	second := first
	second.IfName = "net1"
	for _, at := range []attach.Attachment{first, second} {
		if _, err := a.Agent.Attach(t.Context(), at); err != nil {
			t.Fatal(err)
		}
	}
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(Metrics{API: a.API}); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetName() + "=" + l.GetValue()
			}
			got[name] = m.GetGauge().GetValue()
		}
	}
	want := map[string]float64{
		"sluice_upstream_ready": 1, "sluice_attachments state=captured": 2,
		"sluice_expired_connections_total": 0, "sluice_direct_connections_total": 0, "sluice_rules_restored_total": 0,
		"sluice_stopped_packets_total cause=nested": 0, "sluice_stopped_packets_total cause=packet": 0,
		"sluice_stopped_packets_total cause=pod": 0, "sluice_stopped_packets_total cause=quic": 0,
		"sluice_stopped_packets_total cause=other": 0,
		"sluice_waiting_connections":               0, "sluice_open_connections": 0,
		"sluice_pod_waiting_connections pod=ci/web-0": 0,
		"sluice_proxies state=answers":                2, "sluice_proxies state=hangs": 1,
		"sluice_containers trust=trusted": 1, "sluice_containers trust=unknown": 1,
		"sluice_runtime_connected":    1,
		"sluice_proxy_pods proxy=one": 5, "sluice_proxy_pods proxy=other": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// threeProxies is an upstream with three proxies, two of them with the same name.
type threeProxies struct{}

// Status implements agent.Upstream.
func (threeProxies) Status() attach.UpstreamStatus {
	return attach.UpstreamStatus{Ready: true, Proxies: []attach.ProxyStatus{
		{Name: "one", Pods: 2}, {Name: "one", Pods: 3}, {Name: "other", Pods: 1, Hangs: true},
	}}
}

func TestConcurrentAttachAndDetachLeaveNothing(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h := testbed.NewHost(t, "pod")
	a := newAPI(t, capture)
	c := serve(t, a)
	at := attachment(h)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for range 15 {
				if d, err := c.Attach(t.Context(), at); err != nil || !d.Capture {
					t.Errorf("Attach: got %+v, %v", d, err)
				}
				if _, err := c.Status(t.Context()); err != nil {
					t.Errorf("Status: %v", err)
				}
				if err := c.Detach(t.Context(), at.ID); err != nil {
					t.Errorf("Detach: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if got, err := c.List(t.Context()); err != nil || len(got) > 0 {
		t.Errorf("List: got %+v, %v; want no attachment", got, err)
	}
	if c, err := h.Dial(t.Context(), "tcp", "127.0.0.1:15001"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dialling after the last Detach: got %v, %v; want the capture port closed", c, err)
	}
}

// TestStartWaitsForABusyDaemon: a daemon that has answered may take longer than answerTimeout for the rest.
func TestStartWaitsForABusyDaemon(t *testing.T) {
	t.Parallel()
	one, two := testbed.NewHost(t, "one"), testbed.NewHost(t, "two")
	deciding, decided := make(chan struct{}), make(chan struct{})
	old := newAPI(t, func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		if at.Netns == two.Path() {
			close(deciding)
			<-decided
		}
		return capture(at, interfaces)
	})
	path := socketPath(t)
	serveAt(t, old, path)
	id, err := attach.IdentifyNetns(one.Path())
	if err != nil {
		t.Fatal(err)
	}
	in := ruleset.Installed{
		Ruleset: ruleset.Provisional("eth0"), Backend: "nftables", SYNGate: true, Revision: ruleset.Revision,
		Wall: ruleset.WallFull,
	}
	r := attach.Record{Attachment: attachment(one), NetnsID: id, State: attach.Captured, Installed: &in}
	if err := old.store.Write(r); err != nil {
		t.Fatal(err)
	}
	old.Agent.Reconcile(t.Context())
	waiting, err := one.Dial(t.Context(), "tcp", "127.0.0.1:15001")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = waiting.Close() })
	go func() { _, _ = old.Agent.Attach(t.Context(), attachment(two)) }() // detached when its netns goes
	<-deciding
	const answerTimeout = 2 * time.Second // as in package handover
	time.AfterFunc(answerTimeout+100*time.Millisecond, func() { close(decided) })

	next := newAPIWith(t, capture, old.store)
	if _, err := next.Agent.Start(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the connection waits at the next daemon", func() bool {
		for _, s := range next.Table.Status() {
			if s.Attachment == attachment(one).ID.String() {
				return s.Waiting == 1
			}
		}
		return false
	})
}

func noTrust() attach.PodTrust { return attach.PodTrust{} }
