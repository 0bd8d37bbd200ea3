// Package handover passes the listeners of a node from one daemon to the next, so that no connection that waits in
// their accept queues is lost.
//
// The new daemon asks at the agent socket, with an HTTP request that the old daemon answers with "101 Switching
// Protocols". From then on the old daemon sends lines of JSON: one for each netns, with its listening sockets as
// SCM_RIGHTS, and one that ends them. When the new daemon serves those listeners it confirms with a line of its own.
// Until then the old daemon can go on as if nothing had been asked.
package handover

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// Path is where the new daemon asks, and Protocol the value of the request's Upgrade header.
const (
	Path     = "/v1/handover"
	Protocol = "sluice-handover/1"
)

const (
	// answerTimeout bounds the old daemon's first answer: one that takes longer hangs.
	answerTimeout = 2 * time.Second
	// transferTimeout bounds the rest, on both sides. The old daemon may have to finish with a pod first, and to ask
	// the API server about it.
	transferTimeout = 10 * time.Second
)

// ErrHangs means that a daemon serves the agent socket and does not answer.
var ErrHangs = errors.New("the sluiced before this one hangs")

// line is one message of either side.
type line struct {
	Netns attach.NetnsID `json:"netns"`
	End   bool           `json:"end,omitempty"`
	Taken bool           `json:"taken,omitempty"`
}

// Offer sends the listeners of every netns to the daemon at the other end of conn, and returns when it has confirmed
// that it serves them. offer calls its argument for each netns.
func Offer(conn *net.UnixConn, offer func(send func(attach.NetnsID, []*os.File) error) error) error {
	if err := conn.SetDeadline(time.Now().Add(transferTimeout)); err != nil {
		return err
	}
	err := offer(func(id attach.NetnsID, files []*os.File) error {
		text, err := json.Marshal(line{Netns: id})
		if err != nil {
			return err
		}
		return unixsock.Send(conn, append(text, '\n'), files)
	})
	if err != nil {
		return fmt.Errorf("sending listeners: %w", err)
	}
	if err := json.NewEncoder(conn).Encode(line{End: true}); err != nil {
		return fmt.Errorf("sending listeners: %w", err)
	}
	var answer line
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return fmt.Errorf("waiting for the confirmation: %w", err)
	}
	if !answer.Taken {
		return errors.New("the other daemon did not confirm")
	}
	return nil
}

// Transfer is a hand-over as the new daemon sees it.
type Transfer struct {
	// Listeners are the listeners of each netns. They are the caller's.
	Listeners map[attach.NetnsID][]*os.File

	conn *net.UnixConn // nil if there was no daemon
}

// Confirm tells the old daemon that its listeners are served, and ends the hand-over.
func (t *Transfer) Confirm() error {
	if t.conn == nil {
		return nil
	}
	defer t.conn.Close() //nolint:errcheck // everything was sent
	if err := json.NewEncoder(t.conn).Encode(line{Taken: true}); err != nil {
		return fmt.Errorf("confirming the hand-over: %w", err)
	}
	return nil
}

// Take asks the daemon at the agent socket for its listeners. Without a daemon there the Transfer is empty. The error
// is ErrHangs if the daemon does not answer in time.
func Take(socket string) (*Transfer, error) {
	c, err := net.DialTimeout("unix", socket, answerTimeout)
	if errors.Is(err, unix.EAGAIN) { // its backlog is full: it has not answered for long
		return nil, fmt.Errorf("%w: %w", ErrHangs, err)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return &Transfer{}, nil
	}
	t := &Transfer{Listeners: map[attach.NetnsID][]*os.File{}, conn: conn}
	if err := t.receive(); err != nil {
		_ = conn.Close() // nothing more is sent
		for _, files := range t.Listeners {
			unixsock.Close(files)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, fmt.Errorf("%w: %w", ErrHangs, err)
		}
		return nil, fmt.Errorf("another sluiced serves the agent socket %s and does not hand over: %w", socket, err)
	}
	return t, nil
}

func (t *Transfer) receive() error {
	if err := t.conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	_, err := io.WriteString(t.conn, "POST "+Path+" HTTP/1.1\r\nHost: sluiced\r\n"+
		"Connection: Upgrade\r\nUpgrade: "+Protocol+"\r\n\r\n")
	if err != nil {
		return err
	}
	in := &rightsReader{conn: t.conn}
	defer func() { unixsock.Close(in.take()) }() // those of a line that was cut off
	buffered := bufio.NewReader(in)
	resp, err := http.ReadResponse(buffered, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // the lines after a 101 are not its body
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return errors.New(resp.Status)
	}
	if err := t.conn.SetDeadline(time.Now().Add(transferTimeout)); err != nil {
		return err
	}
	for lines := json.NewDecoder(buffered); ; {
		var l line
		if err := lines.Decode(&l); err != nil {
			return err
		}
		if l.End {
			return nil
		}
		t.Listeners[l.Netns] = in.take()
	}
}

// rightsReader reads from a connection, and keeps the descriptors that come along.
type rightsReader struct {
	conn  *net.UnixConn
	files []*os.File
}

// take returns the descriptors that came since the last call.
func (r *rightsReader) take() []*os.File {
	files := r.files
	r.files = nil
	return files
}

func (r *rightsReader) Read(p []byte) (int, error) {
	n, files, err := unixsock.Receive(r.conn, p)
	r.files = append(r.files, files...)
	if err == nil && n == 0 {
		err = io.EOF
	}
	return n, err
}
