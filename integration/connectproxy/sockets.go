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

// message is what of docs/proxies.md matters here.
type message struct {
	Kind        string `json:"kind"`
	Version     int    `json:"version,omitempty"`
	Name        string `json:"name,omitempty"`
	ID          string `json:"id,omitempty"`
	Held        int    `json:"held,omitempty"`
	Connections int    `json:"connections,omitempty"`
	Error       string `json:"error,omitempty"`
}

// taker accepts on the sockets that sluiced hands over. What it holds it keeps when sluiced goes, and comes again.
type taker struct {
	path  string
	quiet bool
	open  atomic.Int64
	held  map[string]holding
}

// holding is the sockets of one netns.
type holding struct {
	files     []*os.File // to be shown to the next sluiced
	listeners []net.Listener
}

func (h holding) close() {
	unixsock.Close(h.files)
	for _, l := range h.listeners {
		_ = l.Close() // it ends who accepts
	}
}

// run comes to sluiced again and again.
func (t *taker) run() {
	t.held = map[string]holding{}
	for said := ""; ; time.Sleep(100 * time.Millisecond) {
		if err := t.talk(); err.Error() != said {
			said = err.Error()
			log.Printf("%s: %s; trying again", t.path, said)
		}
	}
}

// talk is one conversation with sluiced.
func (t *taker) talk() error {
	c, err := net.Dial("unixpacket", t.path)
	if err != nil {
		return err
	}
	sluiced := c.(*net.UnixConn)
	defer sluiced.Close() //nolint:errcheck // it ended for another reason
	if err := tell(sluiced, message{Kind: "hello", Version: 1, Name: "connectproxy", Held: len(t.held)}, nil); err != nil {
		return err
	}
	for id, h := range t.held {
		if err := tell(sluiced, message{Kind: "held", ID: id}, h.files); err != nil {
			return err
		}
	}
	buffer := make([]byte, 64<<10)
	for {
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
		return fmt.Errorf("it refuses: %s", m.Error)
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
			return // let go of
		}
		go func() {
			t.open.Add(1)
			defer t.open.Add(-1)
			client := c.(*net.TCPConn)
			defer client.Close() //nolint:errcheck // whatever there was to say has been said
			to, err := conntrack.OriginalDestination(client)
			if err != nil {
				log.Printf("original destination: %v", err)
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
