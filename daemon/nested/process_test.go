package nested

import (
	"errors"
	"os"
	"os/exec"
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
	if touches, err := p.touches([]string{"/" + store}); err == nil || touches {
		t.Errorf("got %t, %v, want an error", touches, err)
	}
	if text, err := p.link("cwd"); err == nil || text != "" {
		t.Errorf("got %q, %v, want an error", text, err)
	}
}
