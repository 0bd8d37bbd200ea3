package drill

import (
	"context"
	"flag"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

var (
	long   = flag.Bool("drill", false, "drill for minutes, with the released binaries, and print tables")
	random = flag.Int("drill-faults", 10, "the number of random faults on one node")
	seed   = flag.Uint64("drill-seed", 1, "the seed of the random faults and moments")
)

// drillSize is the load and the number of faults.
type drillSize struct {
	rate    int // new connections in a second
	streams int // connections that stay open
	times   int // faults on one node at least; each fault comes as often as the others
	pause   time.Duration
}

// TestDrills lets each fault happen once under a light load. `make drill` lets them happen more often, under a heavy
// load, and prints tables.
func TestDrills(t *testing.T) {
	if !*long {
		t.Parallel()
	}
	t.Logf("-drill-seed=%d gives the same moments again", *seed)
	var r report
	t.Run("all", func(t *testing.T) {
		for _, protocol := range protocols {
			for i, dr := range drills {
				faults := dr.of(protocol)
				if len(faults) == 0 {
					continue
				}
				t.Run(protocol+" "+dr.name, func(t *testing.T) {
					if !*long {
						t.Parallel()
					}
					size := drillSize{rate: 40, streams: 8, times: 1, pause: 300 * time.Millisecond}
					switch {
					case *long:
						size = drillSize{rate: 1000, streams: 200, times: 10, pause: time.Second}
					case protocol == "sockets":
						size.rate = 20
					}
					s := newDrillScene(t, protocol, size, rand.New(rand.NewPCG(*seed, uint64(i))), faults)
					rounds := (size.times + len(faults) - 1) / len(faults)
					s.run(&r, dr.name, slices.Values(slices.Repeat(faults, rounds)))
				})
			}
		}
	})
	r.print()
}

// TestRandomFaults lets faults of all kinds happen on one node, in random order. `make drill FAULTS=1000` lets so many
// happen.
func TestRandomFaults(t *testing.T) {
	if !*long {
		t.Parallel()
	}
	t.Logf("-drill-seed=%d gives the same faults again", *seed)
	var all []fault
	for _, dr := range drills {
		all = append(all, dr.faults...)
	}
	size := drillSize{rate: 40, streams: 8, pause: 300 * time.Millisecond}
	if *long {
		size = drillSize{rate: 200, streams: 50, pause: 200 * time.Millisecond}
	}
	s := newDrillScene(t, "connect", size, rand.New(rand.NewPCG(*seed, 0)), all)
	var r report
	s.run(&r, "random faults", s.shuffled(all, *random))
	r.print()
}

// shuffled draws n faults that the node's proxy can have. Each comes once before any comes again.
func (s *drillScene) shuffled(faults []fault, n int) iter.Seq[fault] {
	return func(yield func(fault) bool) {
		for i := 0; i < n; {
			for _, k := range s.random.Perm(len(faults)) {
				if i == n || faults[k].fits(s.protocol) && !yield(faults[k]) {
					return
				}
				if faults[k].fits(s.protocol) {
					i++
				}
			}
		}
	}
}

// run lets faults happen under load, and wants everything to be as before when the load has ended.
func (s *drillScene) run(r *report, name string, faults iter.Seq[fault]) {
	t, protocol := s.t, s.protocol
	s.echoes() // all code has run once
	s.quiet()
	before := s.remains()
	s.underLoad(r, faults)
	if s.protocol != protocol {
		s.setProtocol(protocol)
		s.quiet()
	}
	var after remains
	defer func() {
		if t.Failed() {
			t.Logf("left: %q", after.beyond(before))
		}
	}()
	testbed.Eventually(t, "nothing is left", func() bool { // Go's pools are emptied in time, and a lock lasts a moment
		after = s.remains()
		left := after.beyond(before)
		if slices.ContainsFunc(left, isUnpublished) { // the next daemon removes it
			s.succeed()
			s.quiet()
		}
		return len(left) == 0
	})
	if after.rules != before.rules {
		t.Errorf("the rules are\n%s\nand were\n%s", after.rules, before.rules)
	}
	for _, p := range slices.Concat(s.pods, []*testbed.Pod{s.hostile}, s.churned) {
		s.removePod(p)
	}
	bypassed := s.n.SYNs()
	if bypassed > 0 {
		t.Errorf("%d SYNs bypassed capture", bypassed)
	}
	r.node(protocol, name, bypassed, s.leakedNetns(), before, after)
}

// underLoad lets faults happen, and returns when no connection of the load is left.
func (s *drillScene) underLoad(r *report, faults iter.Seq[fault]) {
	load, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait() // also if a fault ends the test
	defer stop()
	for i := range s.size.streams {
		running.Go(func() { s.stream(load, i) })
	}
	running.Go(func() { s.connect(load, &running) })
	s.pause()
	n := 0
	for f := range faults {
		n++
		protocol := s.protocol
		s.recovery = 0
		s.longest.Store(0)
		s.happen(f)
		s.pause()
		total := r.fault(s, protocol, f)
		if testing.Verbose() {
			fmt.Printf("%v: fault %d, %s, %s: recovered in %v; so far %d connections, %d lost\n",
				time.Since(s.began).Round(time.Second), n, protocol, f.name, s.recovery.Round(time.Millisecond),
				total[made], total[lost])
		}
	}
	stop()
	running.Wait()
	s.quiet()
}
