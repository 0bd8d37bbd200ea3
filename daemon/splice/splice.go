// Package splice joins an app's connection with another one, and carries bytes between them until both directions have
// ended.
package splice

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
)

// Pair is two connections to be joined.
type Pair struct {
	// App is the captured connection. Any close of it is a reset. Peer is the one to the upstream or the destination.
	App, Peer socket.Stream
	// First are bytes that Peer has sent already.
	First []byte
	// HalfClose says that Peer's protocol can carry the end of one direction alone. A peer whose protocol cannot drops
	// the data that the other direction still carries.
	HalfClose bool
	// AppState looks at the app's socket.
	AppState func() sockdiag.AppState
}

// joint is a pair that is joined.
type joint struct {
	Pair
	set      *Set
	done     func() // called when both connections are closed
	forget   func() bool
	answered chan struct{} // closed when the direction to the app has ended
	up, down int64         // bytes; each belongs to the goroutine of its direction
	once     sync.Once
	passing  atomic.Bool // set before a FIN is passed on to Peer
	gone     atomic.Bool // set before the direction to the app is ended by a deadline
	quiet    quiet
}

// Set counts the pairs that are joined. Its zero value is an empty set.
type Set struct {
	mu    sync.Mutex // guards the fields below; no lock is taken under it
	open  map[socket.Stream]struct{}
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
// The data stays in the kernel, by splice(2). A peer that fails may have answered before: the app gets what the kernel
// has of the answer, and then the reset.
func (s *Set) Join(ctx context.Context, p Pair) {
	var wg sync.WaitGroup
	wg.Add(1)
	s.Start(ctx, p, wg.Done)
	wg.Wait()
}

// Start is Join in goroutines of its own, whose stacks are as small as they can be, and which end while nothing is
// carried: a connection may be idle for hours. It calls done when both connections are closed.
func (s *Set) Start(ctx context.Context, pair Pair, done func()) { s.start(ctx, pair, done) }

func (s *Set) start(ctx context.Context, pair Pair, done func()) *joint {
	s.add(pair.App)
	p := &joint{Pair: pair, set: s, done: done, answered: make(chan struct{})}
	// If this process is killed, the kernel resets this one too: a part of the data must not be taken for all of it.
	_ = socket.SetResetOnClose(p.Peer, true) // fails only if closed, as the calls below will then
	p.beginLooks()
	p.forget = context.AfterFunc(ctx, func() {
		p.reset()
		p.resume() // the goroutines end by that
	})
	go p.toApp()
	go p.toPeer()
	return p
}

func (s *Set) add(app socket.Stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[socket.Stream]struct{}{}
	}
	s.open[app] = struct{}{}
}

func (s *Set) remove(app socket.Stream, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes += bytes
	delete(s.open, app)
}

// toPeer is the goroutine of the direction to the peer. It ends the pair.
func (p *joint) toPeer() {
	if p.copyToPeer() {
		<-p.answered
		p.endLooks()
		p.close(uint64(p.up + p.down))
		p.forget()
		p.done()
	}
}

// toApp is the goroutine of the direction to the app.
func (p *joint) toApp() {
	if p.copyToApp() {
		close(p.answered)
	}
}

// copyToPeer returns true when this direction has ended and the other direction needs no attention any more, and false
// if the pair rests.
func (p *joint) copyToPeer() (ended bool) {
	err := p.carry(p.Peer, p.App, &p.up, p.toPeer)
	switch {
	case errors.Is(err, errRests):
		return false
	case errors.Is(err, errTo):
		d := p.watchDelivery()
		if !poll(p.answered, deliverPause, func() bool { return d.quiet() > drainTimeout }) {
			p.reset() // else both are reset already
		}
	case err != nil:
		p.reset()
	default:
		if !p.HalfClose {
			p.holdFIN()
		}
		p.passing.Store(true)
		p.passFIN(p.Peer)
		p.endWithApp()
	}
	return true
}

// copyToApp returns false if the pair rests.
func (p *joint) copyToApp() (ended bool) {
	if len(p.First) > 0 {
		if _, err := p.App.Write(p.First); err != nil {
			p.reset()
			return true
		}
		p.down += int64(len(p.First))
		p.First = nil
	}
	err := p.carry(p.App, p.Peer, &p.down, p.toApp)
	switch {
	case errors.Is(err, errRests):
		return false
	case err == nil && !p.peerFailed():
		p.passFIN(p.App)
	case errors.Is(err, errTo):
		p.reset()
	case !errors.Is(err, os.ErrDeadlineExceeded): // endWithApp sets a deadline
		p.deliver()
		p.reset()
	}
	return true
}

// peerFailed tells a reset of the peer from the end of its data. The kernel reports a reset once: if the direction to
// the peer has got it, reading ends as if the peer had sent a FIN. Without a FIN to the peer, only a reset closes.
func (p *joint) peerFailed() bool { return socket.IsReset(p.Peer) && !p.passing.Load() }

func (p *joint) passFIN(to socket.Stream) {
	if err := socket.CloseWrite(to); err != nil {
		p.reset()
	}
}

// reset ends both connections with a RST.
func (p *joint) reset() {
	p.once.Do(func() {
		p.set.remove(p.App, socket.Carried(p.App))
		socket.Reset(p.App)
		socket.Reset(p.Peer)
	})
}

// close ends both connections. The data in the send buffers still arrives.
func (p *joint) close(bytes uint64) {
	p.once.Do(func() {
		p.set.remove(p.App, bytes)
		for _, c := range []socket.Stream{p.App, p.Peer} {
			_ = errors.Join(socket.SetResetOnClose(c, false), c.Close()) // fails only if closed
		}
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
func (p *joint) holdFIN() {
	d := p.watchDelivery()
	poll(p.answered, time.Second, func() (done bool) {
		quiet := quietUnknown
		switch p.AppState() {
		case sockdiag.AppClosed:
			return true
		case sockdiag.AppOpen:
			quiet = quietOpen
		}
		return d.quiet() > quiet
	})
}

// endWithApp ends the other direction once the app has gone and all of its data has arrived. A peer that never ends its
// side would keep both connections for ever: mitmproxy 8.1.1 does not, if the client ends first.
func (p *joint) endWithApp() {
	if sleep(p.answered, time.Millisecond) { // most peers end their side at once
		return
	}
	poll(p.answered, time.Second, func() (done bool) {
		// An app whose state is unknown shows by a reset, with which its kernel answers keepalives.
		gone := socket.IsReset(p.App) || socket.IsFINAcked(p.Peer) && p.AppState() == sockdiag.AppClosed
		if gone {
			p.gone.Store(true)
			_ = p.Peer.SetReadDeadline(time.Unix(1, 0)) // fails only if that direction has ended
		}
		return gone
	})
}

// drainTimeout bounds how long the answer of a peer that has failed may make no progress to the app. The bytes are
// those that the kernel has received of it, so there are no more than a receive buffer holds.
const drainTimeout = 5 * time.Second

// deliverPause is the longest pause between looks at such an answer: the reset that follows it comes no later.
const deliverPause = 100 * time.Millisecond

// deliver returns when the app's kernel has all that was written to the app: a reset would overtake it. It gives up an
// app that does not read.
func (p *joint) deliver() {
	d := p.watchDelivery()
	poll(nil, deliverPause, func() bool {
		return socket.IsDelivered(p.App) || socket.IsReset(p.App) || d.quiet() > drainTimeout
	})
}

// delivery tells how long nothing has arrived at the app.
type delivery struct {
	app   socket.Stream
	bytes uint64
	since time.Time
}

func (p *joint) watchDelivery() *delivery {
	return &delivery{p.App, socket.Delivered(p.App), time.Now()}
}

func (d *delivery) quiet() time.Duration {
	if now := socket.Delivered(d.app); now != d.bytes {
		d.bytes, d.since = now, time.Now()
	}
	return time.Since(d.since)
}

// poll calls check until it returns true, or until stop is closed, with pauses that double up to longest. It polls
// because the kernel reports no event when the app closes its socket, or when its bytes arrive there.
func poll(stop <-chan struct{}, longest time.Duration, check func() (done bool)) (stopped bool) {
	for pause := time.Millisecond; !check(); pause = min(2*pause, longest) {
		if sleep(stop, pause) {
			return true
		}
	}
	return false
}

// sleep returns true as soon as stop is closed.
func sleep(stop <-chan struct{}, d time.Duration) (stopped bool) {
	select {
	case <-stop:
		return true
	case <-time.After(d):
		return false
	}
}
