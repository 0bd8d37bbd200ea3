package proxies

import (
	"context"
	"fmt"
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
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

var web = attach.Pod{Namespace: "ci", Name: "web-0", UID: "7d3f"}

// testHub is a hub that runs until the test ends.
type testHub struct {
	*Hub
	mu       sync.Mutex
	returned []string
	trust    attach.PodTrust
	moved    [][]netip.Addr // the addresses of the proxies after each change
}

// Returned implements Owner.
func (h *testHub) Returned(id string, files []*os.File) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.returned = append(h.returned, id)
	unixsock.Close(files)
}

// Reconsider implements Owner.
func (h *testHub) Reconsider(context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.moved = append(h.moved, h.Addresses())
}

func (h *testHub) podTrust() attach.PodTrust {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.trust
}

func (h *testHub) setTrust(trust attach.PodTrust) {
	h.mu.Lock()
	h.trust = trust
	h.mu.Unlock()
	h.Refresh()
}

func newTestHub(t *testing.T) *testHub {
	t.Helper()
	return newTestHubAt(t, slog.DiscardHandler, func(l net.Listener) net.Listener { return l })
}

// newTestHubAt runs a hub that accepts at the listener that listener makes of its own.
func newTestHubAt(t *testing.T, log slog.Handler, listener func(net.Listener) net.Listener) *testHub {
	t.Helper()
	path := filepath.Join(t.TempDir(), "proxy.sock")
	labels := func(attach.Pod) map[string]string { return map[string]string{"app": "web", "secret": "x"} }
	h := &testHub{Hub: New(path, "node-1", labels, slog.New(log))}
	l, err := unixsock.Bind("unixpacket", path, slog.New(slog.DiscardHandler))
	if err == nil {
		err = l.Publish()
	}
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

// offer opens a gate in a netns of its own and serves it until stop or the end of the test.
func (h *testHub) offer(t *testing.T) (id string, g *gate.Gate, stop func()) {
	t.Helper()
	host := testbed.NewHost(t, "pod")
	netns, err := attach.IdentifyNetns(host.Path())
	if err != nil {
		t.Fatal(err)
	}
	if g, err = gate.Open(host.Path(), ruleset.DefaultPorts); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		served := endpoint.Served{
			Netns: netns, Pod: web, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.5")},
			Records: func() []attach.Record { return nil },
		}
		h.For(served, h.podTrust).Serve(ctx, ctx, g)
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(func() {
		stop()
		_ = g.Close() // perhaps for the second time
	})
	testbed.Eventually(t, "the gate is offered", func() bool {
		return h.isOffered(netns.String())
	})
	return netns.String(), g, stop
}

// peer is a proxy that the test plays, message by message.
type peer struct {
	t *testing.T
	*net.UnixConn
}

// connect connects to the hub, and says nothing yet.
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

// say sends a message.
func (p peer) say(m message, files ...*os.File) {
	p.t.Helper()
	if err := send(p.UnixConn, m, files); err != nil {
		p.t.Fatalf("sending %+v: %v", m, err)
	}
}

// hears returns the next message that is not a ping. It answers pings.
func (p peer) hears() (message, []*os.File) {
	p.t.Helper()
	for {
		m, files, err := receive(p.UnixConn, make([]byte, maxMessage))
		if err != nil {
			p.t.Fatalf("receiving: %v", err)
		}
		if m.Kind != kindPing {
			p.t.Cleanup(func() { unixsock.Close(files) })
			return m, files
		}
		p.say(message{Kind: kindState, Connections: 7})
	}
}

// wants receives a message of that kind about that netns.
func (p peer) wants(kind, id string) (message, []*os.File) {
	p.t.Helper()
	m, files := p.hears()
	if m.Kind != kind || m.ID != id {
		p.t.Fatalf("got %+v, want %s %s", m, kind, id)
	}
	return m, files
}

// ends reports whether the hub hangs up, and the reason that it gave before.
func (p peer) ends() (reason string, ended bool) {
	for {
		m, files, err := receive(p.UnixConn, make([]byte, maxMessage))
		unixsock.Close(files)
		if err != nil {
			return reason, !os.IsTimeout(err)
		}
		if m.Kind == kindError {
			reason = m.Error
		}
	}
}

func TestListenersAreHandedOutAndTakenBack(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	if s := h.Status(); s.Ready || s.Reason == "" {
		t.Errorf("without a proxy: got %+v, want the upstream late, with a reason", s)
	}
	id, g, stop := h.offer(t)
	p := h.connect(t)
	p.say(message{Kind: kindHello, Version: 1, Name: "test", Labels: []string{"app", "none"}})
	if m, _ := p.wants(kindHello, ""); m.Version != 1 || m.Node != "node-1" {
		t.Errorf("hello: got %+v, want version 1 of node-1", m)
	}
	m, files := p.wants(kindAttach, id)
	want := &podDescription{
		Namespace: "ci", Name: "web-0", UID: "7d3f", IPs: []string{"10.0.0.5"}, Labels: map[string]string{"app": "web"},
	}
	if diff := cmp.Diff(want, m.Pod); diff != "" {
		t.Errorf("description of the pod (-want +got):\n%s", diff)
	}
	got, err := gate.Cookies(files)
	if err != nil {
		t.Fatal(err)
	}
	have, err := g.Cookies()
	if diff := cmp.Diff(have, got); err != nil || diff != "" || len(m.Listeners) != len(files) {
		t.Errorf("cookies of the sockets: %v (-want +got):\n%s", err, diff)
	}
	testbed.Eventually(t, "the proxy is ready", func() bool { return h.Status().Ready })

	second, _, stopSecond := h.offer(t) // while the proxy is connected
	p.wants(kindAttach, second)
	stopSecond()
	p.wants(kindDetach, second)
	p.say(message{Kind: kindDetached, ID: second})
	stop()
	p.wants(kindDetach, id)
	p.say(message{Kind: kindDetached, ID: id})
	testbed.Eventually(t, "the proxy holds no listeners", func() bool {
		s := h.Status()
		return len(s.Proxies) == 1 && s.Proxies[0].Pods == 0
	})
	_ = p.Close()
	testbed.Eventually(t, "the proxy is gone", func() bool { s := h.Status(); return len(s.Proxies) == 0 && !s.Ready })
}

// TestChangedPodsAreDescribedAgain to every proxy, also to one that has brought the listeners along.
func TestChangedPodsAreDescribedAgain(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	id, g, _ := h.offer(t)
	first, second := h.connect(t), h.connect(t)
	first.say(message{Kind: kindHello, Version: 1, Name: "first"})
	first.wants(kindHello, "")
	first.wants(kindAttach, id)
	second.say(message{Kind: kindHello, Version: 1, Name: "second", Held: 1})
	second.say(message{Kind: kindHeld, ID: id}, g.Files()...)
	second.wants(kindHello, "")
	second.wants(kindPod, id)
	for _, trust := range []attach.PodTrust{
		{State: "trusted", TLS: attach.Pass, Nested: attach.Pass},
		{State: "unknown", TLS: attach.Inspect, Nested: attach.Pass},
	} {
		h.setTrust(trust)
		want := &podDescription{
			Namespace: "ci", Name: "web-0", UID: "7d3f", IPs: []string{"10.0.0.5"},
			Trust: trust.State, TLS: trust.TLS, Nested: trust.Nested,
		}
		for _, p := range []peer{first, second} {
			m, files := p.wants(kindPod, id)
			if diff := cmp.Diff(want, m.Pod); diff != "" || len(files) != 0 {
				t.Errorf("%d descriptors, description of the pod (-want +got):\n%s", len(files), diff)
			}
		}
	}
}

// TestListenersThatAProxyHolds when it connects: those that are offered stay with it. The others are returned, and if
// no pod takes them up, the proxy has to detach them.
func TestListenersThatAProxyHolds(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	offered, g, _ := h.offer(t)
	other := testbed.NewHost(t, "other")
	old, err := gate.Open(other.Path(), ruleset.DefaultPorts)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close() //nolint:errcheck // nothing is written
	p := h.connect(t)
	p.say(message{Kind: kindHello, Version: 1, Name: "test", Held: 2})
	p.say(message{Kind: kindHeld, ID: offered}, g.Files()...)
	p.say(message{Kind: kindHeld, ID: "old"}, old.Files()...)
	p.wants(kindHello, "")
	p.wants(kindPod, offered)
	p.wants(kindDetach, "old") // after a delay, because no pod takes it up
	p.say(message{Kind: kindDetached, ID: "old"})
	h.mu.Lock()
	defer h.mu.Unlock()
	if diff := cmp.Diff([]string{"old"}, h.returned); diff != "" {
		t.Errorf("returned listeners (-want +got):\n%s", diff)
	}
}

// TestAddressesOfProxies: the addresses of a proxy with a network of its own are known before it gets listeners, and
// for a while after it has gone, because it may come back.
func TestAddressesOfProxies(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	id, _, _ := h.offer(t)
	own, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close() //nolint:errcheck // nothing is written
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
	defer theirs.Close() //nolint:errcheck // nothing is written
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
		p.wants(kindAttach, id) // its addresses are known by now
		h.mu.Lock()
		if diff := cmp.Diff(tc.moved, h.moved, compare); diff != "" {
			t.Errorf("%d: addresses when the proxy has listeners (-want +got):\n%s", i, diff)
		}
		h.mu.Unlock()
		testbed.Eventually(t, "the proxy is in the status", func() bool { return len(h.Status().Proxies) == 1 })
		name := h.Status().Proxies[0].Name
		if strings.Contains(name, "\x1b") || !utf8.ValidString(name) || len(name) > maxName {
			t.Errorf("got name %q, want it printable, of at most %d bytes", name, maxName)
		}
		_ = p.Close()
		testbed.Eventually(t, "the proxy is gone", func() bool { return len(h.Status().Proxies) == 0 })
	}
	if diff := cmp.Diff(want, h.Addresses(), compare); diff != "" {
		t.Errorf("addresses after the proxy has gone (-want +got):\n%s", diff)
	}
}

// failingOnce is a listener of which the first Accept fails.
type failingOnce struct {
	net.Listener
	failed atomic.Bool
}

// Accept implements net.Listener.
func (f *failingOnce) Accept() (net.Conn, error) {
	if !f.failed.Swap(true) {
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return f.Listener.Accept()
}

// TestHubSurvivesDescriptorExhaustion: its end would be the end of the daemon.
func TestHubSurvivesDescriptorExhaustion(t *testing.T) {
	t.Parallel()
	h := newTestHubAt(t, slog.DiscardHandler, func(l net.Listener) net.Listener { return &failingOnce{Listener: l} })
	p := h.connect(t)
	p.say(message{Kind: kindHello, Version: 1, Name: "test"})
	p.wants(kindHello, "")
}

func TestProxyThatDoesNotDetachIsDisconnected(t *testing.T) {
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
		t.Error("the proxy is still connected")
	}
}

func TestInvalidMessagesEndTheConnection(t *testing.T) {
	t.Parallel()
	hello := message{Kind: kindHello, Version: 1, Name: "test"}
	for _, tc := range []struct {
		name string
		do   func(peer)
		says string
	}{
		{"garbage", func(p peer) { _, _ = p.Write([]byte("GET / HTTP/1.1\r\n\r\n")) }, "is not a message"},
		{"an empty message", func(p peer) { _, _ = p.Write([]byte("{}")) }, "want a hello"},
		{"an oversized message", func(p peer) {
			_, _ = p.Write([]byte(`{"kind":"` + strings.Repeat("x", maxMessage)))
		}, "more than"},
		{"no message", func(peer) {}, "hello"},
		{"a version before the first", func(p peer) { p.say(message{Kind: kindHello}) }, "version"},
		{"too many held netns", func(p peer) {
			p.say(message{Kind: kindHello, Version: 1, Held: 1 << 30})
		}, "more than"},
		{"a held netns without sockets", func(p peer) {
			p.say(message{Kind: kindHello, Version: 1, Held: 1})
			p.say(message{Kind: kindHeld, ID: "x"})
		}, "sockets"},
		{"a held netns with a long ID", func(p peer) {
			p.say(message{Kind: kindHello, Version: 1, Held: 1})
			p.say(message{Kind: kindHeld, ID: strings.Repeat("x", 1000)}, os.Stdin)
		}, "with an id"},
		{"a network that is not a netns", func(p peer) { p.say(hello, os.Stdin) }, "the addresses of the proxy"},
		{"a held netns with a file that is not a socket", func(p peer) {
			p.say(message{Kind: kindHello, Version: 1, Held: 1})
			p.say(message{Kind: kindHeld, ID: "x"}, os.Stdin)
		}, "SO_COOKIE"},
		{"detaching a netns that was not attached", func(p peer) {
			p.say(hello)
			p.say(message{Kind: kindDetached, ID: "x"})
		}, ""},
		{"a second hello", func(p peer) { p.say(hello); p.say(hello) }, ""},
		{"unexpected sockets", func(p peer) {
			p.say(hello)
			p.say(message{Kind: kindAttach, ID: "x"}, os.Stdin)
		}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			h := newTestHub(t)
			p := h.connect(t)
			tc.do(p)
			if reason, ended := p.ends(); !ended || !strings.Contains(reason, tc.says) {
				t.Errorf("ended %t, with reason %q; want an end, with a reason that has %q", ended, reason, tc.says)
			}
			good := h.connect(t)
			good.say(hello)
			good.wants(kindHello, "")
		})
	}
}

// TestDeafProxiesDelayNoOther: neither does a proxy that does not read, nor do thousands that only connect.
func TestDeafProxiesDelayNoOther(t *testing.T) {
	t.Parallel()
	h := newTestHub(t)
	deaf := h.connect(t)
	deaf.say(message{Kind: kindHello, Version: 1, Name: "deaf"})
	testbed.Eventually(t, "the status says that the proxy hangs", func() bool {
		s := h.Status()
		return len(s.Proxies) == 1 && s.Proxies[0].Hangs && !s.Ready
	})
	for range 2000 {
		c, err := net.Dial("unixpacket", h.path)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close() // nothing was sent
	}
	var good peer
	testbed.Eventually(t, "a proxy that works is let in", func() bool { // it tries again, as proxies do
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
		t.Errorf("got %+v, want the upstream ready, with two proxies", s)
	}
	var many []net.Conn
	for range 2 * maxProxies {
		many = append(many, h.connect(t).UnixConn)
	}
	testbed.Eventually(t, "no more than maxProxies are let in", func() bool {
		h.Hub.mu.Lock()
		defer h.Hub.mu.Unlock()
		return len(h.proxies) <= maxProxies
	})
	for _, c := range many {
		_ = c.Close()
	}
}

// TestProxyDoesNotFloodTheLog: one that connects and goes, again and again, makes a few lines.
func TestProxyDoesNotFloodTheLog(t *testing.T) {
	t.Parallel()
	var log testbed.Log
	h := newTestHubAt(t, slog.NewTextHandler(&log, nil), func(l net.Listener) net.Listener { return l })
	const count = 100
	for i := range count {
		p := h.connect(t)
		p.say(message{Kind: kindHello, Version: version, Name: fmt.Sprintf("proxy-%d", i)})
		p.wants(kindHello, "")
		_ = p.Close() // everything was said
		testbed.Eventually(t, "the hub has noticed", func() bool { return len(h.Status().Proxies) == 0 })
	}
	for range count {
		h.connect(t)
	}
	for _, message := range []string{
		"proxy connected", "proxy has gone", "a proxy is there", "no proxy is there: connections wait",
		"proxy refused: too many are connected",
	} {
		testbed.Eventually(t, "the log has "+message, func() bool { return log.Count(message) > 0 })
		if got := log.Count(`msg="` + message + `"`); got > count/10 {
			t.Errorf("%d lines %q, want a few", got, message)
		}
	}
}
