// Package relay carries captured connections to the upstream: it accepts when the upstream is there, asks it
// for the original destination, and joins the two.
package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	// handshakes is how many connections are on their way to the upstream's answer at a time. It is
	// well below mitmproxy's backlog of 100, beyond which its kernel drops SYNs.
	handshakes = 64
	// slow is when a handshake stops counting. The upstream's backlog has let it go by then; what
	// takes so long is the destination, and one pod's dead destinations must not delay the others.
	slow = time.Second
	// pauses between attempts grow from the first to the second.
	firstPause, lastPause = 10 * time.Millisecond, time.Second
)

// Relay serves any number of pods over one upstream.
type Relay struct {
	upstream *upstream.Upstream
	slots    chan struct{}
	log      *slog.Logger
}

// New makes a relay to up; nil for one that only takes connections to their destinations directly.
func New(up *upstream.Upstream, log *slog.Logger) *Relay {
	return &Relay{upstream: up, slots: make(chan struct{}, handshakes), log: log}
}

// Pod is whose connections come through a gate, and what has become of them.
type Pod struct {
	relay *Relay
	name  attach.Pod
	ips   []netip.Addr

	mu      sync.Mutex
	waiting map[*waiting]struct{}
	open    map[*net.TCPConn]struct{} // the apps'
	bytes   uint64                    // of connections that have ended
}

// waiting is a connection that was accepted and that the upstream has not answered for yet.
type waiting struct {
	since  time.Time
	expire context.CancelCauseFunc
	// refused is for one that the upstream, though it is there, goes on answering as it should not.
	refused bool
}

// errExpired is why a connection waits no more, and directError is too.
var errExpired = errors.New("it has waited for longer than its pod's timeout")

type directError struct{ went func(error) }

func (directError) Error() string { return errExpired.Error() + ", and goes direct" }

// For makes a pod, with its addresses, whose connections are relayed.
func (r *Relay) For(name attach.Pod, ips []netip.Addr) *Pod {
	return &Pod{relay: r, name: name, ips: ips}
}

// Waiting counts the connections that were accepted and that the upstream has not answered for yet.
func (p *Pod) Waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waiting)
}

// Expire ends the wait of those that have waited for longer than d, and tells how many: they are reset, or go direct if
// that is not nil, and told of. One that the upstream is at work on does not wait for the upstream.
func (p *Pod) Expire(d time.Duration, direct func(error)) (count int) {
	why := errExpired
	if direct != nil {
		why = directError{direct}
	}
	late := p.relay.upstream.Status().Late() != nil
	p.mu.Lock()
	defer p.mu.Unlock()
	for w := range p.waiting {
		if time.Since(w.since) > d && (late || w.refused) {
			w.expire(why)
			delete(p.waiting, w) // it counts once
			count++
		}
	}
	return count
}

// wait is the context of a connection while it waits, until done. refused notes that it is.
func (p *Pod) wait(ctx context.Context) (_ context.Context, refused, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &waiting{since: time.Now(), expire: cancel}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting == nil {
		p.waiting = map[*waiting]struct{}{}
	}
	p.waiting[w] = struct{}{}
	refused = func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		w.refused = true
	}
	return ctx, refused, func() {
		cancel(nil)
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.waiting, w)
	}
}

// Counts asks the kernel for what the open connections have carried so far.
func (p *Pod) Counts() gate.Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := gate.Counts{Open: len(p.open), Bytes: p.bytes}
	for conn := range p.open {
		c.Bytes += carried(conn)
	}
	return c
}

func (p *Pod) opened(app *net.TCPConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		p.open = map[*net.TCPConn]struct{}{}
	}
	p.open[app] = struct{}{}
}

func (p *Pod) closed(app *net.TCPConn, bytes uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes += bytes
	delete(p.open, app)
}

// Serve accepts what comes through g until g is closed or paused, or accepting ends, and returns when the last
// connection has ended; the end of ctx ends them all. Nothing is accepted while the upstream is late.
func (p *Pod) Serve(ctx, accepting context.Context, g *gate.Gate) {
	var wg sync.WaitGroup
	for _, l := range g.Listeners {
		wg.Go(func() { p.accept(ctx, accepting, g, l, &wg) })
	}
	wg.Wait()
}

func (p *Pod) accept(ctx, accepting context.Context, g *gate.Gate, l *gate.Listener, wg *sync.WaitGroup) {
	r := p.relay
	for {
		if err := l.Wait(); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				r.log.Error("no longer accepting", "pod", p.name, "err", err)
			}
			return
		}
		slot, err := r.enter(accepting)
		if err != nil {
			return // only accepting
		}
		conn, err := l.Accept(ctx)
		if conn == nil {
			slot.leave()
			if errors.Is(err, os.ErrClosed) {
				return
			}
			if err != nil { // out of descriptors, most likely: it waits where it is
				r.log.Warn("accepting", "pod", p.name, "err", err)
				pause(accepting, lastPause)
			}
			continue
		}
		wg.Go(func() { p.serve(ctx, g, l.Inbound(), conn, slot) })
	}
}

// slot is the right to have one handshake with the upstream under way.
type slot struct {
	slots chan struct{}
	once  sync.Once
}

// enter waits until the upstream is there and a slot is free: this is where the gate is shut.
func (r *Relay) enter(ctx context.Context) (*slot, error) {
	for {
		if err := r.upstream.Wait(ctx); err != nil {
			return nil, err
		}
		select {
		case r.slots <- struct{}{}:
			return &slot{slots: r.slots}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *slot) leave() { s.once.Do(func() { <-s.slots }) }

// serve owns conn: it is closed, or reset, when serve returns.
func (p *Pod) serve(ctx context.Context, g *gate.Gate, inbound bool, conn *net.TCPConn, slot *slot) {
	defer slot.leave()
	r := p.relay
	log := r.log.With("pod", p.name.String(), "from", conn.RemoteAddr().String())
	src, dst, err := endpoints(conn, inbound)
	if err != nil {
		log.Warn("connection refused", "to", dst.String(), "err", err)
		gate.Reset(conn)
		return
	}
	req := upstream.Request{Destination: dst, Source: src, Pod: p.name, Inbound: inbound}
	if !inbound {
		req.Source = p.source(src)
	}
	waits, refused, done := p.wait(ctx)
	up, first, err := r.reach(waits, conn, req, slot, refused)
	if waits.Err() != nil {
		err = context.Cause(waits)
	}
	done()
	if err != nil {
		if up != nil {
			_ = up.Close() // it came a moment too late
		}
		if d := (directError{}); errors.As(err, &d) {
			slot.leave()
			p.direct(ctx, g, src, dst, conn, d.went)
			return
		}
		log.Info("connection reset", "to", dst.String(), "err", err)
		gate.Reset(conn)
		return
	}
	slot.leave()
	log.Debug("connection relayed", "to", dst.String())
	p.join(ctx, g, src, dst, &junction{app: conn, up: up, halfClose: r.upstream.HalfClose()}, first)
}

// join carries what an app at src and its destination say to each other, to the end.
func (p *Pod) join(ctx context.Context, g *gate.Gate, src, dst netip.AddrPort, j *junction, first []byte) {
	p.opened(j.app)
	j.ending = func(bytes uint64) { p.closed(j.app, bytes) }
	j.appState = func() gate.AppState { return g.AppState(src, dst) }
	j.run(ctx, first)
}

// endpoints are where a captured connection came from and where it was going. The error is why it may go no further.
func endpoints(conn *net.TCPConn, inbound bool) (src, dst netip.AddrPort, err error) {
	src = conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	src = netip.AddrPortFrom(src.Addr().Unmap(), src.Port())
	if dst, err = gate.OriginalDestination(conn); err == nil {
		err = permitted(dst)
	}
	if err == nil && inbound {
		err = notOwn(dst, src)
	}
	return src, dst, err
}

// source is the pod's own address, whoever in the pod is asking, and the port that was asked from.
func (p *Pod) source(src netip.AddrPort) netip.AddrPort {
	for _, ip := range p.ips {
		if ip.Is4() == src.Addr().Is4() {
			return netip.AddrPortFrom(ip, src.Port())
		}
	}
	return netip.AddrPort{}
}

// reach asks the upstream until it answers. Not one byte has been read from conn meanwhile, so to ask again
// is always safe.
func (r *Relay) reach(ctx context.Context, conn *net.TCPConn, req upstream.Request, s *slot, refused func()) (*net.TCPConn, []byte, error) {
	for wait := firstPause; ; wait = min(2*wait, lastPause) {
		up, first, err := r.ask(ctx, conn, req, s)
		switch {
		case err == nil:
			return up, first, nil
		case ctx.Err() != nil:
			return nil, nil, ctx.Err()
		case errors.Is(err, upstream.ErrUnreachable):
			return nil, nil, err
		case ended(conn):
			return nil, nil, fmt.Errorf("the app gave up: %w", err)
		}
		if errors.Is(err, upstream.ErrMisconfigured) {
			wait = lastPause
			refused()
		}
		if err := r.upstream.Pause(ctx, wait); err != nil {
			return nil, nil, err
		}
	}
}

// ask is one attempt. If it is slow it gives up its slot, and from then on ends with the app.
func (r *Relay) ask(ctx context.Context, conn *net.TCPConn, req upstream.Request, s *slot) (*net.TCPConn, []byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var patience *time.Timer
	watched := make(chan struct{})
	up, first, err := r.upstream.Connect(ctx, req, func() {
		patience = time.AfterFunc(slow, func() {
			defer close(watched)
			s.leave()
			if untilEnded(conn) {
				cancel()
			}
		})
	})
	if patience != nil && !patience.Stop() {
		unwatch(conn, watched)
	}
	return up, first, err
}

// metadata are the addresses, beside the link-local ones, at which clouds serve a node's credentials.
var metadata = []netip.Addr{netip.MustParseAddr("fd00:ec2::254"), netip.MustParseAddr("fd20:ce::254")}

// permitted reports destinations that mean something else on the node than they do in the pod. The rules
// do not redirect them; whatever made them arrive here, they go no further.
func permitted(dst netip.AddrPort) error {
	a := dst.Addr().Unmap()
	switch {
	case a.IsLoopback(), a.IsUnspecified():
		return errors.New("it would be the node's own loopback")
	case a.IsLinkLocalUnicast():
		return errors.New("link-local: it would be asked in the node's name")
	case a.IsMulticast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return errors.New("not a unicast address")
	}
	if slices.Contains(metadata, a) {
		return errors.New("metadata service: it would be asked in the node's name")
	}
	return nil
}

// notOwn reports an inbound connection that this node has made to the pod, for the upstream most likely: it would come
// back for ever. As above, the rules do not redirect it.
func notOwn(pod, src netip.AddrPort) error {
	node, err := gate.SourceTo(pod.Addr())
	if err == nil && src.Addr() == node {
		err = errors.New("this node itself has made it: it would come back")
	}
	return err
}

// TCP states, net/tcp_states.h.
const (
	tcpFinWait2 = 5
	tcpClose    = 7
)

// ended tells whether the app has reset its connection. One that has only shut its side down may have
// bytes waiting for the upstream.
func ended(conn *net.TCPConn) bool { return state(conn) == tcpClose }

func state(conn *net.TCPConn) uint8 {
	info, err := tcpInfo(conn)
	if err != nil {
		return tcpClose
	}
	return info.State
}

// untilEnded returns true once the app has reset conn, false at the read deadline.
func untilEnded(conn *net.TCPConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	return raw.Read(func(fd uintptr) bool {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		return err != nil || info.State == tcpClose
	}) == nil
}

// unwatch ends untilEnded, and returns when whoever has called that is done.
func unwatch(conn *net.TCPConn, done <-chan struct{}) {
	_ = conn.SetReadDeadline(time.Unix(1, 0)) // fails only on a closed connection
	<-done
	_ = conn.SetReadDeadline(time.Time{})
}

func tcpInfo(conn *net.TCPConn) (info *unix.TCPInfo, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	return info, errors.Join(cerr, err)
}

// carried is what the kernel has counted on conn, both ways.
func carried(conn *net.TCPConn) uint64 {
	info, err := tcpInfo(conn)
	if err != nil {
		return 0
	}
	return info.Bytes_acked + info.Bytes_received
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
