package main

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// deadAddress is a port of the world that drops SYNs.
const deadAddress = testbed.WorldIPv4 + ":9"

// benchFair measures the connections of one pod while another pod connects to destinations that do not answer.
func benchFair(b *bench) {
	rounds, echoes := 5, 300
	if b.short {
		rounds, echoes = 2, 100
	}
	n := b.newNode()
	n.World.Exec("iptables", "-A", "INPUT", "-p", "tcp", "--dport", "9", "-j", "DROP")
	b.startConnectproxy(n)
	n.StartDaemon()
	loud := n.AddPod("loud")
	quiet := side{name: "quiet", from: n.AddPod("quiet").Host, to: server}
	b.tb.must(quiet.do(echo), "first connection")
	var alone, beside []float64
	for range rounds {
		v, err := quiet.medianEcho(echoes)
		b.tb.must(err, "connect and echo")
		alone = append(alone, v)
		stop := connectToNowhere(loud)
		v, err = quiet.medianEcho(echoes)
		stop()
		b.tb.must(err, "connect and echo beside dead destinations")
		beside = append(beside, v)
	}
	b.add(ratio("fair", "connect and echo, p50, beside a pod with 200 dead destinations", beside, alone).
		beside("beside it", median(beside), "µs").beside("alone", median(alone), "µs").atMost(2))
}

// connectToNowhere connects from 200 goroutines again and again to deadAddress, until stop is called. It returns when
// each has connected for the second time.
func connectToNowhere(from *testbed.Pod) (stop func()) {
	const loops, wait = 200, 1500 * time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	var running, begun sync.WaitGroup
	begun.Add(loops)
	for range loops {
		running.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				c, err := from.Dial(ctx, "tcp", deadAddress)
				if i == 1 {
					begun.Done()
				}
				if err == nil {
					readFor(ctx, c, wait)
				}
			}
		})
	}
	begun.Wait()
	return func() {
		cancel()
		running.Wait()
	}
}

// readFor reads from c, and closes it after a while.
func readFor(ctx context.Context, c net.Conn, wait time.Duration) {
	defer c.Close() //nolint:errcheck // nothing was written
	_ = c.SetReadDeadline(time.Now().Add(wait))
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	_, _ = c.Read(make([]byte, 1)) // ends at the deadline, or with a reset
}
