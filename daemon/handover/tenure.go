package handover

import (
	"errors"
	"sync"
)

// ErrOver is returned once the tenure has ended.
var ErrOver = errors.New("another sluiced has taken over, or this one is ending")

// Tenure is the time in which a daemon owns the node's endpoints. Changes are made within Do. The tenure ends between
// changes, never during one, and no change is made after its end.
type Tenure struct {
	// mu is held for reading while a change is made, and for writing while the tenure ends. It is taken before all
	// other locks. A change must not call Do, PassOn or End: they would wait for it.
	mu        sync.RWMutex
	over      bool
	succeeded chan struct{} // closed when another daemon has taken over
}

// NewTenure begins a tenure.
func NewTenure() *Tenure { return &Tenure{succeeded: make(chan struct{})} }

// Do makes a change, or returns ErrOver.
func (t *Tenure) Do(change func() error) error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.over {
		return ErrOver
	}
	return change()
}

// PassOn calls handOver, and if that succeeds ends the tenure in favour of another daemon. It returns ErrOver if the
// tenure has ended before.
func (t *Tenure) PassOn(handOver func() error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return ErrOver
	}
	if err := handOver(); err != nil {
		return err
	}
	t.over = true
	close(t.succeeded)
	return nil
}

// End ends the tenure without a successor. A second call does nothing.
func (t *Tenure) End() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
}

// Succeeded is closed when another daemon has taken over.
func (t *Tenure) Succeeded() <-chan struct{} { return t.succeeded }

// IsSucceeded reports whether another daemon has taken over.
func (t *Tenure) IsSucceeded() bool {
	select {
	case <-t.succeeded:
		return true
	default:
		return false
	}
}
