package testbed

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/integration/connectproxy/handshake"
)

// Answers of an HTTP CONNECT proxy, and of a SOCKS5 proxy.
const (
	Connected      = "HTTP/1.1 200 OK\r\n\r\n"
	badGateway     = "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
	socksConnected = "\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"
)

// StartUpstream starts the upstream for the protocol that the node was made with: connectproxy, or with "sockets"
// mitmdump with the addon, which it does not wait for.
func StartUpstream(n *Node) *Program {
	n.tb.Helper()
	if upstream, ok := n.Config["upstream"].(map[string]any); ok && upstream["protocol"] == "sockets" {
		return LaunchAddon(n, RawTCP...)
	}
	return StartConnectProxy(n)
}

// StartConnectProxy starts the fast CONNECT proxy as the node's upstream.
func StartConnectProxy(n *Node, args ...string) *Program {
	n.tb.Helper()
	p := Launch(n.Host, n.Binary("connectproxy"), append([]string{"-listen", ProxyAddress}, args...)...)
	n.WaitListening(p, ProxyAddress)
	return p
}

// RecordingProxy is an upstream that records the requests for connections.
type RecordingProxy struct {
	node *Node
	mu   sync.Mutex
	seen []*http.Request
}

// StartRecordingProxy starts a recording HTTP CONNECT proxy on the node.
func StartRecordingProxy(n *Node, address string) *RecordingProxy {
	n.tb.Helper()
	p := &RecordingProxy{node: n}
	n.Serve(address, p.serve)
	return p
}

func (p *RecordingProxy) serve(c net.Conn) {
	in := bufio.NewReader(c)
	req, err := http.ReadRequest(in)
	if err != nil {
		return // the daemon looks whether the proxy is there
	}
	req.RemoteAddr = c.RemoteAddr().String()
	p.mu.Lock()
	p.seen = append(p.seen, req)
	p.mu.Unlock()
	ConnectTo(p.node, c, in, req.Host, Connected, badGateway)
}

// Requests are those that were made so far.
func (p *RecordingProxy) Requests() []*http.Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.seen)
}

// Asked tells whether the proxy was asked for a destination.
func (p *RecordingProxy) Asked(destination string) bool {
	return slices.ContainsFunc(p.Requests(), func(r *http.Request) bool { return r.Host == destination })
}

// AnsweringProxy is an upstream that gives every request the same answer, until it is mended. Then it connects as a
// proxy should.
type AnsweringProxy struct {
	node   *Node
	answer string
	mended atomic.Bool
	asked  atomic.Int64
}

// StartAnsweringProxy starts an upstream that speaks the protocol, connect or socks5. An empty answer is a connection
// that ends without one; with SOCKS5 an answer of two bytes is the answer to the greeting.
func StartAnsweringProxy(n *Node, protocol, answer string) *AnsweringProxy {
	n.tb.Helper()
	p := &AnsweringProxy{node: n, answer: answer}
	serve := p.serveConnect
	if protocol == "socks5" {
		serve = p.serveSOCKS5
	}
	n.Serve(ProxyAddress, serve)
	return p
}

// Mend makes the proxy connect from now on.
func (p *AnsweringProxy) Mend() { p.mended.Store(true) }

// Asked is how many requests the proxy has had.
func (p *AnsweringProxy) Asked() int64 { return p.asked.Load() }

func (p *AnsweringProxy) serveConnect(c net.Conn) {
	in := bufio.NewReader(c)
	req, err := http.ReadRequest(in)
	if err != nil {
		return // the daemon's idle connection
	}
	p.asked.Add(1)
	if p.mended.Load() {
		ConnectTo(p.node, c, in, req.Host, Connected, "")
		return
	}
	p.reply(c)
}

func (p *AnsweringProxy) serveSOCKS5(c net.Conn) {
	greeting := make([]byte, 3)
	if _, err := io.ReadFull(c, greeting); err != nil {
		return // the daemon's idle connection
	}
	p.asked.Add(1)
	if len(p.answer) == 2 && !p.mended.Load() {
		p.reply(c)
		return
	}
	fmt.Fprint(c, "\x05\x00")
	destination, err := handshake.ReadSOCKS5Request(c)
	if err != nil {
		return // the daemon may end at any time
	}
	if p.mended.Load() {
		ConnectTo(p.node, c, c, destination, socksConnected, "")
		return
	}
	p.reply(c)
}

// StartEarlyProxy starts an upstream that takes the place of the destinations. It reads only the first bytes of an
// upload, answers, and closes the connection.
func StartEarlyProxy(n *Node, answer string) {
	n.tb.Helper()
	n.Serve(ProxyAddress, func(c net.Conn) {
		in := bufio.NewReader(c)
		req, err := handshake.Read(c, in)
		if err != nil {
			return // the daemon's idle connection
		}
		fmt.Fprint(c, req.Connected)
		AnswerEarly(c, in, answer)
	})
}

// AnswerEarly answers an upload of which it has read only the first bytes.
func AnswerEarly(c net.Conn, in io.Reader, answer string) {
	if _, err := io.ReadFull(in, make([]byte, 1000)); err == nil {
		fmt.Fprint(c, answer)
	}
}

// reply gives the answer and leaves it to the daemon to close the connection, as mitmproxy does.
func (p *AnsweringProxy) reply(c net.Conn) {
	if p.answer != "" {
		fmt.Fprint(c, p.answer)
		_, _ = io.Copy(io.Discard, c) // until the daemon has read it
	}
}

// ConnectTo connects to a destination from the node on behalf of c, as a proxy does. It answers c with connected or
// with refused, and carries bytes both ways until both directions have ended. The bytes of c are read from in.
func ConnectTo(n *Node, c net.Conn, in io.Reader, destination, connected, refused string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	to, err := n.Dial(ctx, "tcp", destination)
	if err != nil {
		fmt.Fprint(c, refused)
		return
	}
	defer to.Close() //nolint:errcheck // both directions have ended
	fmt.Fprint(c, connected)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_, _ = io.Copy(to, in) // an error shows at both ends
		_ = to.(*net.TCPConn).CloseWrite()
	})
	_, _ = io.Copy(c, to)
	_ = c.(*net.TCPConn).CloseWrite()
}
