package drill

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

var (
	long = flag.Bool("drill", false, "drill for minutes, and print a table")
	seed = flag.Uint64("drill-seed", uint64(time.Now().UnixNano()), "of the moments at which things happen")
)

// drillSize is how much there is of it.
type drillSize struct {
	rate    int // new connections in a second
	streams int // that stay open
	times   int // that it happens
	pause   time.Duration
}

// drill is something that happens under load, and what it may do to connections.
type drill struct {
	name    string
	prepare func(*drillScene) // before the daemon is there; may be nil
	happen  func(*drillScene)
	// mayReset tells whether the connections may be lost that what was killed had.
	mayReset func(protocol string) bool
}

func always(string) bool { return true }

func never(string) bool { return false }

func relayed(p string) bool { return p == "connect" }

var drills = []drill{
	{"hand-over", nil, func(s *drillScene) { s.succeed() }, never},
	{"daemon killed", nil, func(s *drillScene) { s.stake(); s.d.Kill(); s.lasts(); s.start() }, relayed},
	{"upstream killed", nil, func(s *drillScene) { s.stake(); s.proxy.Kill(); s.lasts(); s.proxy = s.launch() }, always},
	{"upstream stopped", nil, func(s *drillScene) { s.proxy.Freeze(); s.lasts(); s.proxy.Signal(syscall.SIGCONT) }, never},
	{"both killed", nil, func(s *drillScene) {
		s.stake()
		s.proxy.Kill()
		s.d.Kill()
		s.lasts()
		s.start()
		s.proxy = s.launch()
	}, always},
	{"conflist clobbered", func(s *drillScene) { s.n.Install() }, (*drillScene).clobberConflist, never},
	{"disk full", (*drillScene).mountStateDir, (*drillScene).fillDisk, relayed},
	{"descriptors used up", nil, (*drillScene).useUpDescriptors, never},
	{"conntrack full", nil, (*drillScene).fillConntrack, never},
	{"clock jumped", nil, (*drillScene).jumpClock, never},
}

// TestDrills: what happens to whom. `make drill` has it happen more often, under more load, and prints a table.
func TestDrills(t *testing.T) {
	sizes := map[string]drillSize{
		"connect": {rate: 40, streams: 8, times: 1, pause: 300 * time.Millisecond},
		"sockets": {rate: 20, streams: 8, times: 1, pause: 300 * time.Millisecond},
	}
	if *long {
		sizes = map[string]drillSize{
			"connect": {rate: 1000, streams: 200, times: 10, pause: time.Second},
			"sockets": {rate: 1000, streams: 200, times: 10, pause: time.Second},
		}
	} else {
		t.Parallel()
	}
	t.Logf("moments by -drill-seed=%d", *seed)
	var mu sync.Mutex
	table := [][]any{{
		"UPSTREAM", "DRILL", "TIMES", "MADE", "REFUSED", "RESET", "ENDED", "WRONG", "OTHER", "BYPASSED", "LONGEST WAIT", "STREAMS RESET",
		"RECOVERED IN", "LEAKED NETNS", "DESCRIPTORS", "GOROUTINES", "RSS",
	}}
	t.Run("all", func(t *testing.T) {
		for _, protocol := range []string{"connect", "sockets"} {
			for i, dr := range drills {
				t.Run(protocol+" "+dr.name, func(t *testing.T) {
					if !*long {
						t.Parallel()
					}
					s := newDrillScene(t, protocol, sizes[protocol], rand.New(rand.NewPCG(*seed, uint64(i))), dr.prepare)
					row := s.run(dr, protocol)
					mu.Lock()
					defer mu.Unlock()
					table = append(table, row)
				})
			}
		}
	})
	if testing.Verbose() {
		printTable(table)
	}
}

func printTable(table [][]any) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, row := range table {
		for _, cell := range row {
			fmt.Fprintf(w, "%v\t", cell)
		}
		fmt.Fprintln(w)
	}
	_ = w.Flush() // to standard output
}

// run has it happen under load, and wants everything to be as before once the load has gone.
func (s *drillScene) run(dr drill, protocol string) []any {
	t := s.t
	testbed.Eventually(t, "the upstream is there", s.ready)
	for _, p := range s.pods { // all code has run once
		testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 4, testbed.RandomBytes(100), p.Host), 4)
	}
	s.quiet()
	before := s.state()
	if *long { // of the memory that a load has needed once, Go keeps some
		s.underLoad(dr.happen, 1)
		before.rss = s.state().rss
	}
	s.underLoad(dr.happen, s.size.times)
	var after drillState
	testbed.Eventually(t, "nothing is leaked", func() bool { // Go's pool of pipes goes with its garbage
		after = s.state()
		return after.descriptors <= before.descriptors+5 && after.goroutines <= before.goroutines+5
	})
	for _, p := range s.pods {
		s.removePod(p)
	}

	bypassed := s.n.SYNs()
	resets := s.reset.Load() + s.ended.Load() + s.streamsReset.Load()
	mayReset := 0
	if dr.mayReset(protocol) {
		mayReset = s.atStake
	}
	if s.refused.Load() > 0 || s.wrong.Load() > 0 || s.other.Load() > 0 || bypassed > 0 || resets > int64(mayReset) {
		t.Errorf("of %d connections %d were refused, %d wrong, %d failed otherwise; %d SYNs went around; %d were reset, %d ended, and %d streams were reset, of at most %d that may have been",
			s.made.Load(), s.refused.Load(), s.wrong.Load(), s.other.Load(), bypassed, s.reset.Load(), s.ended.Load(), s.streamsReset.Load(), mayReset)
	}
	if ended := s.ended.Load(); ended > 0 && !dr.mayReset("sockets") { // a proxy that is killed ends them as its kernel likes
		t.Errorf("%d were ended without a reset, as if there were no more to come", ended)
	}
	return []any{
		protocol, dr.name, s.happened, s.made.Load(), s.refused.Load(), s.reset.Load(), s.ended.Load(), s.wrong.Load(), s.other.Load(), bypassed,
		time.Duration(s.longest.Load()).Round(time.Millisecond), s.streamsReset.Load(),
		s.recovery.Round(time.Millisecond), s.leakedNetns(),
		fmt.Sprintf("%d→%d", before.descriptors, after.descriptors), fmt.Sprintf("%d→%d", before.goroutines, after.goroutines),
		fmt.Sprintf("%.1f→%.1f MiB", before.rss, after.rss),
	}
}

// underLoad has it happen so many times, and returns when nothing of the load is left.
func (s *drillScene) underLoad(happen func(*drillScene), times int) {
	load, stop := context.WithCancel(context.Background())
	defer stop()
	var running sync.WaitGroup
	for i := range s.size.streams {
		running.Go(func() { s.stream(load, i) })
	}
	running.Go(func() { s.connect(load, &running) })
	s.pause()
	for range times {
		s.over = time.Now()
		happen(s)
		s.recovered()
		s.happened++
		s.pause()
	}
	stop()
	running.Wait()
	s.quiet()
}
