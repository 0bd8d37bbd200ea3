package attach

import (
	"context"
	"errors"
	"net"
	"time"
)

// waitInterval is how often WaitUntil looks.
const waitInterval = 100 * time.Millisecond

// Upstream reports that the upstream is late, or that the daemon, which would know, is.
func (c *Client) Upstream(ctx context.Context) error {
	s, err := c.Summary(ctx)
	if err != nil {
		return err
	}
	return s.Upstream.Late()
}

// WaitUntil looks until looking succeeds, ctx ends, or the timeout has passed, unless that is 0; the error is that of
// the last look.
func WaitUntil(ctx context.Context, timeout time.Duration, look func(context.Context) error) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	tick := time.NewTicker(waitInterval)
	defer tick.Stop()
	last := errors.New("no answer yet")
	for {
		err := look(ctx)
		if err == nil {
			return nil
		}
		if !timedOut(err) { // that the look was cut short says less than what the one before saw
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
