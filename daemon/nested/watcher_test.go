package nested

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
	if e.name() != "sh" || e.Netns != p.netns {
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

// TestFirstExecInPodsPIDs: a container in the PID namespace of the pod is none of the pod's own, also if the first
// program that is seen in the pod is one of it.
func TestFirstExecInPodsPIDs(t *testing.T) {
	w, p := newTestWatcher(t), newPod(t)
	fifo := filepath.Join(p.root, "tmp/fifo")
	must(t, unix.Mkfifo(fifo, 0o600))
	p.run("unshare --mount --root=$root /bin/sh -c 'read line </tmp/fifo; /bin/cat /out; exit 0'")
	f, err := os.OpenFile(fifo, os.O_WRONLY, 0) // waits until the container runs
	must(t, err)
	must(t, w.watch(p.netns))
	must(t, f.Close())
	e, err := w.next()
	must(t, err)
	if e.name() != "cat" {
		t.Errorf("%s has stopped, want cat", e.Name)
	}
	held, err := openProcess("/proc", e.PID, e.Start)
	must(t, err)
	defer held.close()
	must(t, held.resume())
	p.wantEnded(1)
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
		if e.name() != want.name[:min(len(want.name), maxName)] {
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
	letGo := func(p *process) bool { return p.resume() == nil }
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

// program32 is a 32-bit program for amd64 that executes a file without arguments.
func program32(path string) []byte {
	const base, header = 0x10000, 52 + 32 // of an ELF file, and of its only segment
	code := []byte{
		0xb8, 11, 0, 0, 0, // mov eax, execve
		0xbb, 0, 0, 0, 0, // mov ebx, path
		0xb9, 0, 0, 0, 0, // mov ecx, arguments
		0x31, 0xd2, // xor edx, edx
		0xcd, 0x80, // int 0x80
	}
	const pathAt = base + header + 19 + 8 // behind the code and the arguments, of which one is the path
	binary.LittleEndian.PutUint32(code[6:], pathAt)
	binary.LittleEndian.PutUint32(code[11:], base+header+19)
	code = binary.LittleEndian.AppendUint64(code, pathAt)
	code = append(append(code, path...), 0)
	var file bytes.Buffer
	file.WriteString("\x7fELF\x01\x01\x01" + strings.Repeat("\x00", 9))
	size := uint32(header + len(code))
	for _, part := range []any{
		uint16(2), uint16(3), uint32(1), uint32(base + header), uint32(52), uint32(0), uint32(0), // an executable
		uint16(52), uint16(32), uint16(1), uint16(0), uint16(0), uint16(0),
		uint32(1), uint32(0), uint32(base), uint32(base), size, size, uint32(5), uint32(0x1000),
		code,
	} {
		_ = binary.Write(&file, binary.LittleEndian, part) // into memory
	}
	return file.Bytes()
}

// TestHeldBy32Bits: a process that a 32-bit program has become is known as one that stands at the end of an exec.
func TestHeldBy32Bits(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the program is for amd64")
	}
	w, p := newTestWatcher(t), newPod(t)
	must(t, os.WriteFile(filepath.Join(p.root, "program32"), program32("/bin/dpkg"), 0o755))
	must(t, w.watch(p.netns))
	p.start("exec /program32")
	for _, name := range []string{"sh", "dpkg"} {
		e, err := w.next()
		must(t, err)
		if e.name() != name[:min(len(name), maxName)] {
			t.Errorf("%s has stopped, want %s", e.Name, name)
		}
		held, err := openProcess("/proc", e.PID, e.Start)
		must(t, err)
		testbed.Eventually(t, "the process stops at its exec", held.isHeld)
		must(t, held.resume())
		held.close()
	}
	wantNone(t, w)
}

// TestResumeAgain: an engine that runs lets a process go on that stays stopped.
func TestResumeAgain(t *testing.T) {
	w, p := newTestWatcher(t), newPod(t)
	e := newTestEngine(t)
	e.interval, e.patience = 10*time.Millisecond, time.Millisecond
	e.Watch(map[uint32]string{1: "uid"}) // another pod: this one is the test's
	run(t, e.Engine)
	must(t, w.watch(p.netns))
	for i := range 2 {
		p.start("echo on >>/out")
		event, err := w.next()
		must(t, err)
		p.wantEnded(i + 1)
		must(t, w.forget(event.Mount))
	}
}
