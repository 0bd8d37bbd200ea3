package install

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	// rescanInterval is the longest time between two scans of the node. inotify reports changes at once, but not those
	// in a directory that is created or replaced, until it is watched again.
	rescanInterval = 10 * time.Second
	// retryInterval is the same while the plugin is not installed, for example because a file is half-written, and
	// while inotify cannot be had.
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

	inotify *fsnotify.Watcher // of Run's goroutine; nil while the kernel gives none

	mu      sync.Mutex // guards the fields below; no lock is taken under it
	scanned bool
	err     error // of the last scan
	contest attach.Contest
	undone  uint64
	left    bool // Uninstall was called; the mark may be missing
}

// Ready returns an error, for the user, if the runtime does not use the plugin as of the last scan, or if another
// program keeps undoing the installation: between two scans the plugin is then most likely not in use.
func (k *Keeper) Ready() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case !k.scanned:
		return errors.New("the plugin is not installed yet")
	case k.err == nil && !k.contest.IsZero():
		return errors.New(k.contest.Reason)
	}
	return k.err
}

// Contest returns the contest with another program that keeps undoing the installation; it is zero if there is none.
func (k *Keeper) Contest() attach.Contest {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.contest
}

// Undone is how many times another program had undone the installation.
func (k *Keeper) Undone() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.undone
}

// interval is the time until the next scan if no event comes before.
func (k *Keeper) interval(watched bool) time.Duration {
	if !watched || k.Ready() != nil {
		return retryInterval
	}
	return rescanInterval
}

// record keeps the outcome of a scan for Ready. It tells whether err is an error that the scan before did not have.
func (k *Keeper) record(written []string, err error) (isNew bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	previous := k.err
	if k.scanned && previous == nil && len(written) > 0 {
		k.undone++
	}
	k.scanned, k.err = true, err
	return err != nil && (previous == nil || previous.Error() != err.Error())
}

// Begin forgets an earlier uninstallation. The caller calls it before Run.
func (k *Keeper) Begin() error {
	return k.forgetUninstall()
}

// Uninstall is that of the Installer. Run does not install the plugin again afterwards, also if Uninstall has failed.
func (k *Keeper) Uninstall() (attachments int, err error) {
	k.mu.Lock()
	k.left = true
	k.mu.Unlock()
	return k.Installer.Uninstall()
}

func (k *Keeper) isLeft() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.left
}

// watch watches the CNI directories, as far as it can: a node has few inotify instances for all programs of a user
// (fs.inotify.max_user_instances). It returns the channels of inotify, which may be nil, and whether every directory
// that exists is watched. Run calls it at every turn, since a directory may have been created or replaced.
func (k *Keeper) watch() (events <-chan fsnotify.Event, errs <-chan error, watched bool) {
	if k.inotify == nil {
		w, err := fsnotify.NewWatcher()
		if err != nil {
			return nil, nil, false
		}
		k.inotify = w
	}
	watched = true
	for _, dir := range []string{k.ConfDir, k.BinDir} {
		watched = ignoreMissing(k.inotify.Add(dir)) == nil && watched
	}
	return k.inotify.Events, k.inotify.Errors, watched
}

// Run installs the plugin, and again whenever another program has undone that, until ctx ends. It always returns nil.
// It uninstalls nothing at its end: a daemon is stopped to be restarted or upgraded, and pods that start meanwhile must
// be captured too. The caller of Uninstall knows when sluice is removed for good.
func (k *Keeper) Run(ctx context.Context) error {
	defer func() {
		if k.inotify != nil {
			_ = k.inotify.Close() // nothing was written
		}
	}()
	var b backoff
	for said := false; ; {
		events, errs, watched := k.watch()
		if !watched && !said {
			k.Log.Warn("the CNI directories are not watched; looking at them every second")
		}
		said = !watched
		if wait := b.wait(time.Now()); wait > 0 && pause.For(ctx, wait) != nil {
			return nil
		}
		k.rescan(&b)
		select {
		case <-ctx.Done():
			return nil
		case err := <-errs:
			k.Log.Warn("watching the CNI directories failed", "err", err) // the next scan finds the changes
		case <-events:
		case <-time.After(k.interval(watched)):
		}
	}
}

// rescan installs the plugin unless it was uninstalled by hand, and logs the outcome.
func (k *Keeper) rescan(b *backoff) {
	written, err := k.installUnlessUninstalled()
	if k.record(written, err) {
		level := slog.LevelError
		if errors.Is(err, ErrNoNetwork) || errors.Is(err, errUninstalled) {
			level = slog.LevelInfo
		}
		k.Log.Log(context.Background(), level, "plugin is not installed", "err", err)
	}
	for _, path := range written {
		k.Log.Info("plugin file installed", "file", path)
		if b.wrote(path, time.Now()) {
			k.contested(path)
		}
	}
	if b.isQuiet(time.Now()) {
		k.uncontested()
	}
}

// contested notes that another program keeps undoing the installation, most recently of the file at path.
func (k *Keeper) contested(path string) {
	reason := k.culprit(path)
	k.mu.Lock()
	isNew := k.contest.IsZero()
	if isNew {
		k.contest.Since = time.Now()
	}
	k.contest.Reason = reason
	k.mu.Unlock()
	if isNew {
		k.Log.Error("another program keeps undoing the installation of the plugin; sluiced restores it at growing "+
			"intervals", "file", path, "reason", reason)
	}
}

// uncontested notes that the installation has stood for a while.
func (k *Keeper) uncontested() {
	k.mu.Lock()
	ended := !k.contest.IsZero()
	k.contest = attach.Contest{}
	k.mu.Unlock()
	if ended {
		k.Log.Info("the installation of the plugin stands again")
	}
}

var errUninstalled = errors.New("the plugin was uninstalled; restart the daemon to install it again")

func (k *Keeper) installUnlessUninstalled() (written []string, err error) {
	unlock, err := lock(k.StateDir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if k.isLeft() || attach.Uninstalled(k.StateDir) {
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
	if b.writes == nil || b.isQuiet(now) {
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

// isQuiet tells whether no file had to be written for a quiet period.
func (b *backoff) isQuiet(now time.Time) bool { return now.Sub(b.last) > quietPeriod }

// wait is the time to wait at now; it is negative when there is none.
func (b *backoff) wait(now time.Time) time.Duration { return b.until.Sub(now) }
