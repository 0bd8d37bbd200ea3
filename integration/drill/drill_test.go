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
	seed = flag.Uint64("drill-seed", uint64(time.Now().UnixNano()), "the seed of the random moments of disasters")
)

// drillSize is the load and the number of disasters.
type drillSize struct {
	rate    int // new connections in a second
	streams int // connections that stay open
	times   int // disasters
	pause   time.Duration
}

// drill is a disaster that happens under load.
type drill struct {
	name    string
	prepare func(*drillScene) // before the daemon starts; may be nil
	happen  func(*drillScene)
	// mayReset tells whether connections of the killed program may be reset.
	mayReset func(protocol string) bool
}

func always(string) bool { return true }

func never(string) bool { return false }

func relayed(p string) bool { return p == "connect" }

var drills = []drill{
	{"hand-over", nil, func(s *drillScene) { s.succeed() }, never},
	{"daemon killed", nil, func(s *drillScene) { s.kill(s.d.Program); s.lasts(); s.start() }, relayed},
	{"upstream killed", nil, func(s *drillScene) {
		s.kill(s.proxy)
		s.lasts()
		s.proxy = s.launch()
	}, always},
	{"upstream stopped", nil, func(s *drillScene) {
		s.proxy.Freeze()
		s.lasts()
		s.proxy.Signal(syscall.SIGCONT)
	}, never},
	{"both killed", nil, func(s *drillScene) {
		s.kill(s.proxy, s.d.Program)
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

// TestDrills lets each disaster happen once under a light load. `make drill` lets them happen more often, under a heavy
// load, and prints a table of the connections.
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
	t.Logf("-drill-seed=%d gives the same moments again", *seed)
	var mu sync.Mutex
	table := [][]any{{
		"UPSTREAM", "DRILL", "TIMES", "MADE", "REFUSED", "RESET", "ENDED", "WRONG", "OTHER", "BYPASSED",
		"LONGEST WAIT", "STREAMS RESET", "RECOVERED IN", "LEAKED NETNS", "DESCRIPTORS", "GOROUTINES", "RSS",
	}}
	t.Run("all", func(t *testing.T) {
		for _, protocol := range []string{"connect", "sockets"} {
			for i, dr := range drills {
				t.Run(protocol+" "+dr.name, func(t *testing.T) {
					if !*long {
						t.Parallel()
					}
					random := rand.New(rand.NewPCG(*seed, uint64(i)))
					s := newDrillScene(t, protocol, sizes[protocol], random, dr)
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

// run lets the disaster happen under load, and wants everything to be as before when the load has ended.
func (s *drillScene) run(dr drill, protocol string) []any {
	t := s.t
	testbed.Eventually(t, "the upstream is there", s.ready)
	for _, p := range s.pods { // all code has run once
		testbed.EchoAll(t, 4, 100, p.Host)
	}
	s.quiet()
	before := s.state()
	if *long { // Go keeps some of the memory that a load has needed once
		s.underLoad(dr.happen, 1)
		before.rss = s.state().rss
	}
	s.underLoad(dr.happen, s.size.times)
	var after drillState
	testbed.Eventually(t, "nothing is leaked", func() bool { // the collector empties Go's pool of pipes
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
	if s.refused.Load() > 0 || s.wrong.Load() > 0 || s.other.Load() > 0 || bypassed > 0 {
		t.Errorf("of %d connections %d were refused, %d wrong, %d failed otherwise; %d SYNs bypassed; want none",
			s.made.Load(), s.refused.Load(), s.wrong.Load(), s.other.Load(), bypassed)
	}
	if resets > int64(mayReset) {
		t.Errorf("of %d connections %d were reset and %d ended, and %d streams were reset; want at most %d of all",
			s.made.Load(), s.reset.Load(), s.ended.Load(), s.streamsReset.Load(), mayReset)
	}
	// The kernel ends the connections of a killed proxy with a FIN or a reset.
	if ended := s.ended.Load(); ended > 0 && !dr.mayReset("sockets") {
		t.Errorf("%d connections ended without a reset, as if the response were complete", ended)
	}
	return []any{
		protocol, dr.name, s.happened, s.made.Load(), s.refused.Load(), s.reset.Load(), s.ended.Load(), s.wrong.Load(),
		s.other.Load(), bypassed,
		time.Duration(s.longest.Load()).Round(time.Millisecond), s.streamsReset.Load(),
		s.recovery.Round(time.Millisecond), s.leakedNetns(),
		fmt.Sprintf("%d→%d", before.descriptors, after.descriptors),
		fmt.Sprintf("%d→%d", before.goroutines, after.goroutines),
		fmt.Sprintf("%.1f→%.1f MiB", before.rss, after.rss),
	}
}

// underLoad lets the disaster happen so many times, and returns when no connection of the load is left.
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
