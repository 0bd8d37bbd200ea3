package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// nodeIPv4 and nodeIPv6 are where the world sees what went through the proxy come from.
const (
	nodeIPv4 = "198.51.100.1"
	nodeIPv6 = "2001:db8::1"
)

// recordingProxy is an upstream that remembers what it was asked for.
type recordingProxy struct {
	node *testbed.Node
	mu   sync.Mutex
	seen []*http.Request
}

// startRecordingProxy starts an HTTP CONNECT proxy on the node.
func startRecordingProxy(n *testbed.Node, address string) *recordingProxy {
	p := &recordingProxy{node: n}
	n.Serve(address, p.serve)
	return p
}

func (p *recordingProxy) serve(c net.Conn) {
	in := bufio.NewReader(c)
	req, err := http.ReadRequest(in)
	if err != nil {
		return // the daemon looking whether anybody is there
	}
	req.RemoteAddr = c.RemoteAddr().String()
	p.mu.Lock()
	p.seen = append(p.seen, req)
	p.mu.Unlock()
	connectTo(p.node, c, in, req.Host, "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
}

// connectTo dials a destination for c, says how that went, and carries bytes both ways until both have ended.
func connectTo(n *testbed.Node, c net.Conn, in io.Reader, destination, well, refused string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	to, err := n.Dial(ctx, "tcp", destination)
	if err != nil {
		fmt.Fprint(c, refused)
		return
	}
	defer to.Close() //nolint:errcheck // both ways have ended
	fmt.Fprint(c, well)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_, _ = io.Copy(to, in) // however it ends, its ends tell
		_ = to.(*net.TCPConn).CloseWrite()
	})
	_, _ = io.Copy(c, to)
	_ = c.(*net.TCPConn).CloseWrite()
}

// requests are those that were made so far.
func (p *recordingProxy) requests() []*http.Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.seen)
}

// asked tells whether it was asked for a destination.
func (p *recordingProxy) asked(destination string) bool {
	return slices.ContainsFunc(p.requests(), func(r *http.Request) bool { return r.Host == destination })
}

// serveCaller tells everybody who connects which address they come from, and hangs up.
func serveCaller(h *testbed.Host, address string) {
	h.Serve(address, func(c net.Conn) { fmt.Fprint(c, hostOf(c.RemoteAddr())) })
}

func hostOf(a net.Addr) string {
	host, _, _ := net.SplitHostPort(a.String())
	return host
}

// callerAt connects from h and returns the address that the server says the connection came from.
func callerAt(ctx context.Context, h *testbed.Host, address string) (string, error) {
	c, err := h.Dial(ctx, "tcp", address)
	if err != nil {
		return "", err
	}
	defer c.Close() //nolint:errcheck // read to its end
	return readAll(ctx, c)
}

func readAll(ctx context.Context, c net.Conn) (string, error) {
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return "", err
		}
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// wantCaller fails the test unless the server at address sees h's connection come from want.
func wantCaller(t *testing.T, h *testbed.Host, address, want string) {
	t.Helper()
	if got, err := callerAt(patience(t), h, address); err != nil || got != want {
		t.Errorf("connecting to %s: the server saw %q, %v; want a connection from %s", address, got, err, want)
	}
}

// wantNobody fails the test if anybody accepts a connection from h at address. A dropped SYN says nothing, so
// some time must pass.
func wantNobody(t *testing.T, h *testbed.Host, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond) // the second SYN goes after one second
	defer cancel()
	c, err := h.Dial(ctx, "tcp", address)
	if err == nil {
		_ = c.Close() // it was not to be
		t.Errorf("a connection from %s to %s was accepted", h.Name, address)
	}
}

var counters = regexp.MustCompile(`(?m)^#.*\n|\[\d+:\d+\]`)

// rulesIn is every netfilter rule in h, without comments and counters.
func rulesIn(h *testbed.Host) string {
	var b strings.Builder
	b.WriteString(h.Exec("nft", "--stateless", "list", "ruleset"))
	for _, tool := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		b.WriteString(h.Exec(tool))
	}
	return counters.ReplaceAllString(b.String(), "")
}

// traces are what is left of sluice in h: its rules, and listeners on its port.
func traces(h *testbed.Host) string {
	var found []string
	for line := range strings.Lines(rulesIn(h)) {
		if strings.Contains(strings.ToLower(line), "sluice") {
			found = append(found, line)
		}
	}
	return strings.Join(found, "") + listeners(h)
}

func listeners(h *testbed.Host) string {
	return h.Exec("ss", "--no-header", "--listening", "--tcp", "--numeric", "sport = :15001")
}

// wantNoTraces fails the test unless h is as if sluice had never seen it.
func wantNoTraces(t *testing.T, n *testbed.Node, h *testbed.Host) {
	t.Helper()
	if left := traces(h); left != "" {
		t.Errorf("left in the netns:\n%s", left)
	}
	for _, r := range n.Records() {
		if r.Netns == h.Path() {
			t.Errorf("left on disk: a record of %s", r.Attachment)
		}
	}
}

// flavour is a backend, or a flavour of one, and how a pod comes to have it.
type flavour struct {
	name, backend string
	// prepare makes the netns of a pod such that this flavour is chosen.
	prepare func(*testbed.Pod)
}

// flavours are all ways to install a ruleset.
var flavours = []flavour{
	{"iptables-nft", "iptables", func(*testbed.Pod) {}},
	// A netns in which the legacy tools have been at work stays with them.
	{"iptables-legacy", "iptables", func(p *testbed.Pod) {
		for _, tool := range []string{"iptables-legacy", "ip6tables-legacy"} {
			p.Exec(tool, "--table", "nat", "--list-rules")
		}
	}},
	{"nftables", "nftables", func(*testbed.Pod) {}},
}

// addPod is AddPod for one flavour; change, if not nil, is called before ADD.
func (f flavour) addPod(t *testing.T, n *testbed.Node, name string, change func(*testbed.Pod)) *testbed.Pod {
	t.Helper()
	n.Plugin["backend"] = f.backend
	p := n.NewPod(name)
	f.prepare(p)
	if change != nil {
		change(p)
	}
	if err := p.Add(); err != nil {
		t.Fatalf("ADD %s: %v", name, describe(err))
	}
	t.Cleanup(func() { _ = p.Del() })
	for _, r := range n.Records() {
		if r.ContainerID == p.ID && r.Installed != nil && r.Installed.Backend != f.name {
			t.Errorf("%s was captured with %s, want %s", name, r.Installed.Backend, f.name)
		}
	}
	return p
}

// annotated hands a pod's annotations over as containerd does.
func annotated(n *testbed.Node, annotations map[string]string) func(*testbed.Pod) {
	const capability = "io.kubernetes.cri.pod-annotations"
	n.Plugin["capabilities"] = map[string]bool{capability: true}
	return func(p *testbed.Pod) { p.RuntimeConfig = map[string]any{capability: annotations} }
}

// configFile writes a configuration of the daemon, one of text as it is.
func configFile(t *testing.T, config any) string {
	t.Helper()
	data, is := config.(string)
	if !is {
		y, err := yaml.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		data = string(y)
	}
	file := filepath.Join(t.TempDir(), "sluiced.yaml")
	if err := os.WriteFile(file, []byte(data), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// askRaw writes a request as it is and reads the answer.
func askRaw(ctx context.Context, c net.Conn, request string) (*http.Response, error) {
	deadline := time.Now().Add(20 * time.Second)
	if d, ok := ctx.Deadline(); ok {
		deadline = d
	}
	if err := c.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if _, err := io.WriteString(c, request); err != nil {
		return nil, err
	}
	return http.ReadResponse(bufio.NewReader(c), nil)
}

// wantText fails the test unless text reads like pattern.
func wantText(t *testing.T, text, pattern string) {
	t.Helper()
	if !regexp.MustCompile(pattern).MatchString(text) {
		t.Errorf("got %q; want something like %s", text, pattern)
	}
}
