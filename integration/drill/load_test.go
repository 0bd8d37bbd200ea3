package drill

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// loss is the harm that a fault may do to connections that are open.
type loss int

const (
	nothing loss = iota
	resets
	ends // or resets: the kernel ends the connections of a killed proxy with either
)

// outcome is the fate of a connection of the load.
type outcome int

const (
	made outcome = iota // all of them
	refused
	wasReset
	ended // without a reset, before the echo was complete
	wrong
	other
	streamsReset
	lost // of all these: no fault explains it
	outcomes
)

var outcomeNames = [outcomes]string{"MADE", "REFUSED", "RESET", "ENDED", "WRONG", "OTHER", "STREAMS RESET", "LOST"}

// load is the connections that pods make all the time.
type load struct {
	counts  [outcomes]atomic.Int64
	longest atomic.Int64 // ns, from connect to the echo
	struck  atomic.Bool  // a fault lasts

	// A connection that was well after these times (ns since began) may not be reset, or end.
	began          time.Time
	resetsUntil    atomic.Int64
	endsUntil      atomic.Int64
	mu             sync.Mutex // guards the durations of echoes
	calm, stricken []time.Duration
}

// now is the time since the load began.
func (l *load) now() int64 { return int64(time.Since(l.began)) }

// mayLose lets connections be lost until losesNoMore.
func (l *load) mayLose(k loss) { l.losesUntil(k, math.MaxInt64) }

func (l *load) losesNoMore(k loss) { l.losesUntil(k, l.now()) }

func (l *load) losesUntil(k loss, until int64) {
	if k >= resets {
		l.resetsUntil.Store(until)
	}
	if k >= ends {
		l.endsUntil.Store(until)
	}
}

// losing calls f, which does that harm.
func (l *load) losing(k loss, f func()) {
	l.mayLose(k)
	f()
	l.losesNoMore(k)
}

// connect makes short connections at the rate of the drill until ctx ends. wg waits for the end of each.
func (s *drillScene) connect(ctx context.Context, wg *sync.WaitGroup) {
	tick := time.NewTicker(time.Second / time.Duration(s.size.rate))
	defer tick.Stop()
	for i := 0; ctx.Err() == nil; i++ {
		wg.Go(func() {
			host, address := s.pods[i%len(s.pods)].Host, testbed.EchoAddresses[i/len(s.pods)%2]
			began, struck := s.now(), s.struck.Load()
			within, cancel := testbed.Minute()
			defer cancel()
			err := testbed.Echo(within, host, address, testbed.RandomBytes(100))
			s.count(err, began)
			took := s.now() - began
			for was := s.longest.Load(); was < took && !s.longest.CompareAndSwap(was, took); {
				was = s.longest.Load()
			}
			if err == nil {
				s.took(time.Duration(took), struck)
			}
		})
		<-tick.C
	}
}

// took adds to the durations of echoes.
func (l *load) took(d time.Duration, struck bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if struck {
		l.stricken = append(l.stricken, d)
	} else {
		l.calm = append(l.calm, d)
	}
}

// medians returns the medians of the durations before faults and during faults, and forgets them.
func (l *load) medians() (calm, stricken time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	calm, stricken = median(l.calm), median(l.stricken)
	l.calm, l.stricken = nil, nil
	return calm, stricken
}

func median(d []time.Duration) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[len(d)/2].Round(10 * time.Microsecond)
}

// count counts a connection that was well at a time.
func (s *drillScene) count(err error, well int64) {
	s.counts[made].Add(1)
	s.fate(err, well, wasReset)
}

// fate counts the error of a connection, as o if it is a reset. It fails the test unless a fault explains the error;
// of many such errors it shows the first.
func (s *drillScene) fate(err error, well int64, o outcome) {
	var until int64
	switch {
	case err == nil:
		return
	case errors.Is(err, syscall.ECONNREFUSED):
		o = refused
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		until = s.resetsUntil.Load()
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		o, until = ended, s.endsUntil.Load()
	case errors.Is(err, testbed.ErrWrongEcho):
		o = wrong
	default:
		o = other
	}
	s.counts[o].Add(1)
	if well <= until {
		return
	}
	if s.counts[lost].Add(1) <= 5 {
		s.t.Errorf("at %v a connection that was well at %v: %v", time.Duration(s.now()), time.Duration(well), err)
	}
}

// blocks is the number of blocks that a stream sends: it ends before a daemon that has handed over would reset it.
const blocks = 1000

// stream sends one block after the other on one connection and reads each back. When the connection ends it opens
// another.
func (s *drillScene) stream(ctx context.Context, i int) {
	host, address := s.pods[i%len(s.pods)].Host, testbed.EchoAddresses[i/len(s.pods)%2]
	for ctx.Err() == nil {
		well := s.now()
		within, cancel := testbed.Minute()
		c, err := host.Dial(within, "tcp", address)
		cancel()
		if err != nil {
			s.count(err, well)
			continue
		}
		block, got := testbed.RandomBytes(16<<10), make([]byte, 16<<10)
		for n := uint64(0); err == nil && ctx.Err() == nil && n < blocks; n++ {
			copy(block, strconv.AppendUint(nil, n, 10)) // shows a block that comes twice
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			sent := s.now()
			if _, err = c.Write(block); err == nil {
				_, err = io.ReadFull(c, got)
			}
			if err == nil && !bytes.Equal(block, got) {
				err = testbed.ErrWrongEcho
			}
			if err == nil {
				well = sent
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
			}
		}
		_ = c.Close()
		s.fate(err, well, streamsReset)
	}
}

// quiet waits until no connection of the load is left, nor a daemon that has handed over.
func (s *drillScene) quiet() {
	testbed.Within(s.t, 2*time.Minute, "no connection waits or is open, and every pod is watched", func() bool {
		left := 0
		for _, p := range append(slices.Clone(s.pods), s.hostile) {
			a := s.d.Of(p)
			left += a.Waiting + a.Open
			if a.Wall == "" { // its record is not read yet, and its netns not watched
				left++
			}
		}
		return left == 0
	})
	s.retired = slices.DeleteFunc(s.retired, func(p *testbed.Program) bool {
		testbed.Eventually(s.t, "the daemons before have ended", p.Ended)
		return true
	})
}
