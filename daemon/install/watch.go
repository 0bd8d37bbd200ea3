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
)

const (
	// How often the node is looked at without a word from the kernel: directories come and go. Half-written files
	// are waited out.
	lookInterval, retryInterval = 10 * time.Second, time.Second
	// Somebody who changes our files back is not fought: after a few rounds each waits longer, until calm
	// has passed without one.
	rounds             = 5
	firstRest, maxRest = 2 * time.Second, time.Minute
	calm               = 2 * time.Minute
)

// Keeper keeps the node installed.
type Keeper struct {
	Installer
	Log *slog.Logger

	mu      sync.Mutex
	looked  bool
	trouble error // of the last look
}

// Ready reports why the runtime does not use the plugin, as far as is known.
func (k *Keeper) Ready() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.looked {
		return errors.New("not installed yet")
	}
	return k.trouble
}

func (k *Keeper) interval() time.Duration {
	if k.Ready() != nil {
		return retryInterval
	}
	return lookInterval
}

// note keeps the outcome of a look, and tells whether it is another than before.
func (k *Keeper) note(err error) (news bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	was := k.trouble
	k.looked, k.trouble = true, err
	return err != nil && (was == nil || was.Error() != err.Error())
}

// Run installs, and does so again whenever somebody else undid it, until ctx ends. It leaves everything in place:
// whoever stops the daemon does not want pods without it.
func (k *Keeper) Run(ctx context.Context) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watching the CNI directories: %w", err)
	}
	defer w.Close() //nolint:errcheck // nothing was written
	if err := ignoreMissing(os.Remove(k.uninstalledMark())); err != nil {
		return fmt.Errorf("installing after an uninstall: %w", err)
	}
	var f fight
	for {
		for _, dir := range []string{k.ConfDir, k.BinDir} {
			_ = w.Add(dir) // again and again: it may have come, or have been replaced
		}
		if wait := f.rest(time.Now()); wait > 0 {
			if !pause(ctx, wait) {
				return nil
			}
		}
		k.look(&f)
		select {
		case <-ctx.Done():
			return nil
		case err := <-w.Errors:
			k.Log.Warn("watching the CNI directories", "err", err) // the next look will do
		case <-w.Events:
		case <-time.After(k.interval()):
		}
	}
}

func (k *Keeper) look(f *fight) {
	written, err := k.unlessUninstalled()
	if k.note(err) {
		level := slog.LevelError
		if errors.Is(err, ErrNoNetwork) || errors.Is(err, errUninstalled) {
			level = slog.LevelInfo
		}
		k.Log.Log(context.Background(), level, "not installed", "err", err)
	}
	for _, path := range written {
		k.Log.Info("installed", "file", path)
		if f.wrote(path, time.Now()) {
			k.Log.Warn("somebody keeps changing this file; putting it right less and less often", "file", path)
		}
	}
}

var errUninstalled = errors.New("uninstalled by hand, until the daemon starts again")

func (k *Keeper) unlessUninstalled() (written []string, err error) {
	unlock, err := lock(k.StateDir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if _, err := os.Stat(k.uninstalledMark()); err == nil {
		return nil, errUninstalled
	}
	return k.install()
}

// fight counts how often files had to be written again.
type fight struct {
	count map[string]int
	last  time.Time
	until time.Time
}

// wrote tells whether path was written too often.
func (f *fight) wrote(path string, now time.Time) bool {
	if f.count == nil || now.Sub(f.last) > calm {
		f.count = map[string]int{}
	}
	f.last = now
	f.count[path]++
	over := f.count[path] - rounds
	if over <= 0 {
		return false
	}
	f.until = now.Add(min(firstRest<<min(over-1, 10), maxRest))
	return true
}

func (f *fight) rest(now time.Time) time.Duration { return f.until.Sub(now) }

func pause(ctx context.Context, d time.Duration) (over bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
