package drill

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"testing"
	"text/tabwriter"
	"time"
)

// report is the tables of a run.
type report struct {
	mu     sync.Mutex
	faults map[faultKey]*faultRow
	total  [outcomes]int64
	nodes  [][]any
}

type faultKey struct{ name, protocol string }

// faultRow is the sum of one fault.
type faultRow struct {
	times             int
	counts            [outcomes]int64
	longest, recovery time.Duration
	// The medians of an echo, of each time.
	calm, struck []time.Duration
}

// fault adds the connections that ended since the last call. It returns the sums of all faults.
func (r *report) fault(s *drillScene, protocol string, f fault) [outcomes]int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.faults == nil {
		r.faults = map[faultKey]*faultRow{}
	}
	key := faultKey{f.name, protocol}
	row := cmp.Or(r.faults[key], &faultRow{})
	r.faults[key] = row
	row.times++
	for o := range s.counts {
		n := s.counts[o].Swap(0)
		row.counts[o] += n
		r.total[o] += n
	}
	row.longest, row.recovery = max(row.longest, time.Duration(s.longest.Load())), max(row.recovery, s.recovery)
	calm, struck := s.medians()
	row.calm, row.struck = append(row.calm, calm), append(row.struck, struck)
	return r.total
}

// node adds what is left on a node.
func (r *report) node(protocol, name string, bypassed, netns int, before, after remains) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodes = append(r.nodes, []any{
		protocol, name, bypassed, netns, len(minus(after.files, before.files)), after.rules != before.rules,
		fmt.Sprintf("%d→%d", before.descriptors, after.descriptors),
		fmt.Sprintf("%d→%d", before.goroutines, after.goroutines),
		fmt.Sprintf("%.1f→%.1f MiB", before.rss, after.rss),
	})
}

// print prints the tables if the test is verbose.
func (r *report) print() {
	if !testing.Verbose() {
		return
	}
	head := []any{"UPSTREAM", "FAULT", "TIMES"}
	for _, name := range outcomeNames {
		head = append(head, name)
	}
	head = append(head, "LONGEST WAIT", "RECOVERED IN", "P50 BEFORE", "P50 DURING")
	table := [][]any{head}
	total := faultRow{}
	for _, key := range slices.SortedFunc(maps.Keys(r.faults), func(a, b faultKey) int {
		return cmp.Or(cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.name, b.name))
	}) {
		row := r.faults[key]
		table = append(table, row.cells(key.protocol, key.name))
		total.add(row)
	}
	table = append(table, total.cells("", "all"))
	printTable(table)
	printTable(append([][]any{{
		"UPSTREAM", "NODE", "BYPASSED", "NETNS LEFT", "FILES LEFT", "RULES CHANGED", "DESCRIPTORS", "GOROUTINES", "RSS",
	}}, r.nodes...))
}

func (f *faultRow) add(g *faultRow) {
	f.times += g.times
	for o := range f.counts {
		f.counts[o] += g.counts[o]
	}
	f.longest, f.recovery = max(f.longest, g.longest), max(f.recovery, g.recovery)
	f.calm, f.struck = append(f.calm, g.calm...), append(f.struck, g.struck...)
}

func (f *faultRow) cells(protocol, name string) []any {
	cells := []any{protocol, name, f.times}
	for _, n := range f.counts {
		cells = append(cells, n)
	}
	return append(cells, f.longest.Round(time.Millisecond), f.recovery.Round(time.Millisecond),
		median(f.calm), median(f.struck))
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
