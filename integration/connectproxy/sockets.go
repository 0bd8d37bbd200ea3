package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/daemon/unixsock"
)

// message is a message of the protocol in docs/proxies.md, with the fields that this proxy uses.
type message struct {
	Kind        string `json:"kind"`
	Version     int    `json:"version,omitempty"`
	Name        string `json:"name,omitempty"`
	ID          string `json:"id,omitempty"`
	Held        int    `json:"held,omitempty"`
	Connections int    `json:"connections,omitempty"`
	Error       string `json:"error,omitempty"`
}

// silence is the time without a message after which sluiced counts as hung. Another one may run by then.
const silence = 5 * time.Second

// taker accepts connections on the sockets that sluiced hands over. When sluiced ends, taker keeps the sockets and
// reconnects.
type taker struct {
	path  string
	quiet bool
	open  atomic.Int64
	held  map[string]holding
}

// holding contains the sockets of one netns.
type holding struct {
	files     []*os.File // sent to the next sluiced with "held"
	listeners []net.Listener
}

func (h holding) close() {
	unixsock.Close(h.files)
	for _, l := range h.listeners {
		_ = l.Close() // ends the goroutine that accepts on it
	}
}

// run connects to sluiced again and again.
func (t *taker) run() {
	t.held = map[string]holding{}
	for logged := ""; ; time.Sleep(100 * time.Millisecond) {
		if err := t.talk(); err.Error() != logged {
			logged = err.Error()
			log.Printf("%s: %s; connecting again", t.path, logged)
		}
	}
}

// talk connects to sluiced and obeys its messages until the connection ends. It always returns an error.
func (t *taker) talk() error {
	c, err := net.Dial("unixpacket", t.path)
	if err != nil {
		return err
	}
	sluiced := c.(*net.UnixConn)
	defer sluiced.Close() //nolint:errcheck // talk returns the error that ended the connection
	hello := message{Kind: "hello", Version: 1, Name: "connectproxy", Held: len(t.held)}
	if err := tell(sluiced, hello, nil); err != nil {
		return err
	}
	for id, h := range t.held {
		if err := tell(sluiced, message{Kind: "held", ID: id}, h.files); err != nil {
			return err
		}
	}
	buffer := make([]byte, 64<<10)
	for {
		if err := sluiced.SetReadDeadline(time.Now().Add(silence)); err != nil {
			return err
		}
		n, files, err := unixsock.Receive(sluiced, buffer)
		if err != nil {
			return err
		}
		if n == 0 {
			return io.EOF
		}
		var m message
		if err := json.Unmarshal(buffer[:n], &m); err != nil {
			return err
		}
		if err := t.obey(sluiced, m, files); err != nil {
			return err
		}
	}
}

func (t *taker) obey(sluiced *net.UnixConn, m message, files []*os.File) error {
	switch m.Kind {
	case "attach":
		t.held[m.ID].close()
		h := holding{files: files}
		for _, f := range files {
			l, err := net.FileListener(f)
			if err != nil {
				return err
			}
			h.listeners = append(h.listeners, l)
			go t.accept(l)
		}
		t.held[m.ID] = h
	case "detach":
		t.held[m.ID].close()
		delete(t.held, m.ID)
		return tell(sluiced, message{Kind: "detached", ID: m.ID}, nil)
	case "ping":
		return tell(sluiced, message{Kind: "state", Connections: int(t.open.Load())}, nil)
	case "error":
		return fmt.Errorf("sluiced refuses this proxy: %s", m.Error)
	}
	return nil
}

func tell(to *net.UnixConn, m message, files []*os.File) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return unixsock.Send(to, data, files)
}

func (t *taker) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return // closed by holding.close
		}
		go func() {
			t.open.Add(1)
			defer t.open.Add(-1)
			client := c.(*net.TCPConn)
			defer client.Close() //nolint:errcheck // all data have been sent, or the connection has failed already
			to, err := conntrack.OriginalDestination(client)
			if err != nil {
				log.Printf("reading the original destination of a connection: %v", err)
				return
			}
			server, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(to))
			if err != nil {
				_ = client.SetLinger(0)
				return
			}
			defer server.Close() //nolint:errcheck // as above
			if !t.quiet {
				log.Printf("accepted from %s, to %s", client.RemoteAddr(), to)
			}
			join(client, server)
		}()
	}
}
