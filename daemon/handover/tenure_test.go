package handover

import (
	"errors"
	"runtime"
	"testing"
)

// nothing is a change or a hand-over that succeeds.
func nothing() error { return nil }

func TestNoChangeAfterTheTenure(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*Tenure) error{
		"End": func(tenure *Tenure) error {
			tenure.End()
			tenure.End()
			return nil
		},
		"PassOn": func(tenure *Tenure) error { return tenure.PassOn(nothing) },
	} {
		tenure := NewTenure()
		if err := tenure.Do(nothing); err != nil {
			t.Errorf("before %s: Do: got %v, want no error", name, err)
		}
		if err := end(tenure); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		called := false
		call := func() error {
			called = true
			return nil
		}
		if err := tenure.Do(call); !errors.Is(err, ErrOver) || called {
			t.Errorf("after %s: Do: got %v, called %t; want %v and no call", name, err, called, ErrOver)
		}
		if err := tenure.PassOn(call); !errors.Is(err, ErrOver) || called {
			t.Errorf("after %s: PassOn: got %v, called %t; want %v and no call", name, err, called, ErrOver)
		}
		if got, want := tenure.IsSucceeded(), name == "PassOn"; got != want {
			t.Errorf("after %s: succeeded %t, want %t", name, got, want)
		}
	}
}

func TestDoReturnsTheErrorOfTheChange(t *testing.T) {
	t.Parallel()
	failure := errors.New("the change failed")
	if err := NewTenure().Do(func() error { return failure }); !errors.Is(err, failure) {
		t.Errorf("got %v, want %v", err, failure)
	}
}

func TestFailedPassOnLeavesTheTenure(t *testing.T) {
	t.Parallel()
	tenure := NewTenure()
	failure := errors.New("the other daemon has gone")
	if err := tenure.PassOn(func() error { return failure }); !errors.Is(err, failure) {
		t.Errorf("PassOn: got %v, want %v", err, failure)
	}
	if err := tenure.Do(nothing); err != nil || tenure.IsSucceeded() {
		t.Errorf("Do: got %v, succeeded %t; want the tenure to go on", err, tenure.IsSucceeded())
	}
	if err := tenure.PassOn(nothing); err != nil {
		t.Errorf("second PassOn: %v", err)
	}
	if !tenure.IsSucceeded() {
		t.Error("second PassOn: got no successor")
	}
}

// TestPassOnWaitsForARunningChange: the listeners that the change opens belong to the hand-over.
func TestPassOnWaitsForARunningChange(t *testing.T) {
	t.Parallel()
	tenure := NewTenure()
	changed := false
	done := make(chan error)
	err := tenure.Do(func() error {
		go func() {
			done <- tenure.PassOn(func() error {
				if !changed {
					return errors.New("the change is still running")
				}
				return nil
			})
		}()
		for tenure.mu.TryRLock() { // fails once PassOn waits for the lock
			tenure.mu.RUnlock()
			runtime.Gosched()
		}
		changed = true
		return nil
	})
	if err != nil {
		t.Errorf("Do: %v", err)
	}
	if err := <-done; err != nil {
		t.Errorf("PassOn: %v", err)
	}
}
