package agent

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

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// A hand-over. The new daemon asks for it at the agent socket, with an HTTP request that the old one answers with
// "101 Switching Protocols". From then on the old one sends lines of JSON: for each gate one, with its listening
// sockets as SCM_RIGHTS, and one that ends them. When the new one serves those gates it answers with a line of its
// own; until then the old one can go on as if nothing had been asked.
const (
	pathHandover = "/v1/handover"
	protocol     = "sluice-handover/1"
)

const (
	// answerPatience is how long the old daemon may take to answer: one that takes longer hangs.
	answerPatience = 2 * time.Second
	// handoverPatience is how long either may take from then on. The old one may have a pod to see to first, and the API
	// server to ask about it.
	handoverPatience = 10 * time.Second
	// drainTime is how long a daemon that has handed over goes on relaying what is open.
	drainTime = 5 * time.Minute
)

// errRetired is the answer of a daemon that has handed over.
var errRetired = errors.New("another sluiced has taken over")

// handover is one line.
type handover struct {
	Netns attach.NetnsID `json:"netns"`
	End   bool           `json:"end,omitempty"`
	Taken bool           `json:"taken,omitempty"`
}

func (a *Agent) isRetired() bool {
	select {
	case <-a.retired:
		return true
	default:
		return false
	}
}

// Retired is closed when another daemon has taken over.
func (a *Agent) Retired() <-chan struct{} { return a.retired }

// drained waits for what is relayed to end, but no longer than d. What of it waits for the upstream still does not do so
// for longer than it may. What is left of pods that went ends: nobody else tells of them, and their connections would
// hold their netns.
func (a *Agent) drained(d time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.serving.Wait()
	}()
	look := time.NewTicker(reconcileInterval)
	defer look.Stop()
	enough := time.After(d)
	for {
		select {
		case now := <-look.C:
			a.attend(now)
			for _, r := range a.gone() {
				a.forget(r.ID)
			}
		case <-done:
			return
		case <-enough:
			return
		}
	}
}

// HandOver gives every gate to whoever is at the other end of conn. If that fails it goes on serving them itself.
func (a *Agent) HandOver(conn *net.UnixConn) error {
	a.handing.Lock()
	defer a.handing.Unlock()
	if a.isRetired() {
		return errRetired
	}
	if err := conn.SetDeadline(time.Now().Add(handoverPatience)); err != nil {
		return err
	}
	if err := a.sendGates(conn); err != nil {
		a.resume()
		return fmt.Errorf("handing over: %w", err)
	}
	a.retire()
	return nil
}

// retire leaves the gates to another daemon. It is for who holds handing.
func (a *Agent) retire() {
	for _, n := range a.all() {
		a.release(n) // what it relays goes on
	}
	close(a.retired)
	a.dropInherited()
}

// yield retires if another daemon serves the agent socket by now, and has not asked for the gates: this one has hung for so
// long that it was given up.
func (a *Agent) yield() {
	if a.socket == nil || !a.socket.Replaced() {
		return
	}
	a.handing.Lock()
	defer a.handing.Unlock()
	if !a.isRetired() {
		a.log.Error("another sluiced has gone on without this one, which has hung; what is open is relayed to its end")
		a.retire()
	}
}

func (a *Agent) sendGates(conn *net.UnixConn) error {
	for _, n := range a.all() {
		if n.gate == nil {
			continue
		}
		n.refuse(errLeft)
		if err := n.gate.Pause(); err != nil {
			return err
		}
		line, err := json.Marshal(handover{Netns: n.id})
		if err != nil {
			return err
		}
		if err := unixsock.Send(conn, append(line, '\n'), n.gate.Files()); err != nil {
			return err
		}
	}
	if err := json.NewEncoder(conn).Encode(handover{End: true}); err != nil {
		return err
	}
	var answer handover
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return err
	}
	if !answer.Taken {
		return errors.New("the other did not take them")
	}
	return nil
}

// resume accepts again after a hand-over that failed.
func (a *Agent) resume() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, n := range a.netns {
		if n.gate == nil {
			continue
		}
		if err := a.serve(n, n.gate); err != nil {
			a.log.Error("accepting again", "err", err)
		}
	}
}

// serveHandover is the handler of pathHandover.
func (a *Agent) serveHandover(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != protocol {
		answer(w, nil, &attach.RefusedError{Message: "this sluiced hands over by " + protocol, Final: true})
		return
	}
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		answer(w, nil, err)
		return
	}
	defer c.Close() //nolint:errcheck // everything was said
	if _, err := io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"); err != nil {
		return
	}
	if err := a.HandOver(c.(*net.UnixConn)); err != nil {
		a.log.Error("still here", "err", err)
		return
	}
	a.log.Info("handed over to another sluiced; what is open is relayed to its end")
}

// TakeOver asks the daemon at the agent socket, if there is one, for its gates. After it, Begin and then taken
// complete the hand-over. That nobody answers is no error.
func (a *Agent) TakeOver(socket string) (taken func() error, err error) {
	nothing := func() error { return nil }
	c, err := net.DialTimeout("unix", socket, answerPatience)
	if errors.Is(err, unix.EAGAIN) { // so many have asked it already
		a.giveUp(err)
	}
	conn, there := c.(*net.UnixConn)
	if !there {
		return nothing, nil
	}
	taken, err = a.takeOver(conn)
	if err == nil {
		return taken, nil
	}
	_ = conn.Close() // nothing more to say
	if errors.Is(err, os.ErrDeadlineExceeded) {
		a.giveUp(err)
		return nothing, nil
	}
	return nil, fmt.Errorf("another sluiced serves the agent socket %s, and does not hand over: %w", socket, err)
}

// giveUp goes on without the daemon before this one.
func (a *Agent) giveUp(err error) {
	a.log.Warn("the sluiced before this one hangs; going on without it", "err", err)
	a.evictFrom = time.Now().Add(a.Returning)
}

func (a *Agent) takeOver(conn *net.UnixConn) (taken func() error, err error) {
	if err := conn.SetDeadline(time.Now().Add(answerPatience)); err != nil {
		return nil, err
	}
	if _, err := io.WriteString(conn, "POST "+pathHandover+" HTTP/1.1\r\nHost: sluiced\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"); err != nil {
		return nil, err
	}
	in := &rights{conn: conn}
	lines := bufio.NewReader(in)
	resp, err := http.ReadResponse(lines, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // what follows a 101 is not its body
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, errors.New(resp.Status)
	}
	if err := conn.SetDeadline(time.Now().Add(handoverPatience)); err != nil {
		return nil, err
	}
	if err := a.receiveGates(json.NewDecoder(lines), in); err != nil {
		a.dropInherited()
		return nil, err
	}
	return func() error {
		defer conn.Close() //nolint:errcheck // everything was said
		a.dropInherited()
		return json.NewEncoder(conn).Encode(handover{Taken: true})
	}, nil
}

func (a *Agent) receiveGates(lines *json.Decoder, in *rights) error {
	for {
		var h handover
		if err := lines.Decode(&h); err != nil {
			return err
		}
		if h.End {
			return nil
		}
		a.mu.Lock()
		a.inherited[h.Netns] = in.take()
		a.mu.Unlock()
	}
}

// inherit returns the listeners that were handed over, or back, for a netns, once.
func (a *Agent) inherit(id attach.NetnsID) []*os.File {
	a.mu.Lock()
	defer a.mu.Unlock()
	files := a.inherited[id]
	delete(a.inherited, id)
	return files
}

// Returned takes listeners back that a proxy has from a daemon before this one, which did not live to hand them over.
// While the proxy has them, others cannot be opened. Those that nobody misses are closed.
func (a *Agent) Returned(netns string, files []*os.File) {
	a.handing.RLock()
	defer a.handing.RUnlock()
	if a.isRetired() {
		unixsock.Close(files)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, n := range a.netns {
		if id.String() != netns || n.gate != nil || a.inherited[id] != nil || !n.captured() {
			continue
		}
		if err := gate.Belong(files, id); err != nil {
			a.log.Error("listeners from a proxy", "err", err)
			break
		}
		a.inherited[id] = files
		a.watched = time.Time{} // take the records up again
		return
	}
	unixsock.Close(files)
}

// captured is for who holds Agent.mu.
func (n *netns) captured() bool {
	for _, r := range n.attachments {
		if r.State == attach.Captured {
			return true
		}
	}
	return false
}

// dropInherited closes the listeners that nobody wanted.
func (a *Agent) dropInherited() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, files := range a.inherited {
		unixsock.Close(files)
		delete(a.inherited, id)
	}
}

// rights reads from a connection, and keeps the descriptors that come along.
type rights struct {
	conn  *net.UnixConn
	files []*os.File
}

// take returns the descriptors that came since the last time.
func (r *rights) take() []*os.File {
	files := r.files
	r.files = nil
	return files
}

func (r *rights) Read(p []byte) (int, error) {
	n, files, err := unixsock.Receive(r.conn, p)
	r.files = append(r.files, files...)
	if err == nil && n == 0 {
		err = io.EOF
	}
	return n, err
}
