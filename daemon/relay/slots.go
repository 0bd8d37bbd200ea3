package relay

import (
	"context"
	"slices"
	"sync"
)

// handshakes is how many connections may be between dial and answer at a time. It is well below mitmproxy's backlog of
// 100, beyond which its kernel drops SYNs.
const handshakes = 64

// slots bounds the handshakes with the upstream, and shares them among the pods. A pod may have one more while it has
// fewer than are free. One pod alone so gets half of them, and however slow the answers to its requests are, the next
// pod finds a free one.
type slots struct {
	mu      sync.Mutex // guards the fields below, and those of every share; no lock is taken under it
	free    int
	waiting []*share // those with claims; the one that was served last is at the end
}

func newSlots() *slots { return &slots{free: handshakes} }

// share is the slots of one pod.
type share struct {
	slots  *slots
	used   int
	claims []chan struct{} // in the order of their arrival; each is closed when its slot is given
}

func (s *slots) share() *share { return &share{slots: s} }

// slot is the right to have one handshake with the upstream in progress.
type slot struct {
	share *share
	once  sync.Once
}

// take waits for a slot.
func (s *share) take(ctx context.Context) (*slot, error) {
	given := s.claim()
	select {
	case <-given:
		return &slot{share: s}, nil
	case <-ctx.Done():
		s.withdraw(given)
		return nil, ctx.Err()
	}
}

func (s *share) claim() (given chan struct{}) {
	s.slots.mu.Lock()
	defer s.slots.mu.Unlock()
	given = make(chan struct{})
	if len(s.claims) == 0 {
		s.slots.waiting = append(s.slots.waiting, s)
	}
	s.claims = append(s.claims, given)
	s.slots.giveLocked()
	return given
}

// withdraw gives up a claim, or the slot that was given for it meanwhile.
func (s *share) withdraw(given chan struct{}) {
	s.slots.mu.Lock()
	defer s.slots.mu.Unlock()
	i := slices.Index(s.claims, given)
	if i < 0 {
		s.returnLocked()
		return
	}
	s.claims = slices.Delete(s.claims, i, i+1)
	if len(s.claims) == 0 {
		s.slots.removeLocked(s)
	}
}

// giveLocked gives slots to the pods that have the fewest, as far as they may have more. The caller holds mu.
func (s *slots) giveLocked() {
	for len(s.waiting) > 0 {
		next := slices.MinFunc(s.waiting, func(a, b *share) int { return a.used - b.used })
		if next.used >= s.free {
			return
		}
		s.free--
		next.used++
		close(next.claims[0])
		next.claims = next.claims[1:]
		s.removeLocked(next)
		if len(next.claims) > 0 {
			s.waiting = append(s.waiting, next)
		}
	}
}

func (s *slots) removeLocked(which *share) {
	s.waiting = slices.DeleteFunc(s.waiting, func(other *share) bool { return other == which })
}

func (s *share) returnLocked() {
	s.used--
	s.slots.free++
	s.slots.giveLocked()
}

// leave gives the slot back. A second call does nothing.
func (s *slot) leave() {
	s.once.Do(func() {
		s.share.slots.mu.Lock()
		defer s.share.slots.mu.Unlock()
		s.share.returnLocked()
	})
}
