package install

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/sluice-cni/sluice/daemon/pause"
)

const (
	// rescanInterval is the longest time between two scans of the node. inotify reports changes at once, but not those
	// in a directory that is created or replaced, until it is watched again.
	rescanInterval = 10 * time.Second
	// retryInterval is the same while the plugin is not installed, for example because a file is half-written.
	retryInterval = time.Second

	// Another program may undo each of the Keeper's writes. After maxRewrites writes of one file the Keeper waits
	// before it scans again: firstWait, then twice as long after each write, at most maxWait. The count
	// restarts after quietPeriod without a write.
	maxRewrites = 5
	firstWait   = 2 * time.Second
	maxWait     = time.Minute
	quietPeriod = 2 * time.Minute
)

// Keeper keeps the plugin installed on the node while the daemon runs.
type Keeper struct {
	Installer
	Log *slog.Logger

	mu      sync.Mutex // guards the fields below; no lock is taken under it
	scanned bool
	err     error // of the last scan
}

// Ready returns an error, for the user, if the runtime does not use the plugin as of the last scan.
func (k *Keeper) Ready() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.scanned {
		return errors.New("the plugin is not installed yet")
	}
	return k.err
}

// interval is the time until the next scan if no event comes before.
func (k *Keeper) interval() time.Duration {
	if k.Ready() != nil {
		return retryInterval
	}
	return rescanInterval
}

// record keeps the outcome of a scan for Ready. It tells whether err is an error that the scan before did not have.
func (k *Keeper) record(err error) (isNew bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	previous := k.err
	k.scanned, k.err = true, err
	return err != nil && (previous == nil || previous.Error() != err.Error())
}

// Run installs the plugin, and again whenever another program has undone that, until ctx ends. It uninstalls nothing at
// its end: a daemon is stopped to be restarted or upgraded, and pods that start meanwhile must be captured too.
func (k *Keeper) Run(ctx context.Context) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watching the CNI directories: %w", err)
	}
	defer w.Close() //nolint:errcheck // nothing was written
	if err := ignoreMissing(os.Remove(k.uninstalledMark())); err != nil {
		return fmt.Errorf("installing after an uninstall: %w", err)
	}
	var b backoff
	for {
		for _, dir := range []string{k.ConfDir, k.BinDir} {
			_ = w.Add(dir) // at every turn: the directory may have been created or replaced since
		}
		if wait := b.wait(time.Now()); wait > 0 && pause.For(ctx, wait) != nil {
			return nil
		}
		k.rescan(&b)
		select {
		case <-ctx.Done():
			return nil
		case err := <-w.Errors:
			k.Log.Warn("watching the CNI directories failed", "err", err) // the next scan finds the changes
		case <-w.Events:
		case <-time.After(k.interval()):
		}
	}
}

// rescan installs the plugin unless it was uninstalled by hand, and logs the outcome.
func (k *Keeper) rescan(b *backoff) {
	written, err := k.installUnlessUninstalled()
	if k.record(err) {
		level := slog.LevelError
		if errors.Is(err, ErrNoNetwork) || errors.Is(err, errUninstalled) {
			level = slog.LevelInfo
		}
		k.Log.Log(context.Background(), level, "plugin is not installed", "err", err)
	}
	for _, path := range written {
		k.Log.Info("plugin file installed", "file", path)
		if b.wrote(path, time.Now()) {
			k.Log.Warn("another program keeps changing this file; sluiced restores it at growing intervals",
				"file", path)
		}
	}
}

var errUninstalled = errors.New("`sluiced uninstall` has removed the plugin; restart the daemon to install it again")

func (k *Keeper) installUnlessUninstalled() (written []string, err error) {
	unlock, err := lock(k.StateDir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if _, err := os.Stat(k.uninstalledMark()); err == nil {
		return nil, errUninstalled
	}
	return k.installLocked()
}

// backoff slows the Keeper down when it has to write the same file again and again.
type backoff struct {
	writes map[string]int // of each file, since the last quiet period
	last   time.Time      // the last write of any file
	until  time.Time      // the end of the wait
}

// wrote counts a write of the file at path. It tells whether that was more than maxRewrites; then it sets the wait.
func (b *backoff) wrote(path string, now time.Time) (tooOften bool) {
	if b.writes == nil || now.Sub(b.last) > quietPeriod {
		b.writes = map[string]int{}
	}
	b.last = now
	b.writes[path]++
	excess := b.writes[path] - maxRewrites
	if excess <= 0 {
		return false
	}
	b.until = now.Add(min(firstWait<<min(excess-1, 10), maxWait)) // 10: before the shift overflows
	return true
}

// wait is the time to wait at now; it is negative when there is none.
func (b *backoff) wait(now time.Time) time.Duration { return b.until.Sub(now) }
