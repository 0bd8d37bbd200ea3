package upstream

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// request is the request of most tests.
var request = Request{
	Destination: netip.MustParseAddrPort("192.0.2.7:443"),
	Source:      netip.MustParseAddrPort("10.0.0.5:40000"),
	Pod:         attach.Pod{Namespace: "ci", Name: "web-0", UID: "7d3f"},
}

// proxy is a fake upstream.
type proxy struct {
	net.Listener
	mu      sync.Mutex
	conns   []*net.TCPConn
	stopped bool
}

// startProxy passes each connection to handle, and closes it when handle returns.
func startProxy(t *testing.T, address string, handle func(*net.TCPConn)) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // stopped
			}
			conn := c.(*net.TCPConn)
			if !p.own(conn) {
				return
			}
			wg.Go(func() {
				defer conn.Close() //nolint:errcheck // handle has sent everything
				handle(conn)
			})
		}
	})
	t.Cleanup(func() {
		p.stop()
		wg.Wait()
	})
	return p
}

// own records a connection that was accepted. After stop it closes the connection and returns false.
func (p *proxy) own(conn *net.TCPConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		_ = conn.Close()
		return false
	}
	p.conns = append(p.conns, conn)
	return true
}

// stop closes the listener and all connections, as the kernel does for a process that is killed.
func (p *proxy) stop() {
	_ = p.Close() // perhaps for the second time
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns, p.stopped = nil, true
}

// readConnect reads the header of a request, and no byte after it.
func readConnect(conn net.Conn) (string, error) {
	var got bytes.Buffer
	for b := make([]byte, 1); !bytes.HasSuffix(got.Bytes(), []byte("\r\n\r\n")); {
		if _, err := io.ReadFull(conn, b); err != nil {
			return got.String(), err
		}
		got.Write(b)
	}
	return got.String(), nil
}

// answering makes a handler that answers each CONNECT request with answer, and then calls then.
func answering(answer string, then func(*net.TCPConn)) func(*net.TCPConn) {
	return func(conn *net.TCPConn) {
		if _, err := readConnect(conn); err != nil {
			return
		}
		_, _ = io.WriteString(conn, answer)
		then(conn)
	}
}

// These end a handler: the connection is closed, stays open until its peer closes it, or is reset.
func hangUp(*net.TCPConn)      {}
func stayOpen(c *net.TCPConn)  { _, _ = io.Copy(io.Discard, c) }
func resetConn(c *net.TCPConn) { _ = c.SetLinger(0) }

func newUpstream(address string, protocol config.Protocol) *Upstream {
	return newUpstreamOf(config.Upstream{Address: address, Protocol: protocol})
}

func newUpstreamOf(c config.Upstream) *Upstream { return New(c, nil, slog.New(slog.DiscardHandler)) }

// dialAndAsk makes one request, as the relay does.
func dialAndAsk(ctx context.Context, u *Upstream, req Request) (*net.TCPConn, []byte, error) {
	conn, err := u.Dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	first, err := u.Ask(ctx, conn, req)
	if err != nil {
		return nil, nil, err
	}
	return conn.TCPConn, first, nil
}

// ask asks the proxy at address once, without Run.
func ask(t *testing.T, address string, protocol config.Protocol, req Request) (*net.TCPConn, []byte, error) {
	t.Helper()
	conn, first, err := dialAndAsk(t.Context(), newUpstream(address, protocol), req)
	if conn != nil {
		t.Cleanup(func() { _ = conn.Close() })
	}
	return conn, first, err
}

// run runs u until the test ends.
func run(t *testing.T, u *Upstream) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- u.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

var addresses atomic.Uint32

// freeAddress returns an address on loopback that no other test uses.
func freeAddress() string {
	n := addresses.Add(1)
	return fmt.Sprintf("127.%d.%d.%d:18080", 100+n%100, os.Getpid()>>8&0xff, os.Getpid()&0xff)
}

// rest returns first and the data that follows until the end of the connection.
func rest(t *testing.T, conn net.Conn, first []byte) string {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(bufio.NewReader(conn))
	if err != nil {
		t.Errorf("reading the data after the answer: %v", err)
	}
	return string(first) + string(b)
}
