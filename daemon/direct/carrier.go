package direct

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/daemon/splice"
	"github.com/sluice-cni/sluice/daemon/throttle"
)

// dialTimeout bounds the handshake with a destination. It is as long as the kernel tries by default; the SYN patience
// of captured pods (plugin/ruleset) is far longer.
const dialTimeout = 2 * time.Minute

// Carrier takes connections of one pod to their original destinations without the upstream.
type Carrier struct {
	joined *splice.Set
	policy captured.Policy
	log    *slog.Logger
	lines  throttle.Lines

	mu      sync.Mutex // guards results; no lock is taken under it
	results Results
}

// Results sums up the connections since the last call of Take.
type Results struct {
	// Direct connections reached their destination.
	Direct int
	// NotExempt connections were reset because they could not be exempted from capture; Err is the last reason.
	// A destination that refuses or does not answer is no failure of the node, and not counted.
	NotExempt int
	Err       error
}

// NewCarrier makes a carrier that counts open connections in joined. log names the pod.
func NewCarrier(joined *splice.Set, policy captured.Policy, log *slog.Logger) *Carrier {
	return &Carrier{joined: joined, policy: policy, log: log}
}

// Take returns the results and starts anew.
func (c *Carrier) Take() Results {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.results
	c.results = Results{}
	return r
}

// record counts the outcome of one connection.
func (c *Carrier) record(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
		c.results.Direct++
	case errors.Is(err, ErrNotExempt):
		c.results.NotExempt++
		c.results.Err = err
	}
}

// AcceptOne takes the connection that has waited longest at l and carries it in a goroutine of wg, until the connection
// ends or ctx does. It reports whether a connection waited.
func (c *Carrier) AcceptOne(ctx context.Context, wg *sync.WaitGroup, g *gate.Gate, l *gate.Listener) (bool, error) {
	conn, err := l.Accept()
	if conn == nil {
		return false, err
	}
	wg.Go(func() {
		accepted, err := captured.New(g, l, conn, c.policy)
		if errors.Is(err, captured.ErrGone) {
			socket.Reset(conn)
			return
		}
		if err != nil {
			if count, due := c.lines.Due(captured.Cause(err)); due {
				c.log.Warn("connection refused", "source", accepted.Source.String(),
					"destination", accepted.Destination.String(), "count", count, "err", err)
			}
			socket.Reset(conn)
			return
		}
		c.Carry(ctx, accepted)
	})
	return true, nil
}

// Carry takes conn, which it owns, to its destination. It returns when the connection has ended; the end of ctx resets
// the connection.
func (c *Carrier) Carry(ctx context.Context, conn captured.Conn) {
	dialing, cancel := context.WithTimeout(ctx, dialTimeout)
	stop := socket.WatchReset(conn, 0, cancel)
	peer, err := dial(dialing, conn, conn.Destination)
	cancel()
	stop()
	c.record(err)
	if err != nil {
		if count, due := c.lines.Due(cause(err)); due {
			c.log.Info("connection reset: it could not go direct", "source", conn.Source.String(),
				"destination", conn.Destination.String(), "count", count, "err", err)
		}
		socket.Reset(conn)
		return
	}
	c.log.Debug("connection goes direct", "source", conn.Source.String(), "destination", conn.Destination.String())
	c.joined.Join(ctx, splice.Pair{App: conn, Peer: peer, HalfClose: true, AppState: conn.AppState})
}

// cause tells a failure of the node from one of the destination.
func cause(err error) string {
	if errors.Is(err, ErrNotExempt) {
		return ErrNotExempt.Error()
	}
	return "destination"
}
