package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// addon is what makes mitmproxy take sockets; the benchmark runs in the repository.
const addon = "deploy/mitmproxy/sluice.py"

// newSocketsNode is a node whose proxies accept in the netns of pods themselves.
func (b *bench) newSocketsNode() *testbed.Node {
	n := b.newNode()
	n.Config["upstream"] = map[string]any{"protocol": "sockets"}
	return n
}

// launchAddon starts a mitmdump that takes sockets. It is told to ignore what it carries, as in benchMitmdump.
func launchAddon(n *testbed.Node, args ...string) *testbed.Program {
	return n.LaunchMitmdump(append([]string{
		"--listen-host", "0.0.0.0", "--quiet", "--set", "ignore_hosts=.*", "--set", "sluice_socket=" + n.ProxySocket(), "-s", addon,
	}, args...)...)
}

// taken waits until so many proxies have the sockets of so many pods.
func (b *bench) taken(d *testbed.Daemon, proxies, pods int) {
	testbed.Eventually(b.tb, "the sockets are handed over", func() bool {
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
	n.WaitListening(p, testbed.ProxyAddress)
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
	b.attachSockets()
}

// fastSockets is with the fast proxy.
func (b *bench) fastSockets() {
	load := relayLoad{rounds: 11, bytes: 1 << 30, echoes: 300}
	if b.short {
		load = relayLoad{rounds: 3, bytes: 128 << 20, echoes: 100}
	}
	n := b.newSocketsNode()
	d := n.StartDaemon()
	p := testbed.Launch(n.Host, filepath.Join(b.bin, "connectproxy"), "-listen", "0.0.0.0:18080", "-quiet", "-sockets", n.ProxySocket())
	n.WaitListening(p, testbed.ProxyAddress)
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
	var captured []*testbed.Pod
	b.progress("%d pods", pods)
	for i := range pods {
		captured = append(captured, n.AddPod(fmt.Sprint("pod", i)))
	}
	for range 20 { // to ask for it costs memory once
		d.Status()
	}
	before := b.rss(d.Program)
	c := b.newClients(captured, each, netip.AddrPort{})
	c.run(all, "connected, and has asked", func() bool { return c.in[asked]+c.in[lost] == all })
	testbed.Eventually(b.tb, "the daemon sees all of them wait", func() bool { return waiting(d.Status()) == c.in[asked] })
	time.Sleep(time.Second)
	during := b.rss(d.Program)
	b.add(result{Part: "sockets", figure: figure{fmt.Sprintf("sockets: %d waiting, memory for each", all), (during - before) / float64(all), "B"}}.atMost(100).
		beside("before", before/(1<<20), "MiB").beside("waiting", during/(1<<20), "MiB"))
	b.add(result{Part: "sockets", figure: figure{"sockets: refused", float64(c.in[lost]), ""}}.atMost(0))
	launchAddon(n)
	start := time.Now()
	c.run(all, "served", func() bool { return c.in[served]+c.in[lost] == all })
	b.add(result{Part: "sockets", figure: figure{"sockets: then served by mitmdump", float64(c.in[served]), ""}}.atLeast(float64(all)).
		beside("all after", time.Since(start).Seconds(), "s"))
	c.close()
}

// sharedSockets compares two processes of mitmdump that share the sockets with one. They look at every request, as they do
// for people.
func (b *bench) sharedSockets() {
	for1, rounds := 2*time.Second, 7
	if b.short {
		for1, rounds = time.Second, 3
	}
	n := b.newSocketsNode()
	d := n.StartDaemon()
	pod := n.AddPod("captured")
	launch := func(port string) *testbed.Program {
		return n.LaunchMitmdump("--listen-port", port, "--quiet", "--set", "sluice_socket="+n.ProxySocket(), "-s", addon)
	}
	launch("18080")
	b.taken(d, 1, 1)
	b.rate(pod, for1) // Python has seen everything once
	var rates [2][]float64
	for range rounds {
		rates[0] = append(rates[0], b.rate(pod, for1))
		two := launch("18081")
		b.taken(d, 2, 1)
		b.rate(pod, for1)
		rates[1] = append(rates[1], b.rate(pod, for1))
		two.Kill()
		b.taken(d, 1, 1)
	}
	var ideal []float64
	for range rounds {
		ideal = append(ideal, b.busy(2)/b.busy(1))
	}
	b.add(ratio("sockets", "sockets: two mitmdump processes against one", rates[1], rates[0]).atLeast(1.6).
		beside("two", median(rates[1]), "/s").beside("one", median(rates[0]), "/s").
		beside("two programs that share nothing, against one", median(ideal), ""))
}

// busy is how much so many programs that compute get done together: two CPUs may be two threads of one core.
func (b *bench) busy(programs int) float64 {
	const program = `
import time
end, n = time.monotonic() + 1, 0
while time.monotonic() < end:
    d = {str(i): [i] * 3 for i in range(2000)}
    n += 1
print(n)`
	var done atomic.Int64
	var wg sync.WaitGroup
	for range programs {
		wg.Go(func() {
			out, err := exec.Command("/usr/bin/python3", "-c", program).Output()
			b.tb.must(err, "a program that computes")
			n, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
			b.tb.must(err, "what it prints")
			done.Add(n)
		})
	}
	wg.Wait()
	return float64(done.Load())
}

// rate is how many HTTP requests, each on a connection of its own, are served in a second, by many clients at a time.
func (b *bench) rate(pod *testbed.Pod, d time.Duration) float64 {
	var count atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for range 16 {
		wg.Go(func() {
			err := pod.Do(func() error {
				for time.Now().Before(end) {
					c, err := dial(netip.AddrPort{}, web)
					if err != nil {
						return err
					}
					err = get(c)
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

// attachSockets measures how soon a proxy has the sockets of a new pod.
func (b *bench) attachSockets() {
	pods := 50
	if b.short {
		pods = 10
	}
	n := b.newSocketsNode()
	n.StartDaemon()
	attached, err := attachments(n.ProxySocket())
	b.tb.must(err, "a proxy that takes sockets")
	var after []float64
	for i := range pods {
		n.AddPod(fmt.Sprint("pod", i))
		added := time.Now()
		after = append(after, float64((<-attached).Sub(added))/float64(time.Millisecond))
	}
	b.add(result{Part: "sockets", figure: figure{"sockets: a proxy has them after the end of ADD", slices.Max(after), "ms"}}.atMost(10).
		beside("median", median(after), "ms"))
}

// attachments connects as a proxy; the channel gives the times at which it was handed sockets.
func attachments(socket string) (<-chan time.Time, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	if _, err := c.Write([]byte(`{"kind": "hello", "version": 1, "name": "bench"}`)); err != nil {
		return nil, err
	}
	times := make(chan time.Time)
	go func() {
		b := make([]byte, 64<<10)
		for {
			k, files, err := unixsock.Receive(c, b)
			now := time.Now()
			unixsock.Close(files)
			if err != nil || k == 0 {
				return // the daemon has ended
			}
			var m struct{ Kind, ID string }
			if json.Unmarshal(b[:k], &m) != nil {
				return
			}
			answer := ""
			switch m.Kind {
			case "attach":
				times <- now
			case "ping":
				answer = `{"kind": "state"}`
			case "detach":
				answer = fmt.Sprintf(`{"kind": "detached", "id": %q}`, m.ID)
			}
			if answer != "" {
				_, _ = c.Write([]byte(answer)) // the next read tells
			}
		}
	}()
	return times, nil
}
