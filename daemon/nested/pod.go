package nested

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/daemon/throttle"
)

// watchedPod is a pod that has opted in. Its bounds keep it from taking the threads and the memory of the daemon, which
// other pods need.
type watchedPod struct {
	uid   string
	lines throttle.Lines // about its containers
	// A turn is taken for each work in its containers, and a look for each look at the arguments of its programs,
	// and for each trace.
	turns, looks chan struct{}
	silent       atomic.Int32 // the turns of work that hangs
	tmpfs        tmpfs
}

const (
	// maxTurns bounds the containers of a pod that are worked in at the same time.
	maxTurns = 4
	// maxLooks bounds the looks at arguments and the traces of a pod's programs at the same time.
	maxLooks = 8
	// lookWait bounds the wait for one of them.
	lookWait = 100 * time.Millisecond
)

func newWatchedPod(uid string) *watchedPod {
	return &watchedPod{uid: uid, turns: make(chan struct{}, maxTurns), looks: make(chan struct{}, maxLooks)}
}

var (
	// errSilent is the error about a container with a file system that hangs.
	errSilent = fmt.Errorf("its file system does not respond within %s", deadline)
	// errBusy is the error about a pod with all of its turns taken.
	errBusy = errors.New("too many containers start at the same time, or do not respond")
)

// alone calls do for the work in a container, after other work there has ended. It returns at the end of ctx also if do
// does not, because a file system in the container hangs. The container, and a turn of its pod, are taken until do has
// returned, and further calls do not wait for them.
func (c *container) alone(ctx context.Context, do func() error) error {
	if c.silent.Load() > 0 {
		return errSilent
	}
	select {
	case c.working <- struct{}{}:
	case <-ctx.Done():
		return errSilent
	}
	if c.pod.silent.Load() == maxTurns {
		<-c.working
		return errBusy
	}
	select {
	case c.pod.turns <- struct{}{}:
	case <-ctx.Done():
		<-c.working
		return errBusy
	}
	done := make(chan error, 1)
	var over atomic.Bool      // by the end of do or of ctx
	silent := func(n int32) { // they are counters because both ends may come at the same time
		c.silent.Add(n)
		c.pod.silent.Add(n)
	}
	go func() { // it ends when the file system responds, or its server is gone
		err := do()
		if over.Swap(true) {
			silent(-1)
		}
		<-c.pod.turns
		<-c.working
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		if over.Swap(true) {
			return <-done // both have ended at the same time
		}
		silent(1)
		return errSilent
	}
}

// look calls do for a look at a program, and returns its value. It returns at the end of ctx also if do does not: the
// memory of a process, or the way to a file, may be one of a FUSE that hangs. The look is taken until do has returned.
func look[T any](ctx context.Context, p *watchedPod, do func() T) (value T, err error) {
	select {
	case p.looks <- struct{}{}:
	case <-time.After(lookWait):
		return value, errors.New("too many programs are looked at at the same time")
	}
	done := make(chan T, 1)
	go func() {
		defer func() { <-p.looks }()
		done <- do()
	}()
	select {
	case value = <-done:
		return value, nil
	case <-ctx.Done():
		return value, errors.New("the process does not respond")
	}
}

// warn logs that a container is not given the CA, unless there was such a line just now: a pod can cause it at any
// rate.
func (p *watchedPod) warn(log *slog.Logger, container string, err error) {
	if count, due := p.lines.Due("not given"); due {
		log.Warn("a nested container is not given the CA", "uid", p.uid, "container", container, "err", err,
			"count", count)
	}
}
