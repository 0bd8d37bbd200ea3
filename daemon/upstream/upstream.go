// Package upstream is the node's proxy: its address, whether it is there, the request for a destination, and the
// meaning of its answers.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/daemon/throttle"
)

const (
	// dialInterval is the time between attempts to reach an upstream that is late while a connection waits for it: the
	// gate opens within 100 ms.
	dialInterval = 80 * time.Millisecond
	// quietInterval is the time between attempts while nothing waits.
	quietInterval = time.Second
	// dialTimeout bounds the TCP handshake with the upstream. An upstream whose backlog is full drops SYNs, and refuses
	// nothing; the kernel sends the second SYN after 1 s and the third after 3 s.
	dialTimeout = 5 * time.Second
	// refillDelay is the time before another idle connection is dialed in place of one that was taken: the request on
	// that one is more urgent.
	refillDelay = time.Millisecond
	// exhaustedInterval is the time between attempts while this process lacks descriptors, ports or memory.
	exhaustedInterval = time.Second
)

// Upstream is the node's proxy.
type Upstream struct {
	name     string
	locate   func() (string, error)
	protocol config.Protocol
	secret   string // empty: none
	ofPods   bool   // the upstream is located among the pods of this node
	log      *slog.Logger
	every    time.Duration // between probes; 0 for none
	dialed   chan struct{} // receives when a dial has succeeded; the probes listen
	doubted  chan struct{} // receives when an answer was unclear; keepProving listens
	wanted   chan struct{} // receives when a late upstream begins to be waited for, or is asked about; Run listens

	// mu guards the fields below. It is held for moments. No lock but that of lines is taken under it.
	mu     sync.Mutex
	idle   *idleConn     // nil while there is none
	ready  chan struct{} // closed while the upstream is there
	since  time.Time     // when ready last changed
	reason string        // why the upstream is late, or how it is misconfigured
	waits  int           // how many calls of Wait wait
	// connected is when the upstream has last made a connection, for a pod or for a probe.
	connected time.Time
	// misconfigured is when the upstream has last shown a misconfiguration. suspected is since when its answers may
	// mean one, if it has made no connection since then.
	misconfigured, suspected time.Time
	lines                    throttle.Lines
}

// New describes an upstream. It is late until Run has found it. locate returns the address to dial now; nil stands for
// the configured address.
func New(c config.Upstream, locate func() (string, error), log *slog.Logger) *Upstream {
	if locate == nil {
		locate = func() (string, error) { return c.Address, nil }
	}
	return &Upstream{
		name: c.String(), locate: locate, protocol: c.Protocol, log: log, ofPods: c.Address == "",
		every: c.ProbeInterval, dialed: make(chan struct{}, 1), doubted: make(chan struct{}, 1),
		wanted: make(chan struct{}, 1), ready: make(chan struct{}), since: time.Now(), reason: "not dialed yet",
	}
}

// Authenticate adds a secret to requests of the protocol connect, as long as they stay on this node. A proxy that knows
// it can tell the daemon's requests from those of other clients. It is called before Run.
func (u *Upstream) Authenticate(secret string) { u.secret = secret }

// Run watches the upstream until ctx ends. It keeps one idle connection to it. The end of that connection is the
// earliest and cheapest sign that the proxy has ended, and the next request takes it, which saves the dial.
func (u *Upstream) Run(ctx context.Context) error {
	var probing sync.WaitGroup
	defer probing.Wait()
	probing.Go(func() { u.keepProving(ctx) })
	if u.every > 0 {
		probing.Go(func() { u.keepProbing(ctx) })
	}
	for ctx.Err() == nil {
		next := time.Now().Add(dialInterval)
		conn, err := u.dial(ctx)
		switch {
		case err == nil:
			u.recordDialed()
			if u.offer(ctx, conn) {
				_ = pause.For(ctx, refillDelay) // the loop looks at ctx
				continue
			}
			// The proxy has ended, or it ends idle connections: the next dial tells which.
		case ctx.Err() == nil && isLocalExhaustion(err):
			u.log.Warn("upstream cannot be dialed: this node lacks file descriptors, ports or memory",
				"upstream", u.name, "err", err)
			next = next.Add(exhaustedInterval)
		case ctx.Err() == nil:
			u.markLate(err)
		}
		_ = pause.For(ctx, time.Until(next)) // the loop looks at ctx
		u.awaitDemand(ctx)
	}
	return nil
}

// awaitDemand delays the next attempt to reach a late upstream while nothing waits for it: until something does, or its
// status is asked for, for quietInterval at most.
func (u *Upstream) awaitDemand(ctx context.Context) {
	u.mu.Lock()
	demanded := u.waits > 0 || u.isReadyLocked()
	u.mu.Unlock()
	if demanded {
		return
	}
	quiet := time.NewTimer(quietInterval)
	defer quiet.Stop()
	select {
	case <-u.wanted:
	case <-quiet.C:
	case <-ctx.Done():
	}
}

// demand ends awaitDemand.
func (u *Upstream) demand() {
	select {
	case u.wanted <- struct{}{}:
	default: // it is about to end
	}
}

// recordDialed takes the upstream for ready, unless probes decide that.
func (u *Upstream) recordDialed() {
	if u.every == 0 {
		u.markReady()
		return
	}
	if !u.isReady() {
		select {
		case u.dialed <- struct{}{}:
		default:
		}
	}
}

// dontPace is what the listeners do too (package gate): there is no pacing within the node.
func dontPace(fd int) { _ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic") }

// isLocalExhaustion recognises errors that mean local resource exhaustion, not a failure of the upstream: waiting
// connections must not be told that the upstream is late.
func isLocalExhaustion(err error) bool {
	for _, errno := range []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EADDRNOTAVAIL} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// Dial returns a connection on which one request can be made: the idle one, or a new one. Every error
// wraps ErrLate.
func (u *Upstream) Dial(ctx context.Context) (*Conn, error) {
	if c := u.swapIdle(nil); c != nil {
		// Where an answer follows, it tells whether the connection is still there.
		if u.protocol != config.ProxyV2 || !isReadable(c.TCPConn) {
			return &Conn{c.TCPConn, c}, nil
		}
		_ = c.Close() // the proxy has ended it, and the app's bytes would be lost
	}
	conn, err := u.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLate, err)
	}
	return &Conn{conn, conn}, nil
}
