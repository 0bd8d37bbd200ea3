package nested

import (
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// firstPause is the time until a parent is looked at. It doubles with each look.
	firstPause = time.Millisecond
	// lastPause is the longest one. The looks at a parent take twice as long in all.
	lastPause = 512 * time.Millisecond
	// maxParents bounds the parents that are looked at at the same time.
	maxParents = 256
)

// parents looks at the parents of processes that were stopped. A parent that waits with WUNTRACED sees the stop: su(1),
// runuser(1), nsenter(1) and sudo(8) stop themselves then, as their child has done, and wait until a shell lets them go
// on. None would, because its user has stopped nothing.
type parents struct {
	proc string
	// letGo lets one go on that has stopped itself.
	letGo func(*process) bool
	work  sync.WaitGroup
	ended chan struct{} // closed to end all looks

	mu sync.Mutex // guards looks; no lock is taken under it
	// looks are the parents that are looked at. The channel has an element if a child has stopped since.
	looks map[identity]chan struct{}
}

func newParents(proc string, letGo func(*process) bool) *parents {
	return &parents{proc: proc, letGo: letGo, ended: make(chan struct{}), looks: map[identity]chan struct{}{}}
}

// finish waits for the looks that go on: no parent is left stopped that stops itself soon.
func (l *parents) finish() {
	end := time.AfterFunc(2*lastPause, func() { close(l.ended) })
	l.work.Wait()
	end.Stop()
}

func (l *parents) isEnded() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

// of opens the parent of a process, if that is in a PID namespace below the daemon's, as in a pod. Else it is nil.
func (l *parents) of(child *process) (*process, error) {
	p, err := l.open(child)
	if saysEnded(err) {
		return nil, nil //nolint:nilnil // it has ended
	}
	return p, err
}

func (l *parents) open(child *process) (*process, error) {
	before, err := child.stat()
	if err != nil {
		return nil, err
	}
	p, err := openProcess(l.proc, before.parent, 0)
	if err != nil {
		return nil, fmt.Errorf("looking at the parent of a process that was stopped: %w", err)
	}
	// The number of a parent that has ended may be that of another process by now.
	now, err := child.stat()
	if err != nil || now.parent != before.parent || !p.isBelow() {
		p.close()
		return nil, err
	}
	return p, nil
}

// look looks at a parent for about a second after a child has gone on. It closes the parent.
func (l *parents) look(p *process) {
	key, err := p.identity()
	if err != nil {
		p.close()
		return // it has ended
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	again, looking := l.looks[key]
	switch {
	case looking:
		select {
		case again <- struct{}{}:
		default:
		}
	case len(l.looks) < maxParents && !l.isEnded():
		again = make(chan struct{}, 1)
		l.looks[key] = again
		l.work.Go(func() { l.run(p, key, again) })
		return
	}
	p.close()
}

func (l *parents) run(p *process, key identity, again chan struct{}) {
	defer p.close()
	for done := false; !done; {
		l.await(p, again)
		l.mu.Lock()
		if len(again) == 0 || l.isEnded() {
			delete(l.looks, key)
			done = true
		}
		l.mu.Unlock()
	}
}

// await looks at a parent until it can have seen no stop any more.
func (l *parents) await(p *process, again <-chan struct{}) {
	for pause := firstPause; pause <= lastPause; pause *= 2 {
		select {
		case <-time.After(pause):
		case <-again:
			pause = firstPause / 2
			continue
		case <-l.ended:
			return
		}
		if p.ended() || p.isWaiting() {
			return
		}
		if p.hasStoppedItself() {
			l.letGo(p)
		}
	}
}

// isWaiting reports whether the process sleeps in a wait for a child: it would not, had it seen a stop.
func (p *process) isWaiting() bool {
	call, err := p.systemCall(".")
	return err == nil && (call.number == unix.SYS_WAIT4 || call.number == unix.SYS_WAITID)
}

// kills are the numbers of system calls that send a signal, also of 32-bit programs on amd64 and arm64, with the place
// of the signal among the arguments.
var kills = map[int]int{
	unix.SYS_KILL: 1, unix.SYS_TKILL: 1, unix.SYS_TGKILL: 2, 37: 1, 238: 1, 268: 2, 270: 2,
}

// hasStoppedItself reports whether the process stands at the end of a call that has stopped it. One that its user has
// stopped stands elsewhere.
func (p *process) hasStoppedItself() bool {
	if s, err := p.stat(); err != nil || s.state != 'T' {
		return false
	}
	return slices.ContainsFunc(p.threads(), func(thread string) bool {
		call, err := p.systemCall(filepath.Join("task", thread))
		at, isKill := kills[call.number]
		return err == nil && isKill && (call.arguments[at] == uint64(unix.SIGSTOP) ||
			call.arguments[at] == uint64(unix.SIGTSTP))
	})
}

// threads are the numbers of the threads of the process. There are none if it has ended.
func (p *process) threads() []string {
	dir, err := p.open("task", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil
	}
	defer func() { _ = dir.Close() }() // only read
	names, _ := dir.Readdirnames(-1)   // those that could be read
	return names
}
