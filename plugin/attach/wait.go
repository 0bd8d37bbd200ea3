package attach

import (
	"context"
	"errors"
	"net"
	"time"
)

// waitInterval is the time between two probes of WaitUntil.
const waitInterval = 100 * time.Millisecond

// Upstream returns nil if the daemon says that the upstream is ready. The error says that the upstream or the daemon is
// late.
func (c *Client) Upstream(ctx context.Context) error {
	s, err := c.Summary(ctx)
	if err != nil {
		return err
	}
	return s.Upstream.Late()
}

// WaitUntil calls probe every 100 ms until it succeeds, ctx ends, or the timeout has passed; with a timeout of 0 it has
// none. The error is that of the last probe that did not time out.
func WaitUntil(ctx context.Context, timeout time.Duration, probe func(context.Context) error) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	tick := time.NewTicker(waitInterval)
	defer tick.Stop()
	last := errors.New("no answer yet")
	for {
		err := probe(ctx)
		if err == nil {
			return nil
		}
		if !timedOut(err) { // the end of ctx may have cut this probe short; the one before says more
			last = err
		}
		select {
		case <-ctx.Done():
			return last
		case <-tick.C:
		}
	}
}

func timedOut(err error) bool {
	var n net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &n) && n.Timeout()
}
