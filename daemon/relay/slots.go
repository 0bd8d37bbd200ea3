package relay

import (
	"context"
	"sync"

	"github.com/sluice-cni/sluice/daemon/upstream"
)

// handshakes is how many connections may be between dial and answer at a time. It is well below mitmproxy's backlog of
// 100, beyond which its kernel drops SYNs.
const handshakes = 64

// slots bounds the handshakes with the upstream.
type slots struct {
	upstream *upstream.Upstream
	free     chan struct{}
}

func newSlots(up *upstream.Upstream) slots { return slots{up, make(chan struct{}, handshakes)} }

// slot is the right to have one handshake with the upstream in progress.
type slot struct {
	slots slots
	once  sync.Once
}

// take waits until the upstream is there and a slot is free. While it waits, no connection is accepted.
func (s slots) take(ctx context.Context) (*slot, error) {
	if err := s.upstream.Wait(ctx); err != nil {
		return nil, err
	}
	select {
	case s.free <- struct{}{}:
		return &slot{slots: s}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// leave gives the slot back. A second call does nothing.
func (s *slot) leave() { s.once.Do(func() { <-s.slots.free }) }
