// Package splice joins an app's connection with another one, and carries bytes between them until both directions have
// ended.
package splice

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
)

// Pair is two connections to be joined.
type Pair struct {
	// App is the captured connection, Peer the one to the upstream or the destination.
	App, Peer *net.TCPConn
	// First are bytes that Peer has sent already.
	First []byte
	// HalfClose says that Peer's protocol can carry the end of one direction alone. A peer whose protocol cannot drops
	// the data that the other direction still carries.
	HalfClose bool
	// AppState looks at the app's socket.
	AppState func() sockdiag.AppState

	closed func(bytes uint64) // called once, before the connections are closed
	once   *sync.Once
}

// Set counts the pairs that are joined. Its zero value is an empty set.
type Set struct {
	mu    sync.Mutex // guards the fields below; no lock is taken under it
	open  map[*net.TCPConn]struct{}
	bytes uint64 // of pairs that have ended
}

// Counts asks the kernel how many bytes the open pairs have carried, and adds those of the ended ones.
func (s *Set) Counts() sockdiag.Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := sockdiag.Counts{Open: len(s.open), Bytes: s.bytes}
	for app := range s.open {
		c.Bytes += socket.Carried(app)
	}
	return c
}

// Join carries bytes both ways until both directions have ended, and closes both connections, which it owns. The end of
// one direction is passed on as such. An error in either, a reset above all, resets both, and so does the end of ctx.
//
// The data stays in the kernel: io.Copy between TCP connections uses splice(2).
func (s *Set) Join(ctx context.Context, p Pair) {
	s.add(p.App)
	p.once, p.closed = new(sync.Once), func(bytes uint64) { s.remove(p.App, bytes) }
	// If this process is killed, the kernel resets both: the app must not take a part of the data for all of it.
	_ = errors.Join(p.App.SetLinger(0), p.Peer.SetLinger(0)) // fails only if closed, as the calls below will then
	stop := context.AfterFunc(ctx, p.reset)
	defer stop()
	answered := make(chan struct{}) // closed when the direction to the app has ended
	var up, down int64
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(answered)
		down = p.copyToApp()
	})
	up = p.copyToPeer(answered)
	wg.Wait()
	p.close(uint64(up + down))
}

func (s *Set) add(app *net.TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[*net.TCPConn]struct{}{}
	}
	s.open[app] = struct{}{}
}

func (s *Set) remove(app *net.TCPConn, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes += bytes
	delete(s.open, app)
}

// copyToPeer returns when this direction has ended and the other direction needs no attention any more.
func (p *Pair) copyToPeer(answered <-chan struct{}) int64 {
	n, err := io.Copy(p.Peer, p.App)
	if err != nil {
		p.reset()
		return n
	}
	if !p.HalfClose {
		p.holdFIN(answered)
	}
	p.passFIN(p.Peer)
	p.endWithApp(answered)
	return n
}

func (p *Pair) copyToApp() int64 {
	if len(p.First) > 0 {
		if _, err := p.App.Write(p.First); err != nil {
			p.reset()
			return 0
		}
	}
	n, err := io.Copy(p.App, p.Peer)
	switch {
	case err == nil:
		p.passFIN(p.App)
	case !errors.Is(err, os.ErrDeadlineExceeded): // endWithApp sets a deadline
		p.reset()
	}
	return n + int64(len(p.First))
}

func (p *Pair) passFIN(to *net.TCPConn) {
	if err := to.CloseWrite(); err != nil {
		p.reset()
	}
}

// reset ends both connections with a RST.
func (p *Pair) reset() {
	p.once.Do(func() {
		p.closed(socket.Carried(p.App))
		socket.Reset(p.App)
		socket.Reset(p.Peer)
	})
}

// close ends both connections. The data in the send buffers still arrives.
func (p *Pair) close(bytes uint64) {
	p.once.Do(func() {
		p.closed(bytes)
		_ = errors.Join(p.App.SetLinger(-1), p.Peer.SetLinger(-1), p.App.Close(), p.Peer.Close())
	})
}

// The app's FIN is held back for so long while nothing comes from the peer. An app that is known to be there may wait
// for a slow answer. If the app's socket is not found, it is not known whether the app still waits.
const (
	quietOpen    = time.Minute
	quietUnknown = 5 * time.Second
)

// holdFIN returns when the app's FIN may be passed on: the other direction has ended, the app has closed its socket, or
// the other direction has been quiet for long.
func (p *Pair) holdFIN(answered <-chan struct{}) {
	last, since := socket.Delivered(p.App), time.Now()
	poll(answered, func() (done bool) {
		quiet := quietUnknown
		switch p.AppState() {
		case sockdiag.AppClosed:
			return true
		case sockdiag.AppOpen:
			quiet = quietOpen
		}
		if now := socket.Delivered(p.App); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > quiet
	})
}

// endWithApp ends the other direction once the app has gone and all of its data has arrived. A peer that never ends its
// side would keep both connections for ever: mitmproxy 8.1.1 does not, if the client ends first.
func (p *Pair) endWithApp(answered <-chan struct{}) {
	poll(answered, func() (done bool) {
		// An app whose state is unknown shows by a reset, with which its kernel answers keepalives.
		gone := socket.IsReset(p.App) || socket.IsFINAcked(p.Peer) && p.AppState() == sockdiag.AppClosed
		if gone {
			_ = p.Peer.SetReadDeadline(time.Unix(1, 0)) // fails only if that direction has ended
		}
		return gone
	})
}

// poll calls check until it returns true, or until stop is closed. It polls because the kernel reports no event when
// the app closes its socket.
func poll(stop <-chan struct{}, check func() (done bool)) {
	for wait := time.Millisecond; !check(); wait = min(2*wait, time.Second) {
		select {
		case <-stop:
			return
		case <-time.After(wait):
		}
	}
}
