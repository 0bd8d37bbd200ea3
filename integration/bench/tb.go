package main

import (
	"fmt"
	"os"
	"os/signal"
	"sync"

	"golang.org/x/sys/unix"
)

// tb is what the fixture builds its worlds on: a failure, or a signal, takes down what was built and ends the
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

// must is for errors that nothing can be done about.
func (t *tb) must(err error, what string) {
	if err != nil {
		t.Fatalf("%s: %v", what, err)
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
		f() // made while everything goes
	}
}

func (t *tb) TempDir() string {
	dir, err := os.MkdirTemp("", "sluice-bench-")
	t.must(err, "temporary directory")
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// within runs f and then cleans up what it made.
func (t *tb) within(f func()) {
	t.mu.Lock()
	depth := len(t.cleanups)
	t.mu.Unlock()
	f()
	t.unwind(depth)
}

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

// end cleans up and exits. Whoever else wants to fail meanwhile waits for that.
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
