// Package pause has a sleep that ends early with a context.
package pause

import (
	"context"
	"time"
)

// For waits for d and returns nil, or returns ctx.Err() as soon as ctx ends. If d is zero or negative it returns nil at
// once, even if ctx has ended.
func For(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
