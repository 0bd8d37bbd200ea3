package nested

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// TestClose: a process that is closed while others use it fails for them, and no descriptor is used after its end.
func TestClose(t *testing.T) {
	p, err := openProcess("/proc", uint32(os.Getpid()), 0)
	must(t, err)
	uses := map[string]func() error{
		"read":  func() error { _, err := p.read("stat"); return err },
		"inode": func() error { _, _, err := p.inode("ns/mnt"); return err },
		"again": func() error {
			other, err := p.again()
			if err == nil {
				other.close()
			}
			return err
		},
	}
	var working, running sync.WaitGroup
	for name, use := range uses {
		working.Add(1)
		running.Go(func() {
			err := use()
			working.Done()
			for err == nil {
				err = use()
			}
			if !errors.Is(err, os.ErrClosed) {
				t.Errorf("%s: got %v, want %v", name, err, os.ErrClosed)
			}
		})
	}
	working.Wait()
	p.close()
	running.Wait()
	if !p.ended() {
		t.Error("a closed process counts as one that runs")
	}
}

// TestEnded: a process that has ended has no links and no arguments, and that is an error.
func TestEnded(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	must(t, cmd.Start())
	p, err := openProcess("/proc", uint32(cmd.Process.Pid), 0)
	must(t, err)
	defer p.close()
	must(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
	c := &container{stores: []string{"/" + store}}
	if u, err := c.updateOf(p, "rm", nil); err == nil || u != updateNone {
		t.Errorf("got %d, %v, want an error", u, err)
	}
	if text, err := p.link("cwd"); err == nil || text != "" {
		t.Errorf("got %q, %v, want an error", text, err)
	}
}

// TestStaysStopped: a process that cannot be opened, or cannot be let go on, is in the log, unless it has ended.
func TestStaysStopped(t *testing.T) {
	const line = "a process in a nested container may stay stopped"
	open := func(proc string) func(*Engine) bool {
		return func(e *Engine) bool {
			e.config.Proc = proc
			e.handle(nil, event{PID: 1})
			return true
		}
	}
	for name, c := range map[string]struct {
		do     func(*Engine) bool
		logged bool
	}{
		"it has ended":           {open(t.TempDir()), false},
		"it cannot be opened":    {open(os.DevNull), true},
		"it cannot be signalled": {func(e *Engine) bool { return !e.letGo(notAProcess(t)) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			e := New(Config{Proc: "/proc", Log: slog.New(slog.NewTextHandler(&log, nil))})
			if !c.do(e) {
				t.Error("the process counts as one that goes on")
			}
			if logged := strings.Contains(log.String(), line); logged != c.logged {
				t.Errorf("got the log %q, want the line: %t", log.String(), c.logged)
			}
		})
	}
}

// notAProcess is a folder that takes no signal.
func notAProcess(t *testing.T) *process {
	t.Helper()
	dir, err := os.Open(t.TempDir())
	must(t, err)
	t.Cleanup(func() { _ = dir.Close() }) // only used
	return &process{dir: dir}
}
