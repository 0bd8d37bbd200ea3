package relay

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/sluice-cni/sluice/daemon/direct"
	"github.com/sluice-cni/sluice/daemon/gate"
)

// directTimeout bounds the handshake with a destination. It is what the kernel's default comes to; pods have been given
// far more patience than that (plugin/ruleset).
const directTimeout = 2 * time.Minute

// Direct takes a connection that was accepted at l to its original destination without the upstream, and returns when it
// has ended; the end of ctx ends it. went is told once whether it is on its way.
func (p *Pod) Direct(ctx context.Context, g *gate.Gate, l *gate.Listener, conn *net.TCPConn, went func(error)) {
	src, dst, err := endpoints(conn, l.Inbound())
	if err != nil {
		p.relay.log.Warn("connection refused", "pod", p.name.String(), "from", src.String(), "to", dst.String(), "err", err)
		gate.Reset(conn)
		went(err)
		return
	}
	p.direct(ctx, g, src, dst, conn, went)
}

// direct owns conn.
func (p *Pod) direct(ctx context.Context, g *gate.Gate, src, dst netip.AddrPort, conn *net.TCPConn, went func(error)) {
	log := p.relay.log.With("pod", p.name.String(), "from", src.String(), "to", dst.String())
	dialling, done := whileThere(ctx, conn)
	to, err := direct.Dial(dialling, conn, dst)
	done()
	went(err)
	if err != nil {
		log.Info("connection reset: it could not go direct", "err", err)
		gate.Reset(conn)
		return
	}
	log.Debug("connection goes direct")
	p.join(ctx, g, src, dst, &junction{app: conn, up: to, halfClose: true}, nil)
}

// whileThere is ctx until directTimeout has passed, or the app has reset conn, or done is called.
func whileThere(ctx context.Context, conn *net.TCPConn) (_ context.Context, done func()) {
	ctx, cancel := context.WithTimeout(ctx, directTimeout)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if untilEnded(conn) {
			cancel()
		}
	}()
	return ctx, func() {
		cancel()
		unwatch(conn, watched)
	}
}
