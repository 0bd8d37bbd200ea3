package main

import (
	"fmt"
	"os"
	"os/signal"
	"sync"

	"golang.org/x/sys/unix"
)

// tb implements the part of testing.TB that the testbed needs. A failure or a signal runs the cleanups and ends the
// process.
type tb struct {
	mu       sync.Mutex
	cleanups []func()
	failed   bool
	ending   bool
}

func newTB() *tb {
	t := &tb{}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM)
	go func() {
		s := <-signals
		fmt.Fprintf(os.Stderr, "\n%s: cleaning up\n", s)
		t.end(1)
	}()
	return t
}

func (t *tb) Helper() {}

func (t *tb) Failed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed
}

func (t *tb) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (t *tb) Fatalf(format string, args ...any) {
	t.mu.Lock()
	t.failed = true
	t.mu.Unlock()
	t.Logf(format, args...)
	t.end(1)
}

// must ends the benchmark on an error. action names the failed action or its object.
func (t *tb) must(err error, action string) {
	if err != nil {
		t.Fatalf("%s: %v", action, err)
	}
}

func (t *tb) Cleanup(f func()) {
	t.mu.Lock()
	ending := t.ending
	if !ending {
		t.cleanups = append(t.cleanups, f)
	}
	t.mu.Unlock()
	if ending {
		f() // the cleanups have run already
	}
}

func (t *tb) TempDir() string {
	dir, err := os.MkdirTemp("", "sluice-bench-")
	t.must(err, "creating a temporary directory")
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// within runs f, and then the cleanups that f has registered.
func (t *tb) within(f func()) {
	t.mu.Lock()
	depth := len(t.cleanups)
	t.mu.Unlock()
	f()
	t.unwind(depth)
}

// unwind runs the cleanups from the last one down to the given depth.
func (t *tb) unwind(depth int) {
	for {
		t.mu.Lock()
		last := len(t.cleanups) - 1
		if last < depth {
			t.mu.Unlock()
			return
		}
		f := t.cleanups[last]
		t.cleanups = t.cleanups[:last]
		t.mu.Unlock()
		f()
	}
}

// end runs all cleanups and exits. Another goroutine that calls it meanwhile blocks until the process has exited.
func (t *tb) end(code int) {
	t.mu.Lock()
	first := !t.ending
	t.ending = true
	t.mu.Unlock()
	if !first {
		select {}
	}
	t.unwind(0)
	os.Exit(code)
}
