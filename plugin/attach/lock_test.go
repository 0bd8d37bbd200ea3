package attach_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-cni/sluice/plugin/attach"
)

func TestLock(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store, one, two := attach.NewStore(dir), attach.NetnsID{Ino: 1}, attach.NetnsID{Ino: 2}
	release, err := store.Lock(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.TryLock(one); !errors.Is(err, attach.ErrBusy) {
		t.Errorf("locked twice: got %v, want %v", err, attach.ErrBusy)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := store.Lock(ctx, one); !errors.Is(err, attach.ErrBusy) {
		t.Errorf("waiting until the end of the context: got %v, want %v", err, attach.ErrBusy)
	}
	other, err := store.TryLock(two)
	if err != nil {
		t.Fatalf("another netns: %v", err)
	}
	other()
	release()
	if release, err = store.TryLock(one); err != nil {
		t.Fatalf("after the release: %v", err)
	}
	release()
	if left, err := os.ReadDir(filepath.Join(dir, "locks")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestLockExcludes: of many that wait, one has the lock at a time, although each removes the file.
func TestLockExcludes(t *testing.T) {
	t.Parallel()
	store, id := attach.NewStore(t.TempDir()), attach.NetnsID{Ino: 1}
	var inside atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				release, err := store.Lock(t.Context(), id)
				if err != nil {
					t.Error(err)
					return
				}
				if n := inside.Add(1); n != 1 {
					t.Errorf("%d have the lock", n)
				}
				inside.Add(-1)
				release()
			}
		})
	}
	wg.Wait()
}
