package attach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// ErrBusy is the error of TryLock while another process changes the rules in the netns.
var ErrBusy = errors.New("another process changes its rules")

// TryLock keeps other processes from changing the rules in a netns, and its records, until release is called or this
// process ends. The lock is a file that only root reaches: any process in the netns could hold a lock of the netns.
func (s Store) TryLock(netns NetnsID) (release func(), err error) {
	dir := filepath.Join(filepath.Dir(s.dir), "locks")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("locking netns %s: %w", netns, err)
	}
	path := filepath.Join(dir, netns.String())
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking netns %s: %w", netns, err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || err == nil && !isAt(f, path) {
		err = ErrBusy // the process that had the lock has removed the file, and a third one may have made another
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("locking netns %s: %w", netns, err), f.Close())
	}
	return func() {
		_ = os.Remove(path) // so that nothing is left of it
		_ = f.Close()       // releases it
	}, nil
}

// isAt reports whether f is the file at path.
func isAt(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(path)
	return err == nil && os.SameFile(mine, there)
}

const (
	// lockRetry is the time between attempts to lock a netns.
	lockRetry = 2 * time.Millisecond
	// lockTimeout bounds how long one process waits for another. To change rules takes milliseconds.
	lockTimeout = 5 * time.Second
)

// Lock is TryLock that waits for a few seconds.
func (s Store) Lock(ctx context.Context, netns NetnsID) (release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	for {
		release, err = s.TryLock(netns)
		if !errors.Is(err, ErrBusy) {
			return release, err
		}
		select {
		case <-time.After(lockRetry):
		case <-ctx.Done():
			return nil, err
		}
	}
}
