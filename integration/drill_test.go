package integration

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/sluice-cni/sluice/integration/netns"
)

var long = flag.Bool("drill", false, "drill for minutes, and print a table")

// drillSize is how much there is of it.
type drillSize struct {
	rate    int // new connections in a second
	streams int // that stay open
	times   int // that it happens
	pause   time.Duration
}

// drill is something that happens under load, and what it may do to connections.
type drill struct {
	name   string
	happen func(*drillScene)
	// mayReset are the connections that were being relayed by what was killed.
	mayReset func(protocol string) bool
}

func always(string) bool    { return true }
func never(string) bool     { return false }
func relayed(p string) bool { return p == "connect" }

var drills = []drill{
	{"hand-over", func(s *drillScene) { s.d = succeed(s.t, s.n, s.d) }, never},
	{"daemon killed", func(s *drillScene) { s.d.Kill(); s.rest(); s.start() }, relayed},
	{"upstream killed", func(s *drillScene) { s.proxy.Kill(); s.rest(); s.proxy = s.launch() }, always},
	{"upstream stopped", func(s *drillScene) { s.proxy.Freeze(); s.rest(); s.proxy.Signal(syscall.SIGCONT) }, never},
	{"both killed", func(s *drillScene) {
		s.proxy.Kill()
		s.d.Kill()
		s.rest()
		s.start()
		s.proxy = s.launch()
	}, always},
}

// drillScene is a node under load.
type drillScene struct {
	t      *testing.T
	size   drillSize
	n      *netns.Node
	d      *netns.Daemon
	proxy  *netns.Program
	launch func() *netns.Program
	pods   []*netns.Pod

	made, refused, reset, wrong, other atomic.Int64
	longest                            atomic.Int64 // ns, from connect to the echo
}

func (s *drillScene) rest()  { time.Sleep(s.size.pause) }
func (s *drillScene) start() { s.d = s.n.StartDaemon() }

// TestDrills: what happens to whom. `make drill` has it happen more often, under more load, and prints a table.
func TestDrills(t *testing.T) {
	sizes := map[string]drillSize{
		"connect": {rate: 40, streams: 8, times: 1, pause: 300 * time.Millisecond},
		"sockets": {rate: 20, streams: 8, times: 1, pause: 300 * time.Millisecond},
	}
	if *long {
		sizes = map[string]drillSize{
			"connect": {rate: 1000, streams: 200, times: 10, pause: time.Second},
			"sockets": {rate: 100, streams: 100, times: 10, pause: time.Second},
		}
	} else {
		t.Parallel()
	}
	var mu sync.Mutex
	table := [][]any{{"UPSTREAM", "DRILL", "TIMES", "MADE", "REFUSED", "RESET", "WRONG", "OTHER", "BYPASSED", "LONGEST WAIT", "STREAMS RESET", "DESCRIPTORS", "GOROUTINES", "RSS"}}
	t.Run("all", func(t *testing.T) {
		for _, protocol := range []string{"connect", "sockets"} {
			for _, dr := range drills {
				t.Run(protocol+" "+dr.name, func(t *testing.T) {
					if !*long {
						t.Parallel()
					}
					row := newDrillScene(t, protocol, sizes[protocol]).run(dr, protocol)
					mu.Lock()
					defer mu.Unlock()
					table = append(table, row)
				})
			}
		}
	})
	if *long {
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

func newDrillScene(t *testing.T, protocol string, size drillSize) *drillScene {
	s := &drillScene{t: t, size: size}
	if protocol == "sockets" {
		s.n = newSocketsNode(t)
		s.launch = func() *netns.Program { return launchAddon(s.n, "--set", "ignore_hosts=.*", "--quiet") }
	} else {
		s.n = netns.NewNode(t, bin)
		s.launch = func() *netns.Program { return startConnectProxy(s.n, "-quiet") }
	}
	s.n.LogLevel = "INFO"
	s.n.Config["metricsAddress"] = "127.0.0.1:15090"
	echoWorld(s.n)
	s.proxy = s.launch()
	s.start()
	for i := range 4 { // an address has ports for some 28,000 connections that have ended
		s.pods = append(s.pods, s.n.AddPod("pod"+strconv.Itoa(i)))
	}
	return s
}

// run has it happen under load, and wants everything to be as before once the load has gone.
func (s *drillScene) run(dr drill, protocol string) []any {
	t := s.t
	ready := func() bool { return s.d.Status().Upstream.Ready }
	netns.Eventually(t, "the upstream is there", ready)
	for _, p := range s.pods { // all code has run once
		allWell(t, clients(patience(t), 4, random(100), p.Host), 4)
	}
	s.quiet()
	before := s.state()

	load, stop := context.WithCancel(context.Background())
	defer stop()
	var running, streams sync.WaitGroup
	var streamsReset atomic.Int64
	for i := range s.size.streams {
		streams.Go(func() { s.stream(load, i, &streamsReset) })
	}
	running.Go(func() { s.connect(load, &running) })
	s.rest()
	for range s.size.times {
		dr.happen(s)
		s.rest()
	}
	netns.Eventually(t, "the upstream is there again", ready)
	s.rest()
	stop()
	running.Wait()
	streams.Wait()
	s.quiet()
	var after drillState
	netns.Eventually(t, "nothing is leaked", func() bool { // Go's pool of pipes goes with its garbage
		after = s.state()
		return after.descriptors <= before.descriptors+5 && after.goroutines <= before.goroutines+5
	})

	bypassed := s.n.SYNs()
	resets := s.reset.Load() + streamsReset.Load()
	if s.refused.Load() > 0 || s.wrong.Load() > 0 || s.other.Load() > 0 || bypassed > 0 || resets > 0 && !dr.mayReset(protocol) {
		t.Errorf("of %d connections %d were refused, %d reset, %d wrong, %d ended otherwise; %d SYNs went around; of the streams %d were reset",
			s.made.Load(), s.refused.Load(), s.reset.Load(), s.wrong.Load(), s.other.Load(), bypassed, streamsReset.Load())
	}
	return []any{
		protocol, dr.name, s.size.times, s.made.Load(), s.refused.Load(), s.reset.Load(), s.wrong.Load(), s.other.Load(), bypassed,
		time.Duration(s.longest.Load()).Round(time.Millisecond), streamsReset.Load(),
		fmt.Sprintf("%d→%d", before.descriptors, after.descriptors), fmt.Sprintf("%d→%d", before.goroutines, after.goroutines),
		fmt.Sprintf("%.0f→%.0f MiB", before.rss, after.rss),
	}
}

// connect makes short connections at the rate until ctx ends; wg has them to the end of each.
func (s *drillScene) connect(ctx context.Context, wg *sync.WaitGroup) {
	tick := time.NewTicker(time.Second / time.Duration(s.size.rate))
	defer tick.Stop()
	for i := 0; ctx.Err() == nil; i++ {
		wg.Go(func() {
			began := time.Now()
			s.count(echo(patience(s.t), s.pods[i%len(s.pods)].Host, echoAddresses[i/len(s.pods)%2], random(100)))
			for took := int64(time.Since(began)); ; {
				if was := s.longest.Load(); was >= took || s.longest.CompareAndSwap(was, took) {
					break
				}
			}
		})
		<-tick.C
	}
}

func (s *drillScene) count(err error) {
	s.made.Add(1)
	switch {
	case err == nil:
	case errors.Is(err, syscall.ECONNREFUSED):
		s.refused.Add(1)
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		s.reset.Add(1)
	case strings.Contains(err.Error(), "not what was sent"):
		s.wrong.Add(1)
	default:
		s.t.Logf("a connection: %v", err)
		s.other.Add(1)
	}
}

// stream sends and wants back one block after the other on one connection, or on the next when that has ended.
func (s *drillScene) stream(ctx context.Context, i int, resets *atomic.Int64) {
	host, address := s.pods[i%len(s.pods)].Host, echoAddresses[i/len(s.pods)%2]
	for ctx.Err() == nil {
		c, err := host.Dial(patience(s.t), "tcp", address)
		if err != nil {
			s.count(err)
			continue
		}
		block, got := random(16<<10), make([]byte, 16<<10)
		for n := uint64(0); err == nil && ctx.Err() == nil; n++ {
			copy(block, strconv.AppendUint(nil, n, 10)) // so that one that comes twice is seen
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			if _, err = c.Write(block); err == nil {
				_, err = io.ReadFull(c, got)
			}
			if err == nil && !bytes.Equal(block, got) {
				s.wrong.Add(1)
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
			}
		}
		_ = c.Close()
		if err != nil {
			resets.Add(1)
		}
	}
}

// quiet waits until nothing of the load is left.
func (s *drillScene) quiet() {
	netns.Eventually(s.t, "nothing waits, and nothing is open", func() bool {
		left := 0
		for _, p := range s.pods {
			a := s.d.Of(p)
			left += a.Waiting + a.Open
		}
		return left == 0
	})
}

// drillState is what a daemon may leak.
type drillState struct {
	descriptors, goroutines int
	rss                     float64 // MiB
}

func (s *drillScene) state() drillState {
	s.t.Helper()
	c := client(s.n.Host)
	value := func(text, name string) float64 {
		for line := range strings.Lines(text) {
			if v, ok := strings.CutPrefix(line, name+" "); ok {
				f, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
				if err == nil {
					return f
				}
			}
		}
		return 0
	}
	var state drillState
	netns.Eventually(s.t, "the metrics are served", func() bool { // by the daemon that took over, in a moment
		text, err := get(patience(s.t), c, "http://"+net.JoinHostPort("127.0.0.1", "15090")+"/metrics")
		state = drillState{int(value(text, "process_open_fds")), int(value(text, "go_goroutines")), value(text, "process_resident_memory_bytes") / (1 << 20)}
		return err == nil && state.goroutines > 0
	})
	return state
}
