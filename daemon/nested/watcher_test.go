package nested

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// newTestWatcher has the program in the kernel until the test ends.
func newTestWatcher(t *testing.T) *watcher {
	t.Helper()
	w, err := newWatcher()
	must(t, err)
	t.Cleanup(w.close)
	return w
}

// wantNone fails the test if an event has come.
func wantNone(t *testing.T, w *watcher) {
	t.Helper()
	w.reader.SetDeadline(time.Now())
	if e, err := w.next(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %+v, %v, want no event", e, err)
	}
	w.reader.SetDeadline(time.Time{})
}

// TestFirstExec: the first program of a container stops before its first instruction, and no other program does.
func TestFirstExec(t *testing.T) {
	w, p := newTestWatcher(t), newPod(t)
	p.start("echo not watched >>/out")
	p.wantEnded(1)
	wantNone(t, w)

	must(t, w.watch(p.netns))
	p.run("/bin/true") // a program of the pod's own container
	p.wantEnded(2)
	wantNone(t, w)

	p.start("cat /" + store + " >/tmp/copy; echo watched >>/out")
	e, err := w.next()
	must(t, err)
	if !e.runs("sh") || e.Netns != p.netns {
		t.Errorf("got %+v, want the program sh in the netns %d", e, p.netns)
	}
	held, err := openProcess("/proc", e.PID, e.Start)
	must(t, err)
	defer held.close()
	testbed.Eventually(t, "the process stops at its exec", held.isHeld)
	if strings.Contains(p.output(), "\nwatched") {
		t.Error("the program has run")
	}
	must(t, held.resume())
	p.wantEnded(3)
	wantNone(t, w)

	must(t, w.unwatch(p.netns))
	p.start("echo not watched any more >>/out")
	p.wantEnded(4)
	wantNone(t, w)
}

// TestUpdaterStops: an updater of trust stores stops in a container that is known, and each program while it runs.
func TestUpdaterStops(t *testing.T) {
	w, p := newTestWatcher(t), newPod(t)
	must(t, w.watch(p.netns))
	p.start("cat /out; dpkg; cat /out; exit 0")
	for _, want := range []struct {
		name    string
		verdict uint32
	}{{"sh", knownSettled}, {"dpkg", knownAside}, {"cat", knownSettled}} {
		e, err := w.next()
		must(t, err)
		if !e.runs(want.name) {
			t.Errorf("%s has stopped, want %s", e.Name, want.name)
		}
		must(t, w.settle(e.Mount, want.verdict))
		held, err := openProcess("/proc", e.PID, e.Start)
		must(t, err)
		must(t, held.resume())
		held.close()
	}
	p.wantEnded(1)
	wantNone(t, w)
}

// TestResumeAll: a process goes on that a daemon has stopped which is gone. One that its user has stopped does not.
func TestResumeAll(t *testing.T) {
	w, p := newTestWatcher(t), newPod(t)
	must(t, w.watch(p.netns))
	p.run(`sleep 1000 & while ! grep -q "(sleep) S" /proc/$!/stat; do :; done; kill -STOP $!`)
	p.wantEnded(1)
	p.start("echo on >>/out")
	e, err := w.next()
	must(t, err)
	held, err := openProcess("/proc", e.PID, e.Start)
	must(t, err)
	defer held.close()
	testbed.Eventually(t, "the process stops", held.isHeld)
	w.close()
	ended, end := context.WithCancel(t.Context())
	end()
	letGo := func(p *process) { must(t, p.resume()) }
	if _, err := resumeAll(ended, "/proc", time.Minute, letGo); err != nil || !held.isHeld() {
		t.Errorf("got %v, %t; want the process to stay stopped while a daemon may be about to let it go on", err,
			held.isHeld())
	}
	count, err := resumeAll(t.Context(), "/proc", time.Millisecond, letGo)
	must(t, err)
	if count == 0 { // there may be others on this machine
		t.Error("no process went on")
	}
	p.run(`grep -q "(sleep) T" /proc/$!/stat`)
	p.wantEnded(3)
}
