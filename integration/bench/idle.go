package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// benchIdle measures the cost of relayed connections that carry nothing now.
func benchIdle(b *bench) {
	count := 2000
	if b.short {
		count = 200
	}
	b.tb.must(raiseDescriptors(uint64(count)*3), "RLIMIT_NOFILE: each connection has two ends here")
	n := b.newNode()
	b.startConnectproxy(n)
	d := n.StartDaemon()
	pod := n.AddPod("idle")
	b.openIdle(pod, 20)() // all code has run once
	time.Sleep(time.Second)
	memory, descriptors := b.rss(d.Program), b.descriptors(d.Program)
	stop := b.openIdle(pod, count)
	defer stop()
	time.Sleep(15 * time.Second) // sluiced gives memory back after some seconds
	each := func(before, after float64) float64 { return (after - before) / float64(count) }
	own, kernel := each(memory, b.rss(d.Program)), 2*b.socketSize()
	b.add(
		measured("idle", "idle connection: descriptors", each(descriptors, b.descriptors(d.Program)), "").atMost(2.05),
		measured("idle", "idle connection: memory", (own+kernel)/1024, "KiB").atMost(12).
			beside("sluiced", own/1024, "KiB").beside("two sockets in the kernel", kernel/1024, "KiB"),
	)
}

// openIdle opens connections, and sends a message both ways on each. They are closed when stop is called.
func (b *bench) openIdle(from *testbed.Pod, count int) (stop func()) {
	b.progress("%d connections", count)
	var all []net.Conn
	for range count {
		c, err := from.Dial(context.Background(), "tcp", serverAddress)
		b.tb.must(err, "connecting")
		all = append(all, c)
		_, err = c.Write(message(opEcho, 0))
		b.tb.must(err, "sending")
		b.tb.must(take(c, messageSize), "receiving")
	}
	return func() {
		for _, c := range all {
			_ = c.Close() // everything was received
		}
	}
}

func (b *bench) descriptors(p *testbed.Program) float64 {
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid()))
	b.tb.must(err, "descriptors")
	return float64(len(all))
}

// socketSize is the size of the kernel's objects for one TCP socket with a descriptor that two epolls watch, in bytes.
func (b *bench) socketSize() (sum float64) {
	f, err := os.Open("/proc/slabinfo")
	b.tb.must(err, "sizes of objects")
	defer f.Close() //nolint:errcheck // only read
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var name string
		var used, count, size float64
		_, _ = fmt.Sscan(lines.Text(), &name, &used, &count, &size) // the heading has no numbers
		switch name {
		case "TCP", "sock_inode_cache", "filp", "dentry":
			sum += size
		case "eventpoll_epi", "eventpoll_pwq":
			sum += 2 * size
		}
	}
	return sum
}
