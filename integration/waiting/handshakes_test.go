package waiting

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// handshakes is how many connections the daemon brings to the upstream at the same time.
const handshakes = 64

// holdingProxy is an upstream that lets requests wait for its answer.
type holdingProxy struct {
	node *testbed.Node
	// holds tells which destinations it holds; nil for all.
	holds func(destination string) bool

	mu        sync.Mutex
	held      []chan bool
	connected int // connections without an answer yet, with a request or without
	mostHeld  int
	mostConns int
}

func startHoldingProxy(n *testbed.Node, holds func(destination string) bool) *holdingProxy {
	p := &holdingProxy{node: n, holds: holds}
	n.Serve(testbed.ProxyAddress, p.serve)
	return p
}

func (p *holdingProxy) serve(c net.Conn) {
	p.mu.Lock()
	p.connected++
	p.mostConns = max(p.mostConns, p.connected)
	p.mu.Unlock()
	in := bufio.NewReader(c)
	req, err := http.ReadRequest(in)
	if err != nil { // the daemon's idle connection
		p.answered()
		return
	}
	if p.holds != nil && !p.holds(req.Host) {
		p.answered()
	} else if !<-p.hold() {
		return
	}
	testbed.ConnectTo(p.node, c, in, req.Host, testbed.Connected, "")
}

// answered takes a connection off the number of those without an answer.
func (p *holdingProxy) answered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.connected--
}

// hold counts a request among those held. It returns a channel that says when and whether the request is answered.
func (p *holdingProxy) hold() <-chan bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	free := make(chan bool, 1)
	p.held = append(p.held, free)
	p.mostHeld = max(p.mostHeld, len(p.held))
	return free
}

// waiting is the number of requests that the proxy holds.
func (p *holdingProxy) waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.held)
}

// release answers the requests that the proxy holds, and returns their number.
func (p *holdingProxy) release() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.endLocked(true)
}

// hangUp ends the connections of the requests that the proxy holds without an answer, and forgets the highest numbers.
func (p *holdingProxy) hangUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLocked(false)
	p.mostHeld, p.mostConns = 0, 0
}

func (p *holdingProxy) endLocked(answer bool) int {
	n := len(p.held)
	p.connected -= n // now, and not when their goroutines run: the daemon may connect again before
	for _, free := range p.held {
		free <- answer
	}
	p.held = nil
	return n
}

// most is the highest number of requests that the proxy held, and of connections without an answer.
func (p *holdingProxy) most() (held, connected int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mostHeld, p.mostConns
}

// releaseAll answers so many requests, as they come.
func (p *holdingProxy) releaseAll(t *testing.T, count int) {
	t.Helper()
	for answered := 0; answered < count; {
		testbed.Eventually(t, "the daemon asks for more connections", func() bool { return p.waiting() > 0 })
		answered += p.release()
	}
}

// wantBounded fails the test if there were more handshakes at the same time than there may be.
func (p *holdingProxy) wantBounded(t *testing.T) {
	t.Helper()
	if held, connected := p.most(); held > handshakes || connected > handshakes+1 {
		t.Errorf("%d requests at the same time, on %d connections; want at most %d, and one idle connection",
			held, connected, handshakes)
	}
}

// TestHandshakesAreBounded: when a late upstream comes, all connections wait for it, and its backlog is short.
func TestHandshakesAreBounded(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	d := n.StartDaemon()
	pods := []*testbed.Pod{n.AddPod("a"), n.AddPod("b"), n.AddPod("c")}
	const count = 300
	hosts := []*testbed.Host{pods[0].Host, pods[1].Host, pods[2].Host}
	outcome := testbed.Echoes(t, count/3, 200, hosts...)
	testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pods...) == count })
	proxy := startHoldingProxy(n, nil)
	// Three pods that have no more than are free have three quarters or more together.
	testbed.Eventually(t, "the daemon asks for as many connections as it may", func() bool {
		return proxy.waiting() >= handshakes*3/4
	})
	proxy.releaseAll(t, count)
	testbed.WantServed(t, outcome, count)
	proxy.wantBounded(t)
	if got := n.SYNs(); got != 0 {
		t.Errorf("%d SYNs left the pods, want none", got)
	}
}

// TestDeadDestinationsDelayNoOthers: requests that the upstream takes long to answer do not use up the handshakes.
func TestDeadDestinationsDelayNoOthers(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	dead := testbed.EchoAddresses[1]
	proxy := startHoldingProxy(n, func(destination string) bool { return destination == dead })
	d := n.StartDaemon()
	unlucky, other := n.AddPod("unlucky"), n.AddPod("other")
	const count = 3 * handshakes
	var outcomes []<-chan error
	for range count {
		outcome := make(chan error, 1)
		outcomes = append(outcomes, outcome)
		go func() {
			outcome <- testbed.Echo(testbed.Context(t), unlucky.Host, dead, testbed.RandomBytes(200))
		}()
	}
	testbed.Eventually(t, "the proxy holds more requests than there are handshakes", func() bool {
		return proxy.waiting() > handshakes
	})
	err := testbed.Echo(testbed.Context(t), other.Host, testbed.EchoAddresses[0], testbed.RandomBytes(200))
	if err != nil {
		t.Errorf("another pod's connection: %v", err)
	}
	testbed.Eventually(t, "the upstream is asked for each of them", func() bool { return proxy.waiting() == count })
	if got := d.Of(unlucky).Waiting; got != count {
		t.Errorf("%d connections wait, want all %d", got, count)
	}
	proxy.release()
	for _, outcome := range outcomes {
		testbed.WantServed(t, outcome, 1)
	}
}

// TestRetriesAreBounded: requests that the upstream takes long to answer do not count, until it fails and all of them
// are made again at the same time.
func TestRetriesAreBounded(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	proxy := startHoldingProxy(n, nil)
	n.StartDaemon()
	const count = 4 * handshakes
	outcome := testbed.Echoes(t, count, 200, n.AddPod("patient").Host)
	testbed.Eventually(t, "the proxy holds all requests", func() bool { return proxy.waiting() == count })
	proxy.hangUp()
	proxy.releaseAll(t, count)
	testbed.WantServed(t, outcome, count)
	proxy.wantBounded(t)
}

// TestRepeatedRequestsDelayNoOthers: requests that the upstream always answers with a failure do not use up the
// handshakes between their repetitions.
func TestRepeatedRequestsDelayNoOthers(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	served, failing := testbed.EchoAddresses[0], testbed.EchoAddresses[1]
	var failed atomic.Int64
	n.Serve(testbed.ProxyAddress, func(c net.Conn) {
		in := bufio.NewReader(c)
		req, err := http.ReadRequest(in)
		switch {
		case err != nil: // the daemon's idle connection
		case req.Host != served: // nor the daemon's own requests, which would show that the upstream is well
			if req.Host == failing {
				failed.Add(1)
			}
			_, _ = io.WriteString(c, "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
		default:
			testbed.ConnectTo(n, c, in, req.Host, testbed.Connected, "")
		}
	})
	d := n.StartDaemon()
	unlucky, other := n.AddPod("unlucky"), n.AddPod("other")
	const count = 2 * handshakes
	for range count {
		testbed.MustOpen(t, unlucky.Host, failing)
	}
	testbed.Eventually(t, "each request was made twice", func() bool {
		return failed.Load() >= 2*count && d.Of(unlucky).Waiting == count
	})
	testbed.EchoAll(t, 1, 200, other.Host)
}
