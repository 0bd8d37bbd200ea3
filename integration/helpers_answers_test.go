package integration

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// answeringProxy is an upstream that gives everybody the same answer, until it is mended: then it connects
// them, as a proxy should.
type answeringProxy struct {
	node   *testbed.Node
	answer string
	mended atomic.Bool
	asked  atomic.Int64
}

// startAnsweringProxy starts it on the node. In SOCKS5 an answer of two bytes is one to the greeting.
func startAnsweringProxy(n *testbed.Node, protocol, answer string) *answeringProxy {
	p := &answeringProxy{node: n, answer: answer}
	serve := p.serveConnect
	if protocol == "socks5" {
		serve = p.serveSOCKS5
	}
	n.Serve(testbed.ProxyAddress, serve)
	return p
}

func (p *answeringProxy) mend() { p.mended.Store(true) }

func (p *answeringProxy) serveConnect(c net.Conn) {
	in := bufio.NewReader(c)
	req, err := http.ReadRequest(in)
	if err != nil {
		return // the daemon's spare connection
	}
	p.asked.Add(1)
	if p.mended.Load() {
		connectTo(p.node, c, in, req.Host, "HTTP/1.1 200 OK\r\n\r\n", "")
		return
	}
	p.say(c)
}

func (p *answeringProxy) serveSOCKS5(c net.Conn) {
	greeting := make([]byte, 3)
	if _, err := io.ReadFull(c, greeting); err != nil {
		return // the daemon's spare connection
	}
	p.asked.Add(1)
	if len(p.answer) == 2 && !p.mended.Load() {
		p.say(c)
		return
	}
	fmt.Fprint(c, "\x05\x00")
	destination, err := readSOCKS5(c)
	if err != nil {
		return // the daemon may go at any time
	}
	if p.mended.Load() {
		connectTo(p.node, c, c, destination, "\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00", "")
		return
	}
	p.say(c)
}

// say gives the answer, and leaves it to the daemon to hang up, as mitmproxy does. No answer is its own end.
func (p *answeringProxy) say(c net.Conn) {
	if p.answer != "" {
		fmt.Fprint(c, p.answer)
		_, _ = io.Copy(io.Discard, c) // until the daemon has read it
	}
}

// readSOCKS5 reads a request and returns its destination.
func readSOCKS5(c net.Conn) (string, error) {
	head := make([]byte, 4) // version, command, reserved, address type
	if _, err := io.ReadFull(c, head); err != nil {
		return "", err
	}
	length := 4
	if head[3] == 4 {
		length = 16
	}
	rest := make([]byte, length+2)
	if _, err := io.ReadFull(c, rest); err != nil {
		return "", err
	}
	ip, _ := netip.AddrFromSlice(rest[:length])
	return netip.AddrPortFrom(ip, uint16(rest[length])<<8|uint16(rest[length+1])).String(), nil
}
