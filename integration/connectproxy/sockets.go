package main

import (
	"encoding/json"
	"fmt"
	"log"
	"net"
	"os"
	"sync/atomic"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/unixsock"
)

// message is what of docs/proxies.md matters here.
type message struct {
	Kind        string `json:"kind"`
	Version     int    `json:"version,omitempty"`
	Name        string `json:"name,omitempty"`
	ID          string `json:"id,omitempty"`
	Connections int    `json:"connections,omitempty"`
	Error       string `json:"error,omitempty"`
}

// takeSockets accepts on the sockets that sluiced hands over. It does not come again: for benchmarks and tests that is
// enough.
func takeSockets(path string, quiet bool) error {
	c, err := net.Dial("unixpacket", path)
	if err != nil {
		return err
	}
	sluiced := c.(*net.UnixConn)
	tell := func(m message) error {
		data, err := json.Marshal(m)
		if err != nil {
			return err
		}
		return unixsock.Send(sluiced, data, nil)
	}
	if err := tell(message{Kind: "hello", Version: 1, Name: "connectproxy"}); err != nil {
		return err
	}
	var open atomic.Int64
	held := map[string][]net.Listener{}
	buffer := make([]byte, 64<<10)
	for {
		n, files, err := unixsock.Receive(sluiced, buffer)
		if err != nil {
			return err
		}
		var m message
		if err := json.Unmarshal(buffer[:n], &m); err != nil {
			return err
		}
		switch m.Kind {
		case "attach":
			if held[m.ID], err = listeners(files); err != nil {
				return err
			}
			for _, l := range held[m.ID] {
				go acceptFor(l, &open, quiet)
			}
		case "detach":
			for _, l := range held[m.ID] {
				_ = l.Close()
			}
			delete(held, m.ID)
			err = tell(message{Kind: "detached", ID: m.ID})
		case "ping":
			err = tell(message{Kind: "state", Connections: int(open.Load())})
		case "error":
			err = fmt.Errorf("it refuses: %s", m.Error)
		}
		if err != nil {
			return err
		}
	}
}

func listeners(files []*os.File) ([]net.Listener, error) {
	defer unixsock.Close(files)
	var all []net.Listener
	for _, f := range files {
		l, err := net.FileListener(f)
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

func acceptFor(l net.Listener, open *atomic.Int64, quiet bool) {
	for {
		c, err := l.Accept()
		if err != nil {
			return // let go of
		}
		go func() {
			open.Add(1)
			defer open.Add(-1)
			client := c.(*net.TCPConn)
			defer client.Close() //nolint:errcheck // whatever there was to say has been said
			to, err := gate.OriginalDestination(client)
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
			if !quiet {
				log.Printf("accepted from %s, to %s", client.RemoteAddr(), to)
			}
			join(client, server)
		}()
	}
}
