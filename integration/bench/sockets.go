package main

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/integration/netns"
)

// addon is what makes mitmproxy take sockets; the benchmark runs in the repository.
const addon = "deploy/mitmproxy/sluice.py"

// newSocketsNode is a node whose proxies accept in the netns of pods themselves.
func (b *bench) newSocketsNode() *netns.Node {
	n := b.newNode()
	n.Config["upstream"] = map[string]any{"protocol": "sockets"}
	return n
}

// launchAddon starts a mitmdump that takes sockets. It is told to ignore what it carries, as in benchMitmdump.
func launchAddon(n *netns.Node, args ...string) *netns.Program {
	return n.LaunchMitmdump(append([]string{
		"--listen-host", "0.0.0.0", "--quiet", "--set", "ignore_hosts=.*", "--set", "sluice_socket=" + n.ProxySocket(), "-s", addon,
	}, args...)...)
}

// taken waits until so many proxies have the sockets of so many pods.
func (b *bench) taken(d *netns.Daemon, proxies, pods int) {
	netns.Eventually(b.tb, "the sockets are handed over", func() bool {
		up := d.Status().Upstream
		for _, p := range up.Proxies {
			if p.Pods != pods {
				return false
			}
		}
		return len(up.Proxies) == proxies
	})
}

// benchSockets compares proxies that take the sockets with the same proxies used explicitly.
func benchSockets(b *bench) {
	load := relayLoad{rounds: 11, bytes: 256 << 20, echoes: 100}
	if b.short {
		load = relayLoad{rounds: 3, bytes: 64 << 20, echoes: 20}
	}
	n := b.newSocketsNode()
	p := launchAddon(n)
	n.WaitListening(p, netns.ProxyAddress)
	sides := b.newSides(n, false)
	got := b.latency(sides, load)
	b.add(b.compare("sockets", "sockets, mitmdump: connect and echo, p50, against explicit", got, explicit, "µs").atMost(1))
	for _, w := range ways {
		got := b.throughput(sides, load, w)
		b.add(b.compare("sockets", "sockets, mitmdump: "+w.name+", against explicit", got, explicit, "Gbit/s").atLeast(1))
	}
	b.fastSockets()
	b.waitingSockets()
	b.sharedSockets()
}

// fastSockets is with the fast proxy.
func (b *bench) fastSockets() {
	load := relayLoad{rounds: 11, bytes: 1 << 30, echoes: 300}
	if b.short {
		load = relayLoad{rounds: 3, bytes: 128 << 20, echoes: 100}
	}
	n := b.newSocketsNode()
	d := n.StartDaemon()
	p := netns.Launch(n.Host, filepath.Join(b.bin, "connectproxy"), "-listen", "0.0.0.0:18080", "-quiet", "-sockets", n.ProxySocket())
	n.WaitListening(p, netns.ProxyAddress)
	sides := b.sidesOf(n)
	b.taken(d, 1, 1)
	got := b.latency(sides, load)
	b.add(b.compare("sockets", "sockets, fast proxy: connect and echo, p50, against explicit", got, explicit, "µs"))
	for _, w := range ways {
		got := b.throughput(sides, load, w)
		b.add(b.compare("sockets", "sockets, fast proxy: "+w.name+", against explicit", got, explicit, "Gbit/s").atLeast(1))
	}
}

// waitingSockets lets many connections wait in the kernel.
func (b *bench) waitingSockets() {
	pods, each := 20, 500
	if b.short {
		pods, each = 4, 100
	}
	all := pods * each
	b.tb.must(raiseDescriptors(uint64(all)*3/2), "RLIMIT_NOFILE: each waiting connection is a descriptor here")
	n := b.newSocketsNode()
	d := n.StartDaemon()
	var captured []*netns.Pod
	b.progress("%d pods", pods)
	for i := range pods {
		captured = append(captured, n.AddPod(fmt.Sprint("pod", i)))
	}
	time.Sleep(time.Second) // what ADD has set going has ended
	before := b.rss(d.Program)
	c := b.newClients(captured, each, netip.AddrPort{})
	c.run(all, "connected, and has asked", func() bool { return c.in[asked]+c.in[lost] == all })
	netns.Eventually(b.tb, "the daemon sees all of them wait", func() bool { return waiting(d.Status()) == c.in[asked] })
	time.Sleep(time.Second)
	during := b.rss(d.Program)
	b.add(result{Part: "sockets", figure: figure{fmt.Sprintf("sockets: %d waiting, memory for each", all), (during - before) / float64(all), "B"}}.
		beside("before", before/(1<<20), "MiB").beside("waiting", during/(1<<20), "MiB").beside("refused", float64(c.in[lost]), ""))
	launchAddon(n)
	start := time.Now()
	c.run(all, "served", func() bool { return c.in[served]+c.in[lost] == all })
	b.add(result{Part: "sockets", figure: figure{"sockets: then served by mitmdump", float64(c.in[served]), ""}}.atLeast(float64(all)).
		beside("all after", time.Since(start).Seconds(), "s"))
	c.close()
}

// sharedSockets compares two processes of mitmdump that share the sockets with one.
func (b *bench) sharedSockets() {
	for1, rounds := time.Second, 5 // no more connections than the pod has ports: those that have ended wait for a minute
	if b.short {
		rounds = 2
	}
	n := b.newSocketsNode()
	d := n.StartDaemon()
	pod := n.AddPod("captured")
	one := launchAddon(n)
	b.taken(d, 1, 1)
	var rates [2][]float64
	for range rounds {
		rates[0] = append(rates[0], b.rate(pod, for1))
		two := launchAddon(n, "--listen-port", "18081")
		b.taken(d, 2, 1)
		rates[1] = append(rates[1], b.rate(pod, for1))
		two.Kill()
		b.taken(d, 1, 1)
	}
	one.Kill()
	b.add(ratio("sockets", "sockets: two mitmdump processes against one", rates[1], rates[0]).atLeast(1.6).
		beside("two", median(rates[1]), "/s").beside("one", median(rates[0]), "/s"))
}

// rate is how many connections with one echo are served in a second, by many clients at a time.
func (b *bench) rate(pod *netns.Pod, d time.Duration) float64 {
	var count atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for range 16 {
		wg.Go(func() {
			err := pod.Do(func() error {
				for time.Now().Before(end) {
					c, err := dial(netip.AddrPort{}, server)
					if err != nil {
						return err
					}
					err = echo(c)
					c.close()
					if err != nil {
						return err
					}
					count.Add(1)
				}
				return nil
			})
			b.tb.must(err, "a client")
		})
	}
	wg.Wait()
	return float64(count.Load()) / d.Seconds()
}
