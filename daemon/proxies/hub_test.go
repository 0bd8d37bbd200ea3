package proxies

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

var web = attach.Pod{Namespace: "ci", Name: "web-0", UID: "7d3f"}

// testHub is a hub that runs until the test ends.
type testHub struct {
	*Hub
	mu       sync.Mutex
	returned []string
	moved    [][]netip.Addr // the addresses of proxies, each time that they changed
}

func (h *testHub) Returned(id string, files []*os.File) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.returned = append(h.returned, id)
	unixsock.Close(files)
}

func (h *testHub) Reconsider(context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.moved = append(h.moved, h.Addresses())
}

func newTestHub(t *testing.T) *testHub {
	t.Helper()
	return newTestHubAt(t, func(l net.Listener) net.Listener { return l })
}

func newTestHubAt(t *testing.T, listener func(net.Listener) net.Listener) *testHub {
	t.Helper()
	path := filepath.Join(t.TempDir(), "proxy.sock")
	labels := func(attach.Pod) map[string]string { return map[string]string{"app": "web", "secret": "x"} }
	h := &testHub{Hub: New(path, "node-1", labels, slog.New(slog.DiscardHandler))}
	l, err := unixsock.Listen("unixpacket", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- h.Run(ctx, listener(l), h)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return h
}

// offer serves a gate in a netns of its own until stop or the end of the test.
func (h *testHub) offer(t *testing.T) (id string, g *gate.Gate, stop func()) {
	t.Helper()
	host := testbed.NewHost(t, "pod")
	netns, err := attach.IdentifyNetns(host.Path())
	if err != nil {
		t.Fatal(err)
	}
	if g, err = gate.Open(host.Path()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.For(endpoint.Served{Netns: netns, Pod: web, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.5")}}).Serve(ctx, ctx, g)
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(func() {
		stop()
		_ = g.Close() // a second time perhaps
	})
	testbed.Eventually(t, "it is offered", func() bool {
		return h.isOffered(netns.String())
	})
	return netns.String(), g, stop
}

// peer is a proxy that a test plays.
type peer struct {
	t *testing.T
	*net.UnixConn
}

func (h *testHub) connect(t *testing.T) peer {
	t.Helper()
	c, err := net.Dial("unixpacket", h.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return peer{t, c.(*net.UnixConn)}
}

func (p peer) say(m message, files ...*os.File) {
	p.t.Helper()
	if err := send(p.UnixConn, m, files); err != nil {
		p.t.Fatalf("saying %+v: %v", m, err)
	}
}

// hears returns the next message that is no ping, which it answers.
func (p peer) hears() (message, []*os.File) {
	p.t.Helper()
	for {
		m, files, err := receive(p.UnixConn, make([]byte, maxMessage))
		if err != nil {
			p.t.Fatalf("hearing: %v", err)
		}
		if m.Kind != kindPing {
			p.t.Cleanup(func() { unixsock.Close(files) })
			return m, files
		}
		p.say(message{Kind: kindState, Connections: 7})
	}
}

func (p peer) wants(kind, id string) (message, []*os.File) {
	p.t.Helper()
	m, files := p.hears()
	if m.Kind != kind || m.ID != id {
		p.t.Fatalf("got %+v, want %s %s", m, kind, id)
	}
	return m, files
}

// ends tells whether the hub hangs up, after a word about why.
func (p peer) ends() (why string, ended bool) {
	for {
		m, files, err := receive(p.UnixConn, make([]byte, maxMessage))
		unixsock.Close(files)
		if err != nil {
			return why, !os.IsTimeout(err)
		}
		if m.Kind == kindError {
			why = m.Error
		}
	}
}

func TestListenersAreHandedOutAndTakenBack(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	if s := h.Status(); s.Ready || s.Reason == "" {
		t.Errorf("nobody is there: got %+v", s)
	}
	id, g, stop := h.offer(t)
	p := h.connect(t)
	p.say(message{Kind: kindHello, Version: 1, Name: "test", Labels: []string{"app", "none"}})
	if m, _ := p.wants(kindHello, ""); m.Version != 1 || m.Node != "node-1" {
		t.Errorf("hello: got %+v", m)
	}
	m, files := p.wants(kindAttach, id)
	want := &podDescription{Namespace: "ci", Name: "web-0", UID: "7d3f", IPs: []string{"10.0.0.5"}, Labels: map[string]string{"app": "web"}}
	if diff := cmp.Diff(want, m.Pod); diff != "" {
		t.Errorf("the pod (-want +got):\n%s", diff)
	}
	got, err := gate.Cookies(files)
	if err != nil {
		t.Fatal(err)
	}
	have, err := g.Cookies()
	if diff := cmp.Diff(have, got); err != nil || diff != "" || len(m.Listeners) != len(files) {
		t.Errorf("the sockets: %v (-want +got):\n%s", err, diff)
	}
	testbed.Eventually(t, "it is there", func() bool { return h.Status().Ready })

	second, _, stopSecond := h.offer(t) // while it is connected
	p.wants(kindAttach, second)
	stopSecond()
	p.wants(kindDetach, second)
	p.say(message{Kind: kindDetached, ID: second})
	stop()
	p.wants(kindDetach, id)
	p.say(message{Kind: kindDetached, ID: id})
	testbed.Eventually(t, "it holds nothing", func() bool { s := h.Status(); return len(s.Proxies) == 1 && s.Proxies[0].Pods == 0 })
	_ = p.Close()
	testbed.Eventually(t, "it is gone", func() bool { s := h.Status(); return len(s.Proxies) == 0 && !s.Ready })
}

// TestWhatAProxyComesWith: sockets that are offered stay with it, others are returned, and what nobody wants it
// has to let go of.
func TestWhatAProxyComesWith(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	offered, g, _ := h.offer(t)
	other := testbed.NewHost(t, "other")
	old, err := gate.Open(other.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close() //nolint:errcheck // nothing is written
	p := h.connect(t)
	p.say(message{Kind: kindHello, Version: 1, Name: "test", Held: 2})
	p.say(message{Kind: kindHeld, ID: offered}, g.Files()...)
	p.say(message{Kind: kindHeld, ID: "old"}, old.Files()...)
	p.wants(kindHello, "")
	p.wants(kindDetach, "old") // after a while, as nobody takes it up
	p.say(message{Kind: kindDetached, ID: "old"})
	h.mu.Lock()
	defer h.mu.Unlock()
	if diff := cmp.Diff([]string{"old"}, h.returned); diff != "" {
		t.Errorf("returned (-want +got):\n%s", diff)
	}
}

// TestAddressesOfProxies: those of a proxy with a network of its own are known before it has anything to accept on, and
// for a while after it has gone; it may come again.
func TestAddressesOfProxies(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	id, _, _ := h.offer(t)
	own, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close() //nolint:errcheck // only read
	pod := testbed.NewHost(t, "proxy")
	pod.IP("link", "add", "eth0", "type", "bridge")
	pod.IP("addr", "add", "10.0.0.9/24", "dev", "eth0")
	pod.IP("addr", "add", "fd00::9/64", "dev", "eth0", "nodad")
	pod.IP("link", "set", "lo", "up")
	pod.IP("link", "set", "eth0", "up")
	theirs, err := os.Open(pod.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close() //nolint:errcheck // only read
	hello := message{Kind: kindHello, Version: 1, Name: "\x1b[2Jtest" + strings.Repeat("ä", maxName)}
	want := []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00::9")}
	compare := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	for i, tc := range []struct {
		network *os.File
		moved   [][]netip.Addr
	}{{own, nil}, {theirs, [][]netip.Addr{want}}, {theirs, [][]netip.Addr{want}}} {
		p := h.connect(t)
		p.say(hello, tc.network)
		p.wants(kindHello, "")
		p.wants(kindAttach, id) // not before its addresses are known
		h.mu.Lock()
		if diff := cmp.Diff(tc.moved, h.moved, compare); diff != "" {
			t.Errorf("%d: when it has listeners (-want +got):\n%s", i, diff)
		}
		h.mu.Unlock()
		testbed.Eventually(t, "it is known", func() bool { return len(h.Status().Proxies) == 1 })
		if name := h.Status().Proxies[0].Name; strings.Contains(name, "\x1b") || !utf8.ValidString(name) || len(name) > maxName {
			t.Errorf("its name is shown as %q", name)
		}
		_ = p.Close()
		testbed.Eventually(t, "it is gone", func() bool { return len(h.Status().Proxies) == 0 })
	}
	if diff := cmp.Diff(want, h.Addresses(), compare); diff != "" {
		t.Errorf("after it has gone (-want +got):\n%s", diff)
	}
}

// failing is a listener that fails before it works.
type failing struct {
	net.Listener
	failed atomic.Bool
}

func (f *failing) Accept() (net.Conn, error) {
	if !f.failed.Swap(true) {
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return f.Listener.Accept()
}

// TestOutOfDescriptors is no reason to end, with everything that is relayed.
func TestOutOfDescriptors(t *testing.T) {
	t.Parallel()
	h := newTestHubAt(t, func(l net.Listener) net.Listener { return &failing{Listener: l} })
	p := h.connect(t)
	p.say(message{Kind: kindHello, Version: 1, Name: "test"})
	p.wants(kindHello, "")
}

func TestOneThatDoesNotLetGoIsGivenUp(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	id, _, stop := h.offer(t)
	p := h.connect(t)
	p.say(message{Kind: kindHello, Version: 1, Name: "test"})
	p.wants(kindHello, "")
	p.wants(kindAttach, id)
	stop()
	p.wants(kindDetach, id)
	if _, ended := p.ends(); !ended {
		t.Error("it is still connected")
	}
}

func TestHostileProxies(t *testing.T) {
	t.Parallel()
	hello := message{Kind: kindHello, Version: 1, Name: "test"}
	for _, tc := range []struct {
		name string
		do   func(peer)
		says string
	}{
		{"garbage", func(p peer) { _, _ = p.Write([]byte("GET / HTTP/1.1\r\n\r\n")) }, "is not a message"},
		{"an empty message", func(p peer) { _, _ = p.Write([]byte("{}")) }, "want a hello"},
		{"a message without end", func(p peer) { _, _ = p.Write([]byte(`{"kind":"` + strings.Repeat("x", maxMessage))) }, "more than"},
		{"nothing at all", func(peer) {}, "hello"},
		{"a version before the first", func(p peer) { p.say(message{Kind: kindHello}) }, "version"},
		{"too much that it holds", func(p peer) { p.say(message{Kind: kindHello, Version: 1, Held: 1 << 30}) }, "more than"},
		{"something held without sockets", func(p peer) {
			p.say(message{Kind: kindHello, Version: 1, Held: 1})
			p.say(message{Kind: kindHeld, ID: "x"})
		}, "sockets"},
		{"something held by a long name", func(p peer) {
			p.say(message{Kind: kindHello, Version: 1, Held: 1})
			p.say(message{Kind: kindHeld, ID: strings.Repeat("x", 1000)}, os.Stdin)
		}, "with an id"},
		{"a network that is none", func(p peer) { p.say(hello, os.Stdin) }, "the addresses of the proxy"},
		{"something held that is no socket", func(p peer) {
			p.say(message{Kind: kindHello, Version: 1, Held: 1})
			p.say(message{Kind: kindHeld, ID: "x"}, os.Stdin)
		}, "SO_COOKIE"},
		{"letting go of what it has not", func(p peer) { p.say(hello); p.say(message{Kind: kindDetached, ID: "x"}) }, ""},
		{"a second hello", func(p peer) { p.say(hello); p.say(hello) }, ""},
		{"sockets that nobody asked for", func(p peer) { p.say(hello); p.say(message{Kind: kindAttach, ID: "x"}, os.Stdin) }, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			h := newTestHub(t)
			p := h.connect(t)
			tc.do(p)
			if why, ended := p.ends(); !ended || !strings.Contains(why, tc.says) {
				t.Errorf("ended %t, and was told %q; want an end, and %q", ended, why, tc.says)
			}
			good := h.connect(t)
			good.say(hello)
			good.wants(kindHello, "")
		})
	}
}

// TestOneThatDoesNotReadDelaysNobody, and thousands that connect neither.
func TestOneThatDoesNotReadDelaysNobody(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	deaf := h.connect(t)
	deaf.say(message{Kind: kindHello, Version: 1, Name: "deaf"})
	testbed.Eventually(t, "it is noticed", func() bool { s := h.Status(); return len(s.Proxies) == 1 && s.Proxies[0].Hangs && !s.Ready })
	for range 2000 {
		c, err := net.Dial("unixpacket", h.path)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close() // as if it were a storm
	}
	var good peer
	testbed.Eventually(t, "a good one is let in", func() bool { // which tries again, as proxies do
		good = h.connect(t)
		if send(good.UnixConn, message{Kind: kindHello, Version: 1, Name: "good"}, nil) != nil {
			return false
		}
		m, _, err := receive(good.UnixConn, make([]byte, maxMessage))
		return err == nil && m.Kind == kindHello
	})
	for range 3 {
		id, _, _ := h.offer(t)
		good.wants(kindAttach, id)
	}
	if s := h.Status(); !s.Ready || len(s.Proxies) != 2 {
		t.Errorf("got %+v, want it ready, with two proxies", s)
	}
	var many []net.Conn
	for range 2 * maxProxies {
		many = append(many, h.connect(t).UnixConn)
	}
	testbed.Eventually(t, "no more than so many are let in", func() bool {
		h.Hub.mu.Lock()
		defer h.Hub.mu.Unlock()
		return len(h.proxies) <= maxProxies
	})
	for _, c := range many {
		_ = c.Close()
	}
}
