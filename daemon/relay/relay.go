// Package relay carries captured connections to the upstream: it accepts them when the upstream is there, asks the
// upstream for the original destination, and joins the two connections.
package relay

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/throttle"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// acceptRetry is the pause after an accept that failed, most likely for want of descriptors.
const acceptRetry = time.Second

// Relay serves any number of pods with one upstream.
type Relay struct {
	upstream *upstream.Upstream
	slots    *slots
	log      *slog.Logger
}

// New makes a relay to up.
func New(up *upstream.Upstream, log *slog.Logger) *Relay {
	return &Relay{upstream: up, slots: newSlots(), log: log}
}

// Server relays and counts one pod's connections.
type Server struct {
	relay *Relay
	endpoint.Served
	share *share
	lines throttle.Lines
	trust func() attach.PodTrust
}

// For makes the acceptor of one endpoint. trust returns how the pod's TLS is to be treated now.
func (r *Relay) For(e endpoint.Served, trust func() attach.PodTrust) *Server {
	return &Server{relay: r, Served: e, share: r.slots.share(), trust: trust}
}

// Counts returns the connections that do not wait any more.
func (s *Server) Counts() sockdiag.Counts { return s.Joined.Counts() }

// Serve accepts connections at g until g is closed or paused, or accepting ends, and returns when the last connection
// has ended. The end of ctx resets them all. Serve accepts nothing while the upstream is late.
func (s *Server) Serve(ctx, accepting context.Context, g *gate.Gate) {
	var wg sync.WaitGroup
	for _, l := range g.Listeners {
		wg.Go(func() { s.accept(ctx, accepting, g, l, &wg) })
	}
	wg.Wait()
}

// accept takes a slot first and a connection then, so that connections wait in the accept queue and not here.
func (s *Server) accept(ctx, accepting context.Context, g *gate.Gate, l *gate.Listener, wg *sync.WaitGroup) {
	for {
		if err := l.Wait(); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				s.relay.log.Error("accepting has ended", "pod", s.Pod.String(), "err", err)
			}
			return
		}
		slot, err := s.slot(accepting)
		if err != nil {
			return // accepting has ended
		}
		conn, err := l.Accept(ctx)
		if conn == nil {
			slot.leave()
			if errors.Is(err, os.ErrClosed) {
				return
			}
			if err != nil {
				s.relay.log.Warn("a connection cannot be accepted yet", "pod", s.Pod.String(), "err", err)
				_ = pause.For(accepting, acceptRetry) // take fails once accepting has ended
			}
			continue
		}
		wg.Go(func() { s.serve(ctx, g, l, conn, slot, wg) })
	}
}

// slot waits until the upstream is there and the pod has a slot.
func (s *Server) slot(ctx context.Context) (*slot, error) {
	if err := s.relay.upstream.Wait(ctx); err != nil {
		return nil, err
	}
	return s.share.take(ctx)
}
