package drill

import (
	"bufio"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/integration/connectproxy/handshake"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// impostor is a program at the address of the node's proxy.
type impostor struct {
	listener net.Listener
	running  sync.WaitGroup

	mu    sync.Mutex // guards conns
	conns map[*net.TCPConn]bool
}

// replaceProxy kills the proxy and starts an impostor in its place, which does that harm.
func (s *drillScene) replaceProxy(k loss, serve func(c *net.TCPConn, in *bufio.Reader)) {
	s.killProxy()
	s.mayLose(k)
	i := &impostor{conns: map[*net.TCPConn]bool{}}
	err := s.n.Do(func() (err error) {
		i.listener, err = net.Listen("tcp", testbed.ProxyAddress)
		return err
	})
	if err != nil {
		s.t.Fatalf("listening in place of the proxy: %v", err)
	}
	s.t.Cleanup(i.close) // of a test that has failed
	s.impostor = i
	i.running.Go(func() {
		for {
			accepted, err := i.listener.Accept()
			if err != nil {
				return // closed
			}
			c := accepted.(*net.TCPConn)
			i.add(c)
			i.running.Go(func() {
				defer i.end(c)
				serve(c, bufio.NewReader(c))
			})
		}
	})
}

// restoreProxy ends the impostor, and what it serves, and starts the proxy again.
func (s *drillScene) restoreProxy() {
	s.losing(ends, s.impostor.close)
	s.launchProxy()
}

func (i *impostor) add(c *net.TCPConn) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.conns[c] = true
}

func (i *impostor) end(c *net.TCPConn) {
	_ = c.Close() // served, or lost on purpose
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.conns, c)
}

// close resets all connections; a second time is harmless. An end would be taken for a fault of sluiced where the
// impostor may only reset.
func (i *impostor) close() {
	_ = i.listener.Close()
	i.mu.Lock()
	for c := range i.conns {
		reset(c) // serve ends with an error
	}
	i.mu.Unlock()
	i.running.Wait()
}

// earlyPort is where the destinations answer uploads early.
const earlyPort = ":413"

// answerUploads has a proxy answer uploads before it has read them. Every answer arrives in full.
func (s *drillScene) answerUploads() {
	page := "HTTP/1.1 413 Content Too Large\r\n\r\n" + strings.Repeat("too large ", 2000)
	s.replaceProxy(nothing, func(c *net.TCPConn, in *bufio.Reader) {
		req, err := handshake.Read(c, in)
		switch {
		case err != nil: // the daemon's idle connection
		case strings.HasSuffix(req.Destination, earlyPort):
			fmt.Fprint(c, req.Connected)
			testbed.AnswerEarly(c, in, page)
		default:
			testbed.ConnectTo(s.n, c, in, req.Destination, req.Connected, req.Failed)
		}
	})
	ctx, cancel := testbed.Minute()
	defer cancel()
	testbed.ForEach(s.t, 20, func(int) error {
		return testbed.UploadTooMuch(ctx, s.hostile.Host, testbed.WorldIPv4+earlyPort, page)
	})
}

// manner is how a hostile proxy treats connections.
type manner struct {
	name      string
	protocols []string
	serve     func(c *net.TCPConn, in *bufio.Reader)
	loses     loss // of the connections of pods; nothing if they wait for another proxy
}

// zeros are an address and a port.
const zeros = "\x00\x00\x00\x00\x00\x00"

var manners = []manner{
	{"resets at once", answered, func(c *net.TCPConn, _ *bufio.Reader) { reset(c) }, nothing},
	{"ends at once", answered, func(*net.TCPConn, *bufio.Reader) {}, nothing},
	{"never answers", answered, func(_ *net.TCPConn, in *bufio.Reader) { drain(in) }, nothing},
	{"garbage", answered, func(c *net.TCPConn, in *bufio.Reader) {
		_, _ = io.CopyN(c, rand.Reader, 100<<10) // until sluiced has enough
		drain(in)
	}, nothing},
	{"resets the request", answered, afterRequest(func(c *net.TCPConn, _ handshake.Request) { reset(c) }), nothing},
	{"half an answer, then a reset", answered, afterRequest(func(c *net.TCPConn, req handshake.Request) {
		fmt.Fprint(c, req.Connected[:len(req.Connected)/2])
		reset(c)
	}), nothing},
	{"half an answer, then an end", answered, afterRequest(func(c *net.TCPConn, req handshake.Request) {
		fmt.Fprint(c, req.Connected[:len(req.Connected)/2])
	}), nothing},
	{"half an answer, then silence", answered, afterRequest(func(c *net.TCPConn, req handshake.Request) {
		fmt.Fprint(c, req.Connected[:len(req.Connected)/2])
		drain(c)
	}), nothing},
	{"an answer, then a reset", answered, afterRequest(func(c *net.TCPConn, req handshake.Request) {
		fmt.Fprint(c, req.Connected)
		reset(c)
	}), resets},
	{"answers before it is asked", answered, says("HTTP/1.1 503 Service Unavailable\r\n\r\n"), nothing},
	{"endless header lines", []string{"connect"}, repeats("HTTP/1.1 200 OK\r\n", "X-Header: x\r\n"), nothing},
	{"an endless header line", []string{"connect"}, repeats("HTTP/1.1 200 OK\r\nX-Header: ", "xxxxxxxxxx"), nothing},
	{"endless interim answers", []string{"connect"}, repeats("", "HTTP/1.1 100 Continue\r\n\r\n"), nothing},
	{"an endless error page", []string{"connect"}, repeats("HTTP/1.1 502 Bad Gateway\r\n\r\n", "xxxxxxxxxx"), resets},
	{"SOCKS version 4", []string{"socks5"}, says("\x04\x5a" + zeros), nothing},
	{"a SOCKS method that was not offered", []string{"socks5"}, says("\x05\x02"), nothing},
	{"a SOCKS reply of an unknown address type", []string{"socks5"}, says("\x05\x00\x05\x00\x00\x09\xff\xff"), nothing},
	{"a SOCKS reply with half a domain", []string{"socks5"}, says("\x05\x00\x05\x00\x00\x03\xffhalf"), nothing},
	{"a SOCKS reply of an unknown code", []string{"socks5"}, says("\x05\x00\x05\xff\x00\x01" + zeros), nothing},
	{"resets what it has been given", []string{"proxy-v2"}, func(c *net.TCPConn, _ *bufio.Reader) { reset(c) }, resets},
	{"ends what it has been given", []string{"proxy-v2"}, func(*net.TCPConn, *bufio.Reader) {}, ends},
	{"reads and never writes", []string{"proxy-v2"}, func(_ *net.TCPConn, in *bufio.Reader) { drain(in) }, ends},
}

// hostileProxies are the faults of proxies that break the rules of their protocol, and of one that is slow.
func hostileProxies() []fault {
	faults := []fault{{
		name: "proxy: slow bytes", protocols: answered,
		strike: func(s *drillScene) { s.replaceProxy(nothing, s.serveSlowly) }, undo: (*drillScene).restoreProxy,
	}}
	for _, m := range manners {
		faults = append(faults, fault{
			name: "proxy: " + m.name, protocols: m.protocols,
			strike: func(s *drillScene) { s.replaceProxy(m.loses, m.serve) },
			undo: func(s *drillScene) {
				s.impostor.close()
				s.losesNoMore(m.loses)
				s.launchProxy()
			},
		})
	}
	return faults
}

// serveSlowly is a proxy that answers byte by byte.
func (s *drillScene) serveSlowly(c *net.TCPConn, in *bufio.Reader) {
	req, err := handshake.Read(c, in)
	if err != nil {
		return // the daemon's idle connection
	}
	for i := range len(req.Connected) - 1 {
		fmt.Fprint(c, req.Connected[i:i+1])
		time.Sleep(5 * time.Millisecond)
	}
	testbed.ConnectTo(s.n, c, in, req.Destination, req.Connected[len(req.Connected)-1:], "")
}

// reset ends a connection with a reset.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

func drain(in io.Reader) { _, _ = io.Copy(io.Discard, in) }

// afterRequest is a manner that begins when the proxy has read a request.
func afterRequest(f func(*net.TCPConn, handshake.Request)) func(*net.TCPConn, *bufio.Reader) {
	return func(c *net.TCPConn, in *bufio.Reader) {
		if req, err := handshake.Read(c, in); err == nil { // otherwise it is the daemon's idle connection
			f(c, req)
		}
	}
}

// says is a manner that answers without a request.
func says(answer string) func(*net.TCPConn, *bufio.Reader) {
	return func(c *net.TCPConn, in *bufio.Reader) {
		fmt.Fprint(c, answer)
		drain(in)
	}
}

// repeats is a manner that answers a request without an end.
func repeats(head, again string) func(*net.TCPConn, *bufio.Reader) {
	return afterRequest(func(c *net.TCPConn, _ handshake.Request) {
		again := []byte(strings.Repeat(again, 100))
		_, err := fmt.Fprint(c, head)
		for err == nil {
			_, err = c.Write(again)
		}
	})
}

// hostileTakers are the faults of programs that misuse the socket for proxies. The proxy is not touched.
func hostileTakers() []fault {
	const hello = `{"kind":"hello","version":1,"name":"hostile"`
	var faults []fault
	for _, c := range []struct {
		name     string
		messages []string
	}{
		{"says nothing", nil},
		{"garbage", []string{"\x00\xff{{{"}},
		{"a message that is too long", []string{strings.Repeat(" ", 65<<10)}},
		{"sockets that never come", []string{hello + `,"held":10000}`}},
		{"files as sockets", []string{hello + `,"held":2}`, `{"kind":"held","id":"a"}`, `{"kind":"held","id":"b"}`}},
		{"messages out of turn", []string{hello + "}", `{"kind":"detached","id":"a"}`, `{"kind":"held","id":"a"}`}},
		{"a greeting, and nothing more", []string{hello + "}"}},
		{"a greeting twice", []string{hello + "}", hello + "}"}},
	} {
		faults = append(faults, fault{
			name: "taker: " + c.name,
			strike: func(s *drillScene) {
				s.attack(4, func(ctx context.Context) { s.take(ctx, c.messages) })
			},
			undo: (*drillScene).endAttack,
		})
	}
	return faults
}

// take sends messages to the socket for proxies, with a file where sockets should be, and takes no notice of what it
// gets until sluiced or ctx ends the connection.
func (s *drillScene) take(ctx context.Context, messages []string) {
	c, err := net.Dial("unixpacket", s.n.ProxySocket())
	if err != nil {
		return // the daemon has too many of them
	}
	defer c.Close() //nolint:errcheck // nothing is lost
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	null, err := os.Open(os.DevNull)
	if err != nil {
		s.t.Errorf("opening a file to send: %v", err)
		return
	}
	defer null.Close() //nolint:errcheck // nothing was written
	for _, m := range messages {
		if err := unixsock.Send(c.(*net.UnixConn), []byte(m), []*os.File{null}); err != nil {
			break // sluiced has ended the connection
		}
	}
	for {
		_, files, err := unixsock.Receive(c.(*net.UnixConn), make([]byte, 64<<10))
		unixsock.Close(files)
		if err != nil {
			return
		}
	}
}
