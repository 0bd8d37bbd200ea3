package relay

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

// takeMany takes slots in goroutines until the test ends, and returns those that are given at once.
func takeMany(t *testing.T, s *share, count int) []*slot {
	t.Helper()
	given := make(chan *slot, count)
	for range count {
		go func() {
			if slot, err := s.take(t.Context()); err == nil {
				given <- slot
			}
		}()
	}
	synctest.Wait()
	slots := make([]*slot, len(given))
	for i := range slots {
		slots[i] = <-given
	}
	return slots
}

// TestSlotsOfOnePodLeaveOthersSome: a pod that never gives one back delays no other pod, and the next one neither.
func TestSlotsOfOnePodLeaveOthersSome(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := newSlots()
		for _, want := range []int{32, 16, 8, 4, 2, 1} {
			if got := len(takeMany(t, all.share(), 1000)); got != want {
				t.Errorf("one more pod got %d slots, want %d", got, want)
			}
		}
		if got := len(takeMany(t, all.share(), 1)); got != 1 {
			t.Errorf("a pod without a slot got %d, want the last one", got)
		}
	})
}

// TestSlotGoesToThePodWithTheFewest, and among those with equally many to the one that has waited longest.
func TestSlotGoesToThePodWithTheFewest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := newSlots()
		greedy := takeMany(t, all.share(), 1000)
		var others [][]*slot
		for range 6 {
			others = append(others, takeMany(t, all.share(), 1))
		}
		late := all.share()
		first := takeMany(t, late, 1000)
		if got, want := len(first), 13; got != want {
			t.Fatalf("the last pod got %d slots of the 26 that were left, want %d", got, want)
		}
		before := late.used
		greedy[0].leave()
		greedy[0].leave() // counts once
		if late.used != before+1 {
			t.Errorf("the pod with fewer slots has %d after a slot was free, want %d", late.used, before+1)
		}
		if got := all.free + late.used + 31 + len(others); got != handshakes {
			t.Errorf("%d slots in all, want %d", got, handshakes)
		}
	})
}

// TestWithdrawnClaimKeepsNoSlot, whether it was given meanwhile or not.
func TestWithdrawnClaimKeepsNoSlot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := newSlots()
		pod := all.share()
		held := takeMany(t, pod, handshakes/2)
		ended, cancel := context.WithCancel(t.Context())
		failed := make(chan error)
		go func() {
			_, err := pod.take(ended)
			failed <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Errorf("take after its context has ended: got %v, want that error", err)
		}
		pod.withdraw(pod.claim()) // waits
		held[0].leave()
		pod.withdraw(pod.claim()) // is given
		for _, s := range held[1:] {
			s.leave()
		}
		if all.free != handshakes || pod.used != 0 || len(all.waiting) != 0 {
			t.Errorf("%d slots are free, %d used, %d pods wait; want all of them free",
				all.free, pod.used, len(all.waiting))
		}
	})
}
