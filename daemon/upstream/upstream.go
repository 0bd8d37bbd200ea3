// Package upstream is the node's proxy: where it is, whether it is there, how it is asked for a
// destination, and what its answers mean.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// What an upstream that does not connect has said. Only these three matter to who waits.
var (
	// ErrLate: nothing of the connection has reached the destination; dial again.
	ErrLate = errors.New("upstream is late")
	// ErrUnreachable: the upstream is well, the destination is not.
	ErrUnreachable = errors.New("upstream cannot reach the destination")
	// ErrMisconfigured: it will answer the same until somebody changes something; wait, and say so.
	ErrMisconfigured = errors.New("upstream is not configured for sluice")
)

const (
	// dialInterval is how often an upstream that is not there is looked for: the gate opens within 100 ms.
	dialInterval = 80 * time.Millisecond
	// dialTimeout bounds the TCP handshake with the upstream. One whose backlog is full does not
	// refuse but drops SYNs; the kernel sends the second after 1 s, the third after 3.
	dialTimeout = 5 * time.Second
	// answerTimeout bounds the wait for the upstream's answer. It is longer than the 135 s after
	// which mitmproxy gives up on a destination that drops SYNs: that verdict is worth having.
	answerTimeout = 150 * time.Second
)

// Upstream is the node's proxy.
type Upstream struct {
	name     string
	locate   func() (string, error)
	protocol config.Protocol
	log      *slog.Logger
	every    time.Duration // between probes; 0 for none
	dialled  chan struct{} // receives when a dial has succeeded, for the probes

	mu     sync.Mutex
	spare  *spare        // nil while there is none
	ready  chan struct{} // closed while the upstream is there
	since  time.Time
	reason string // why it is not, or what is wrong with what it answers
}

// New describes an upstream. It is late until Run has found it. locate says where to dial it now; if it is nil,
// that is the configured address.
func New(c config.Upstream, locate func() (string, error), log *slog.Logger) *Upstream {
	if locate == nil {
		locate = func() (string, error) { return c.Address, nil }
	}
	return &Upstream{
		name: c.String(), locate: locate, protocol: c.Protocol, log: log,
		every: c.ProbeInterval, dialled: make(chan struct{}, 1),
		ready: make(chan struct{}), since: time.Now(), reason: "not looked for yet",
	}
}

// Run watches the upstream until ctx ends. It keeps one spare connection to it: there is no sooner word of a
// proxy's end than the end of its connections, and no cheaper one. The next request takes the spare, which
// saves it the dial.
func (u *Upstream) Run(ctx context.Context) error {
	var probing sync.WaitGroup
	defer probing.Wait()
	if u.every > 0 {
		probing.Go(func() { u.keepProbing(ctx) })
	}
	for ctx.Err() == nil {
		next := time.Now().Add(dialInterval)
		conn, err := u.dial(ctx)
		switch {
		case err == nil:
			u.listens()
			if u.offer(ctx, conn) {
				continue
			}
			// Ended by a proxy that ended, or that ends idle connections: the next dial tells.
		case ctx.Err() == nil && ours(err):
			u.log.Warn("cannot look for the upstream", "upstream", u.name, "err", err)
			next = next.Add(time.Second)
		case ctx.Err() == nil:
			u.went(err)
		}
		sleep(ctx, time.Until(next))
	}
	return nil
}

// ours tells errors that are a want of something here, and no word of the upstream: what waits is not to be told that it is
// late.
func ours(err error) bool {
	for _, errno := range []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EADDRNOTAVAIL} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// listens is for an upstream whose kernel, at least, answers.
func (u *Upstream) listens() {
	if u.every == 0 {
		u.came()
		return
	}
	u.mu.Lock()
	late := !u.isReady()
	u.mu.Unlock()
	if late {
		select {
		case u.dialled <- struct{}{}:
		default:
		}
	}
}

// offer holds conn out until it is used, or has ended, or ctx has; it tells whether it was used.
func (u *Upstream) offer(ctx context.Context, conn *net.TCPConn) (used bool) {
	s := newSpare(conn)
	go s.watch()
	u.swapSpare(s)
	select {
	case <-s.used:
		return true
	case <-s.ended:
	case <-ctx.Done():
	}
	if u.swapSpare(nil) == nil {
		return true // taken at the last moment
	}
	_ = conn.Close() // nothing was asked on it
	<-s.ended
	return false
}

func (u *Upstream) swapSpare(s *spare) (was *spare) {
	u.mu.Lock()
	defer u.mu.Unlock()
	was, u.spare = u.spare, s
	return was
}

// connect returns the spare connection, or a new one; line is to ask on it, until the answer is there.
func (u *Upstream) connect(ctx context.Context) (conn *net.TCPConn, line net.Conn, err error) {
	if s := u.swapSpare(nil); s != nil {
		return s.TCPConn, s, nil
	}
	conn, err = u.dial(ctx)
	return conn, conn, err
}

func (u *Upstream) dial(ctx context.Context) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: dialTimeout, Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) {
			// As for the listeners (package gate): no pacing within the node.
			_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
		})
	}}
	address, err := u.locate()
	if err != nil {
		return nil, err
	}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

func (u *Upstream) came() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.isReady() {
		return
	}
	u.log.Info("upstream is there", "upstream", u.name, "late", time.Since(u.since).Round(time.Millisecond).String())
	close(u.ready)
	u.since, u.reason = time.Now(), ""
}

func (u *Upstream) went(why error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.isReady() {
		u.log.Warn("upstream is late: connections wait", "upstream", u.name, "err", why)
		u.ready, u.since = make(chan struct{}), time.Now()
	}
	u.reason = why.Error()
}

// isReady is for who holds mu.
func (u *Upstream) isReady() bool {
	select {
	case <-u.ready:
		return true
	default:
		return false
	}
}

// Wait returns when the upstream is there.
func (u *Upstream) Wait(ctx context.Context) error {
	u.mu.Lock()
	ready := u.ready
	u.mu.Unlock()
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Pause is how long to wait before asking again: d, but no longer than it takes an upstream that is gone
// to come back.
func (u *Upstream) Pause(ctx context.Context, d time.Duration) error {
	u.mu.Lock()
	gone := !u.isReady()
	u.mu.Unlock()
	if !gone {
		sleep(ctx, d)
	}
	return u.Wait(ctx)
}

// Status is for people.
func (u *Upstream) Status() attach.UpstreamStatus {
	u.mu.Lock()
	defer u.mu.Unlock()
	return attach.UpstreamStatus{
		Address: u.name, Protocol: string(u.protocol), Ready: u.isReady(), Since: u.since, Reason: u.reason,
	}
}

// Request is what the upstream is asked for.
type Request struct {
	Destination netip.AddrPort
	// Source is the pod's address and the port that the connection came from; of an inbound one, the client's.
	Source netip.AddrPort
	Pod    attach.Pod
	// Inbound is a connection to the pod.
	Inbound bool
}

// HalfClose tells whether the upstream's protocol carries the end of one direction alone.
func (u *Upstream) HalfClose() bool { return u.protocol == config.SOCKS5 }

// Connect asks the upstream for req.Destination. It returns the connection and the first bytes that the
// destination has sent already. The error is one of the three above, or that of ctx. dialled is called
// when the upstream's kernel has accepted the connection.
func (u *Upstream) Connect(ctx context.Context, req Request, dialled func()) (*net.TCPConn, []byte, error) {
	conn, line, err := u.connect(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrLate, err)
	}
	dialled()
	if req.Inbound && conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap() == req.Source.Addr() {
		_ = conn.Close() // nothing was asked on it
		return nil, nil, fmt.Errorf("%w: the upstream itself has made the connection: it would come back", ErrUnreachable)
	}
	_ = conn.SetDeadline(time.Now().Add(answerTimeout)) // fails only on a closed connection, as the next call will
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	first, err := u.ask(line, req)
	stop()
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	u.note(err)
	if err != nil {
		_ = conn.Close() // the answer counts
		return nil, nil, err
	}
	return conn, first, nil
}

// ask speaks the upstream's protocol.
func (u *Upstream) ask(conn net.Conn, req Request) ([]byte, error) {
	if u.protocol == config.SOCKS5 {
		return askSOCKS5(conn, req)
	}
	return askConnect(conn, req)
}

// note remembers, and says once, what is wrong with what the upstream answers.
func (u *Upstream) note(err error) {
	reason := ""
	if errors.Is(err, ErrMisconfigured) {
		reason = err.Error()
	} else if err != nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.isReady() || u.reason == reason {
		return
	}
	u.reason = reason
	if reason != "" {
		u.log.Error("connections wait until this is mended", "upstream", u.name, "err", reason)
	} else {
		u.log.Info("upstream answers as it should again", "upstream", u.name)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
