package relay

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/late"
	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/daemon/splice"
	"github.com/sluice-cni/sluice/daemon/upstream"
)

const (
	// slowHandshake is the age at which a handshake gives its slot back. By then the upstream has taken the connection
	// from its backlog. The destination takes the rest of the time, and one pod's dead destinations must not delay the
	// connections of others.
	slowHandshake = time.Second
	// The pause between requests for one connection doubles from the first to the last.
	firstRetry, lastRetry = 10 * time.Millisecond, time.Second
)

// serve relays conn, which it owns, from listener l of g. The end of the connection is done for wg.
func (s *Server) serve(
	ctx context.Context, g *gate.Gate, l *gate.Listener, conn *socket.Conn, slot *slot, wg *sync.WaitGroup,
) {
	c, peer, first, err := s.establish(ctx, g, l, conn, slot)
	switch refused := (refusedError{}); {
	case errors.Is(err, captured.ErrGone):
		if s.debugs(ctx) {
			s.relay.log.Debug("connection given up", "pod", s.Pod.String(), "source", c.Source.String(),
				"destination", c.Destination.String())
		}
		socket.Reset(conn)
	case errors.As(err, &refused):
		if count, due := s.lines.Due(captured.Cause(refused.error)); due {
			s.relay.log.Warn("connection refused", "pod", s.Pod.String(), "source", c.Source.String(),
				"destination", c.Destination.String(), "count", count, "err", err)
		}
		socket.Reset(conn)
	case errors.Is(err, late.ErrDirect):
		s.Direct.Carry(ctx, c)
	case err != nil:
		if count, due := s.lines.Due(cause(err)); due {
			s.relay.log.Info("connection reset", "pod", s.Pod.String(), "source", c.Source.String(),
				"destination", c.Destination.String(), "count", count, "err", err)
		}
		socket.Reset(conn)
	default:
		if s.debugs(ctx) {
			s.relay.log.Debug("connection relayed", "pod", s.Pod.String(), "source", c.Source.String(),
				"destination", c.Destination.String())
		}
		wg.Add(1)
		s.Joined.Start(ctx, splice.Pair{
			App: conn, Peer: peer, First: first, HalfClose: s.relay.upstream.HalfClose(), AppState: c.AppState,
		}, wg.Done)
	}
}

// debugs reports whether messages of the level DEBUG are logged: the text of addresses takes time.
func (s *Server) debugs(ctx context.Context) bool { return s.relay.log.Enabled(ctx, slog.LevelDebug) }

// cause tells the reasons for resets apart, without the parts of err that the proxy chooses.
func cause(err error) string {
	for _, known := range []error{upstream.ErrUnreachable, late.ErrExpired, context.Canceled} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	return "other"
}

// refusedError says why a connection may not be relayed.
type refusedError struct{ error }

// establish finds out where conn goes, and has the upstream connect to there. It gives the slot back.
func (s *Server) establish(ctx context.Context, g *gate.Gate, l *gate.Listener, conn *socket.Conn, slot *slot) (
	c captured.Conn, peer *net.TCPConn, first []byte, err error,
) {
	defer slot.leave()
	c, err = captured.New(g, l, conn, s.Policy)
	for errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) { // it is not known yet whether c is permitted
		if err := pause.For(ctx, acceptRetry); err != nil {
			return c, nil, nil, err
		}
		c, err = captured.New(g, l, conn, s.Policy)
	}
	switch {
	case errors.Is(err, captured.ErrGone):
		return c, nil, nil, err
	case err != nil:
		return c, nil, nil, refusedError{err}
	}
	waiting, wait := s.Accepted.Add(ctx, c.Gone)
	defer wait.Done()
	peer, first, err = s.connect(waiting, c, slot, wait)
	if waiting.Err() != nil {
		if err == nil {
			_ = peer.Close() // the answer came a moment too late
		}
		return c, nil, nil, context.Cause(waiting)
	}
	return c, peer, first, err
}

// connect asks the upstream until it answers. It reads no byte of c meanwhile, so that it is always safe to ask again.
// Each request takes a slot: when an upstream that is late comes back, all connections ask again at once.
func (s *Server) connect(ctx context.Context, c captured.Conn, slot *slot, wait *late.Wait) (
	*net.TCPConn, []byte, error,
) {
	var doubt upstream.Doubt
	for retry := firstRetry; ; retry = min(2*retry, lastRetry) {
		conn, first, err := s.ask(ctx, c, slot)
		err = s.relay.upstream.Judge(&doubt, err)
		switch {
		case err == nil:
			return conn, first, nil
		case ctx.Err() != nil:
			return nil, nil, ctx.Err()
		case errors.Is(err, upstream.ErrUnreachable):
			return nil, nil, err
		}
		if err := c.Gone(); err != nil {
			return nil, nil, err
		}
		if errors.Is(err, upstream.ErrMisconfigured) {
			retry = lastRetry
			wait.Misconfigured()
		}
		if err := s.relay.upstream.WaitToRetry(ctx, retry); err != nil {
			return nil, nil, err
		}
		if slot, err = s.share.take(ctx); err != nil {
			return nil, nil, err
		}
	}
}

// ask makes one request, and gives the slot back. A slow one does so early, and from then on ends when the app gives
// up.
func (s *Server) ask(ctx context.Context, c captured.Conn, slot *slot) (*net.TCPConn, []byte, error) {
	defer slot.leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := s.relay.upstream.Dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	slow := time.AfterFunc(slowHandshake, slot.leave)
	defer slow.Stop()
	stop := socket.WatchReset(c, slowHandshake, cancel)
	defer stop()
	first, err := s.relay.upstream.Ask(ctx, conn, s.request(c))
	return conn.TCPConn, first, err
}

func (s *Server) request(c captured.Conn) upstream.Request {
	r := upstream.Request{
		Destination: c.Destination, Source: c.Source, Pod: s.Pod, Inbound: c.Inbound, Trust: s.trust(),
		More: func() bool { return socket.HasBytes(c) },
	}
	if !c.Inbound {
		r.Nested = !c.Source.Addr().IsLoopback() && !slices.Contains(s.Addresses(), c.Source.Addr())
		if r.Nested {
			r.Container = r.Trust.Container(c.Source.Addr())
		}
		r.Source = podAddress(s.IPs, c.Source)
	}
	return r
}

// podAddress replaces the address of an app, which may be that of a nested container, by the pod's own address of the
// same family. It returns the zero value if the pod has none.
func podAddress(ips []netip.Addr, app netip.AddrPort) netip.AddrPort {
	for _, ip := range ips {
		if ip.Is4() == app.Addr().Is4() {
			return netip.AddrPortFrom(ip, app.Port())
		}
	}
	return netip.AddrPort{}
}
