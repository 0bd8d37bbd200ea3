package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// relayLoad is the amount of work in one comparison.
type relayLoad struct {
	rounds int
	bytes  int64 // of one download or upload
	echoes int   // number of connections, one after the other
}

// benchLatency compares the time of new connections through connectproxy.
func benchLatency(b *bench) {
	load := relayLoad{rounds: 15, echoes: 300}
	if b.short {
		load = relayLoad{rounds: 3, echoes: 100}
	}
	n := b.newNode()
	b.startConnectproxy(n)
	got := b.latency(b.newSides(n, true), load)
	b.add(b.compare("latency", "connect and echo, p50, relative to explicit", got, explicit, "µs").atMost(1.25))
	b.add(b.compare("latency", "connect and echo, p50, relative to redsocks", got, redsocks, "µs").atMost(0.9))
}

// benchThroughput compares the throughput of bulk data through connectproxy.
func benchThroughput(b *bench) {
	load := relayLoad{rounds: 11, bytes: 1 << 30}
	if b.short {
		load = relayLoad{rounds: 3, bytes: 128 << 20}
	}
	n := b.newNode()
	b.startConnectproxy(n)
	sides := b.newSides(n, true)
	for _, w := range ways {
		got := b.throughput(sides, load, w)
		b.add(b.compare("throughput", w.name+", relative to explicit", got, explicit, "Gbit/s").atLeast(0.9))
		b.add(b.compare("throughput", w.name+", relative to redsocks", got, redsocks, "Gbit/s").atLeast(1.15))
	}
}

// benchMitmdump compares latency and throughput through mitmdump. The option ignore_hosts makes mitmdump forward the
// connections of all sides without recording them: it would keep every byte of a flow in memory.
func benchMitmdump(b *bench) {
	load := relayLoad{rounds: 11, bytes: 256 << 20, echoes: 100}
	if b.short {
		load = relayLoad{rounds: 3, bytes: 64 << 20, echoes: 20}
	}
	n := b.newNode()
	p := testbed.LaunchMitmdump(n, "--listen-host", "0.0.0.0", "--quiet", "--set", "ignore_hosts=.*")
	n.WaitListening(p, testbed.ProxyAddress)
	sides := b.newSides(n, false)
	got := b.latency(sides, load)
	b.add(b.compare("mitmdump", "mitmdump: connect and echo, p50, relative to explicit", got, explicit, "µs").
		atMost(1.1))
	for _, w := range ways {
		got := b.throughput(sides, load, w)
		b.add(b.compare("mitmdump", "mitmdump: "+w.name+", relative to explicit", got, explicit, "Gbit/s").
			atLeast(0.95))
	}
}

// way is a direction of bulk data on one connection.
type way struct {
	name string
	run  func(c conn, bytes int64) error
}

var ways = []way{
	{"download", func(c conn, bytes int64) error {
		if _, err := c.Write(message(opDownload, bytes)); err != nil {
			return err
		}
		return take(c, bytes)
	}},
	{"upload", func(c conn, bytes int64) error {
		if _, err := c.Write(message(opUpload, bytes)); err != nil {
			return err
		}
		if err := send(c, bytes); err != nil {
			return err
		}
		return take(c, 1) // the server confirms that it has read all bytes
	}},
}

// throughput returns the throughput in Gbit/s for each side and round.
func (b *bench) throughput(sides []side, load relayLoad, w way) [][]float64 {
	return b.takeTurns(sides, load.rounds, w.name, func(s side) (float64, error) {
		var took time.Duration
		err := s.do(func(c conn) error {
			start := time.Now()
			err := w.run(c, load.bytes)
			took = time.Since(start)
			return err
		})
		return float64(load.bytes) * 8 / 1e9 / took.Seconds(), err
	})
}

// latency returns the median time in µs of a connection with one echo, for each side and round.
func (b *bench) latency(sides []side, load relayLoad) [][]float64 {
	return b.takeTurns(sides, load.rounds, "connect and echo", func(s side) (float64, error) {
		return s.medianEcho(load.echoes)
	})
}

// medianEcho returns the median time in µs of so many connections with one echo each, one after the other.
func (s side) medianEcho(count int) (float64, error) {
	var took []float64
	err := s.from.Do(func() error {
		for range count {
			start := time.Now()
			c, err := dial(s.proxy, s.to)
			if err != nil {
				return err
			}
			err = echo(c)
			c.close()
			if err != nil {
				return err
			}
			took = append(took, float64(time.Since(start))/1e3)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return median(took), nil
}

// takeTurns measures every side once in each round and returns the values for each side and round. Every second round
// goes backwards, so that a machine that becomes faster or slower favours no side. A first round for warm-up is not
// counted.
func (b *bench) takeTurns(sides []side, rounds int, name string, measure func(side) (float64, error)) [][]float64 {
	b.progress("%s, %d rounds", name, rounds)
	got := make([][]float64, len(sides))
	order := make([]int, len(sides))
	for i := range order {
		order[i] = i
	}
	for round := range rounds + 1 {
		for _, i := range order {
			s := sides[i]
			if s.ready != nil {
				s.ready()
			}
			v, err := measure(s)
			b.tb.must(err, fmt.Sprintf("%s, %s", name, s.name))
			if round > 0 {
				got[i] = append(got[i], v)
			}
		}
		slices.Reverse(order)
	}
	return got
}

func (b *bench) compare(part, name string, got [][]float64, with int, unit string) result {
	names := []string{"sluice", "explicit", "redsocks"}
	return ratio(part, name, got[sluice], got[with]).
		beside(names[sluice], median(got[sluice]), unit).
		beside(names[with], median(got[with]), unit)
}
