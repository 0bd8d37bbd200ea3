package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// socketPath is in a directory that Listen has to make.
func socketPath(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "run", "agent.sock")
}

// serveAt serves a on a socket until the test ends.
func serveAt(t *testing.T, a *testAgent, path string) {
	t.Helper()
	l, err := a.Listen(path)
	if err != nil {
		t.Fatalf("Listen: %v", err)
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

func serveAgent(t *testing.T, a *testAgent) *attach.Client {
	t.Helper()
	path := socketPath(t)
	serveAt(t, a, path)
	return attach.NewClient(path)
}

func TestServerRefuses(t *testing.T) {
	t.Parallel()
	a := newAgent(t, capture)
	path := socketPath(t)
	serveAt(t, a, path)
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
	const attachments = "http://sluiced" + attach.PathAttachments
	for _, tc := range []struct{ name, method, url, body, want string }{
		{"nothing", "POST", attachments, "", "the request is not an attachment"},
		{"not JSON", "POST", attachments, "containerID=4f2a", "the request is not an attachment"},
		{"another type", "POST", attachments, `{"containerID":7}`, "containerID"},
		{"a list", "POST", attachments, `[]`, "the request is not an attachment"},
		{"an unknown field", "POST", attachments, `{"containerID":"4f2a","force":true}`, `unknown field "force"`},
		{"no netns", "POST", attachments, `{"containerID":"4f2a","ifName":"eth0"}`, "no netns path"},
		{"no container ID", "POST", attachments, `{"ifName":"eth0","netns":"/n"}`, `container ID ""`},
		{"a bad container ID", "POST", attachments, `{"containerID":"../x","ifName":"eth0","netns":"/n"}`, `container ID "../x"`},
		{"a bad interface", "POST", attachments, `{"containerID":"4f2a","ifName":"eth/0","netns":"/n"}`, `"eth/0" is not an interface name`},
		{"a bad pod", "POST", attachments, `{"containerID":"4f2a","ifName":"eth0","netns":"/n","pod":{"name":"a\r\nb"}}`, "pod name"},
		{"a bad address", "POST", attachments, `{"containerID":"4f2a","ifName":"eth0","netns":"/n","ips":["x"]}`, "the request is not an attachment"},
		{"a netns that is none", "POST", attachments, `{"containerID":"4f2a","ifName":"eth0","netns":"/no/such/netns"}`, "netns is gone"},
		{"an oversized body", "POST", attachments, `{"containerID":"` + strings.Repeat("a", attach.MaxRequest) + `"}`, "too large"},
		{"detach with a bad container ID", "DELETE", attachments + "/..%2fx/eth0", "", `container ID "../x"`},
		{"detach with a bad interface", "DELETE", attachments + "/4f2a/eth%200", "", `"eth 0" is not an interface name`},
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
		if err != nil || resp.StatusCode != http.StatusUnprocessableEntity || !got.Final || !strings.Contains(got.Message, tc.want) {
			t.Errorf("%s: got %s, %+v, %v; want 422, final, with %q", tc.name, resp.Status, got, err, tc.want)
		}
	}
	if got := a.Status().Attachments; len(got) > 0 {
		t.Errorf("got %+v, want nothing attached", got)
	}
}

// TestServerAndClient: each verb over the socket.
func TestServerAndClient(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	c := serveAgent(t, newAgent(t, capture))
	at := attachment(h, "eth0")
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
		t.Errorf("Attach while the port is taken: got %v, want it refused, but not for ever", err)
	}
}

func TestListen(t *testing.T) {
	t.Parallel()
	path := socketPath(t)
	for _, before := range []string{"nobody", "a daemon that is about to leave it"} {
		l, err := newAgent(t, pass).Listen(path)
		if err != nil {
			t.Fatalf("after %s: %v", before, err)
		}
		t.Cleanup(func() { _ = l.Close() })
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("after %s: got mode %v, %v; want 0600", before, info.Mode(), err)
		}
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := l.Accept(); err != nil {
			t.Errorf("after %s: %v", before, err)
		}
	}
}

// TestOtherUsersAreTurnedAway, even where the mode of the socket would let them in.
func TestOtherUsersAreTurnedAway(t *testing.T) {
	t.Parallel()
	path := socketPath(t)
	serveAt(t, newAgent(t, capture), path)
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

// statusLine asks for the status as another user; "" means that the server hung up.
func statusLine(path string, uid int) (line string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and not unlocked: the thread ends with its user
		line, err = askAs(path, uid)
	}()
	<-done
	return line, err
}

func askAs(path string, uid int) (string, error) {
	same := ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(uid), same); errno != 0 { // of this thread alone
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

func TestMetrics(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "pod")
	a := newAgent(t, capture)
	a.upstream = proxied{}
	if _, err := a.Attach(t.Context(), attachment(h, "eth0")); err != nil {
		t.Fatal(err)
	}
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(Metrics{Agent: a.Agent}); err != nil {
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
		"sluice_upstream_ready": 1, "sluice_expired_connections_total": 0, "sluice_direct_connections_total": 0, "sluice_attachments state=captured": 1, "sluice_waiting_connections": 0, "sluice_open_connections": 0,
		"sluice_pod_waiting_connections pod=ci/web-0": 0, "sluice_proxies state=answers": 2, "sluice_proxies state=hangs": 1,
		"sluice_proxy_pods proxy=one": 5, "sluice_proxy_pods proxy=other": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// proxied is an upstream of three proxies.
type proxied struct{}

func (proxied) Status() attach.UpstreamStatus {
	return attach.UpstreamStatus{Ready: true, Proxies: []attach.ProxyStatus{
		{Name: "one", Pods: 2}, {Name: "one", Pods: 3}, {Name: "other", Pods: 1, Hangs: true},
	}}
}
