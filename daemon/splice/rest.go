package splice

import (
	"errors"
	"runtime/debug"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/epoll"
	"github.com/sluice-cni/sluice/daemon/socket"
)

// restAfter is how long nothing is carried before a pair rests: the goroutines of both directions, whose stacks are
// most of its memory, end, and one goroutine waits for the data of all pairs that rest.
const restAfter = 3 * time.Second

// A pair is active, then perhaps leaving and resting, and then active again. While it is leaving, a deadline wakes the
// two directions from their wait for data. The second one to leave makes the pair rest. A direction that has data, or
// the end of it, instead makes the pair active.
type stage int

const (
	active stage = iota
	leaving
	resting
	over
)

// quiet is the part of a joint that makes it rest. A pair rests only while both directions wait for data: half-closed
// ones do not, nor does one whose receiver is slow.
type quiet struct {
	mu      sync.Mutex // guards the fields below; that of sleepers is taken under it
	stage   stage
	timer   *time.Timer
	carried uint64   // when the timer last ran
	waiting int      // directions that wait for data
	away    []func() // the goroutines that have left
	fds     [2]int   // guarded by sleepers.mu
}

// beginWait says that a direction waits for data from now on.
func (p *joint) beginWait() {
	p.quiet.mu.Lock()
	defer p.quiet.mu.Unlock()
	p.quiet.waiting++
}

// endWait ends a wait for data. The goroutine of the direction must end if it leaves: run is started in its place when
// there is data. It must wait again if only the deadline of a rest that others have ended has woken it.
func (p *joint) endWait(timedOut bool, run func()) (leaves, again bool) {
	q := &p.quiet
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting--
	switch {
	case q.stage != leaving:
		return false, timedOut && !p.gone.Load()
	case !timedOut:
		p.resumeLocked()
		return false, false
	case len(q.away) > 0 && all.add(p) != nil: // the pair is closed, or there is no descriptor for epoll
		p.resumeLocked()
		return false, true
	}
	q.away = append(q.away, run)
	if len(q.away) == 2 {
		q.stage = resting
	}
	return true, false
}

// look makes the pair rest if nothing was carried since the last look.
func (p *joint) look() {
	q := &p.quiet
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.stage != active {
		return
	}
	now := socket.Carried(p.App)
	if q.waiting < 2 || now != q.carried {
		q.carried = now
		q.timer.Reset(restAfter)
		return
	}
	q.stage = leaving
	p.wakeLocked(time.Unix(1, 0))
}

// resume ends the rest of a pair. Without need it does no harm.
func (p *joint) resume() {
	p.quiet.mu.Lock()
	defer p.quiet.mu.Unlock()
	if p.quiet.stage == resting {
		all.remove(p)
		p.resumeLocked()
	}
}

func (p *joint) resumeLocked() {
	q := &p.quiet
	q.stage = active
	p.wakeLocked(time.Time{})
	for _, run := range q.away {
		go run()
	}
	q.away = nil
	q.timer.Reset(restAfter)
}

// wakeLocked sets the deadline of both waits for data. It fails only if a connection is closed, which ends them too.
func (p *joint) wakeLocked(at time.Time) {
	_ = errors.Join(p.App.SetReadDeadline(at), p.Peer.SetReadDeadline(at))
}

// beginLooks has look called from now on, until endLooks.
func (p *joint) beginLooks() {
	p.quiet.mu.Lock()
	defer p.quiet.mu.Unlock()
	p.quiet.timer = time.AfterFunc(restAfter, p.look)
}

func (p *joint) endLooks() {
	p.quiet.mu.Lock()
	defer p.quiet.mu.Unlock()
	p.quiet.stage = over
	p.quiet.timer.Stop()
}

// sleepers are the pairs that rest.
type sleepers struct {
	mu    sync.Mutex // guards the fields below; no lock is taken under it
	epoll *epoll.Set // nil before the first pair
	pairs map[int]*joint
	added int // since memory was given back
}

// giveBackAfter is the number of pairs that have begun to rest after which the memory of their goroutines, some 5 KiB
// each, is given back to the kernel. By itself the Go runtime keeps it for many minutes where little garbage is made.
const giveBackAfter = 1000

// all has the pairs of every Set: they share one epoll and one goroutine, which end with the process.
var all = sleepers{pairs: map[int]*joint{}}

// add begins to wait for data of p, of which some may be there already.
func (s *sleepers) add(p *joint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.epoll == nil { // one that failed is tried again for the next pair
		set, err := epoll.New()
		if err != nil {
			return err
		}
		s.epoll = set
		go set.Wait(s.ready)
	}
	err := p.eachSocket(func(i, fd int) error {
		p.quiet.fds[i] = fd
		s.pairs[fd] = p
		return s.epoll.Add(fd)
	})
	if err != nil {
		s.removeLocked(p)
		return err
	}
	s.added++
	if s.added >= giveBackAfter {
		s.added = 0
		go debug.FreeOSMemory()
	}
	return nil
}

func (s *sleepers) remove(p *joint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removeLocked(p)
}

func (s *sleepers) removeLocked(p *joint) {
	_ = p.eachSocket(func(_, fd int) error { return s.epoll.Remove(fd) }) // one that is closed has left by that
	for _, fd := range p.quiet.fds {
		if s.pairs[fd] == p { // and not a newer one whose socket has the same number
			delete(s.pairs, fd)
		}
	}
}

func (p *joint) eachSocket(do func(i, fd int) error) error {
	return errors.Join(
		socket.Control(p.App, func(fd int) error { return do(0, fd) }),
		socket.Control(p.Peer, func(fd int) error { return do(1, fd) }),
	)
}

// ready ends the rest of the pair of a socket that has data, or has ended.
func (s *sleepers) ready(fd int) {
	s.mu.Lock()
	p := s.pairs[fd]
	s.mu.Unlock()
	if p != nil {
		p.resume()
	}
}
