package integration

import (
	"bufio"
	"net"
	"net/http"
	"sync"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// holdingProxy is an upstream that lets requests wait for its answer.
type holdingProxy struct {
	node *testbed.Node
	// holds tells which destinations it holds; nil for all.
	holds func(destination string) bool

	mu        sync.Mutex
	held      []chan struct{}
	connected int // connections that are not answered yet, asked on or not
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
	answered := sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.connected--
	})
	defer answered()
	in := bufio.NewReader(c)
	req, err := http.ReadRequest(in)
	if err != nil {
		return // the daemon's spare connection
	}
	if p.holds == nil || p.holds(req.Host) {
		<-p.hold()
	}
	answered()
	connectTo(p.node, c, in, req.Host, "HTTP/1.1 200 OK\r\n\r\n", "")
}

// hold counts a request among those held; what it returns is closed when it may be answered.
func (p *holdingProxy) hold() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	free := make(chan struct{})
	p.held = append(p.held, free)
	p.mostHeld = max(p.mostHeld, len(p.held))
	return free
}

// waiting is how many requests it holds.
func (p *holdingProxy) waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.held)
}

// release answers what it holds, and returns how many that were.
func (p *holdingProxy) release() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.held)
	for _, free := range p.held {
		close(free)
	}
	p.held = nil
	return n
}

// most is how many requests it held at a time, and how many connections were open without an answer.
func (p *holdingProxy) most() (held, connected int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mostHeld, p.mostConns
}
