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

// addon makes mitmproxy accept on the sockets that sluiced hands over. The benchmark runs in the repository's root.
const addon = "deploy/mitmproxy/sluice.py"

// newSocketsNode creates a node where the proxies accept connections in the netns of pods.
func newSocketsNode(b *bench) *testbed.Node {
	n := b.newNode()
	n.Config["upstream"] = map[string]any{"protocol": "sockets"}
	return n
}

// launchAddon starts a mitmdump that receives the sockets. It forwards without recording, as in benchMitmdump.
func launchAddon(n *testbed.Node, args ...string) *testbed.Program {
	return testbed.LaunchMitmdump(n, append([]string{
		"--listen-host", "0.0.0.0", "--quiet", "--set", "ignore_hosts=.*",
		"--set", "sluice_socket=" + n.ProxySocket(), "-s", addon,
	}, args...)...)
}

// taken waits until the given number of proxies are connected and each has the sockets of the given number of pods.
func taken(b *bench, d *testbed.Daemon, proxies, pods int) {
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

// benchSockets compares proxies that accept on the handed-over sockets with the same proxies used explicitly.
func benchSockets(b *bench) {
	load := relayLoad{rounds: 11, bytes: 256 << 20, echoes: 100}
	if b.short {
		load = relayLoad{rounds: 3, bytes: 64 << 20, echoes: 20}
	}
	n := newSocketsNode(b)
	p := launchAddon(n)
	n.WaitListening(p, testbed.ProxyAddress)
	sides := b.newSides(n, false)
	got := b.latency(sides, load)
	b.add(b.compare("sockets", "sockets, mitmdump: connect and echo, p50, relative to explicit", got, explicit, "µs").
		atMost(1))
	for _, w := range ways {
		got := b.throughput(sides, load, w)
		b.add(b.compare("sockets", "sockets, mitmdump: "+w.name+", relative to explicit", got, explicit, "Gbit/s").
			atLeast(1))
	}
	fastSockets(b)
	waitingSockets(b)
	sharedSockets(b)
	attachSockets(b)
}

// fastSockets does the same comparison with connectproxy.
func fastSockets(b *bench) {
	load := relayLoad{rounds: 11, bytes: 1 << 30, echoes: 300}
	if b.short {
		load = relayLoad{rounds: 3, bytes: 128 << 20, echoes: 100}
	}
	n := newSocketsNode(b)
	d := n.StartDaemon()
	p := testbed.Launch(n.Host, filepath.Join(b.bin, "connectproxy"),
		"-listen", "0.0.0.0:18080", "-quiet", "-sockets", n.ProxySocket())
	n.WaitListening(p, testbed.ProxyAddress)
	sides := b.sidesOf(n)
	taken(b, d, 1, 1)
	got := b.latency(sides, load)
	b.add(b.compare("sockets", "sockets, fast proxy: connect and echo, p50, relative to explicit", got, explicit, "µs"))
	for _, w := range ways {
		got := b.throughput(sides, load, w)
		b.add(b.compare("sockets", "sockets, fast proxy: "+w.name+", relative to explicit", got, explicit, "Gbit/s").
			atLeast(1))
	}
}

// waitingSockets measures the memory of connections that wait in the kernel, and counts those that are served later.
func waitingSockets(b *bench) {
	pods, each := 20, 500
	if b.short {
		pods, each = 4, 100
	}
	all := pods * each
	b.tb.must(raiseDescriptors(uint64(all)*3/2), "RLIMIT_NOFILE: each waiting connection is a descriptor here")
	n := newSocketsNode(b)
	d := n.StartDaemon()
	var captured []*testbed.Pod
	b.progress("%d pods", pods)
	for i := range pods {
		captured = append(captured, n.AddPod(fmt.Sprint("pod", i)))
	}
	for range 20 { // the first status requests make the daemon's memory grow
		d.Status()
	}
	before := b.rss(d.Program)
	c := b.newClients(captured, each, netip.AddrPort{})
	c.run(all, "waiting", func() bool { return c.in[asked]+c.in[lost] == all })
	b.waitUntilCounted(d, c.in[asked])
	time.Sleep(time.Second)
	during := b.rss(d.Program)
	name := fmt.Sprintf("sockets: daemon's memory for each of %d waiting connections", all)
	b.add(measured("sockets", name, (during-before)/float64(all), "B").atMost(100).
		beside("before", before/(1<<20), "MiB").beside("while they wait", during/(1<<20), "MiB"))
	b.add(measured("sockets", "sockets: refused connections", float64(c.in[lost]), "").atMost(0))
	launchAddon(n)
	start := time.Now()
	c.run(all, "served", func() bool { return c.in[served]+c.in[lost] == all })
	b.add(measured("sockets", "sockets: connections that mitmdump serves then", float64(c.in[served]), "").
		atLeast(float64(all)).
		beside("time from the start of mitmdump", time.Since(start).Seconds(), "s"))
	c.close()
}

// sharedSockets compares two processes of mitmdump that share the sockets with one process. They parse every request.
func sharedSockets(b *bench) {
	period, rounds := 2*time.Second, 7
	if b.short {
		period, rounds = time.Second, 3
	}
	n := newSocketsNode(b)
	d := n.StartDaemon()
	pod := n.AddPod("captured")
	launch := func(port string) *testbed.Program {
		return testbed.LaunchMitmdump(n, "--listen-port", port, "--quiet",
			"--set", "sluice_socket="+n.ProxySocket(), "-s", addon)
	}
	launch("18080")
	taken(b, d, 1, 1)
	rate(b, pod, period) // warm-up
	var rates [2][]float64
	for range rounds {
		rates[0] = append(rates[0], rate(b, pod, period))
		two := launch("18081")
		taken(b, d, 2, 1)
		rate(b, pod, period)
		rates[1] = append(rates[1], rate(b, pod, period))
		two.Kill()
		taken(b, d, 1, 1)
	}
	var ideal []float64
	for range rounds {
		ideal = append(ideal, busy(b, 2)/busy(b, 1))
	}
	b.add(ratio("sockets", "sockets: requests of two mitmdump processes, relative to one", rates[1], rates[0]).
		atLeast(1.6).
		beside("two", median(rates[1]), "/s").beside("one", median(rates[0]), "/s").
		beside("two independent programs, relative to one", median(ideal), ""))
}

// busy runs independent programs that compute for one second, and returns the sum of their work. It shows the speed-up
// that the machine allows: two CPUs may be two threads of one core.
func busy(b *bench, programs int) float64 {
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
			b.tb.must(err, "running a Python program")
			n, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
			b.tb.must(err, "reading the output of a Python program")
			done.Add(n)
		})
	}
	wg.Wait()
	return float64(done.Load())
}

// rate measures for a duration the number of HTTP requests per second. 16 clients send requests at a time, each on a
// new connection.
func rate(b *bench, pod *testbed.Pod, d time.Duration) float64 {
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
			b.tb.must(err, "HTTP client")
		})
	}
	wg.Wait()
	return float64(count.Load()) / d.Seconds()
}

// attachSockets measures the time from the end of ADD until a proxy has the sockets of the new pod.
func attachSockets(b *bench) {
	pods := 50
	if b.short {
		pods = 10
	}
	n := newSocketsNode(b)
	n.StartDaemon()
	attached, err := attachments(n.ProxySocket())
	b.tb.must(err, "connecting to the proxy socket")
	var after []float64
	for i := range pods {
		n.AddPod(fmt.Sprint("pod", i))
		added := time.Now()
		after = append(after, float64((<-attached).Sub(added))/float64(time.Millisecond))
	}
	b.add(measured("sockets", "sockets: time from the end of ADD until the proxy has them, maximum",
		slices.Max(after), "ms").
		atMost(10).
		beside("median", median(after), "ms"))
}

// attachments connects to sluiced as a proxy. The channel delivers the times at which sockets arrive.
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
				return // the daemon has closed the connection
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
				_, _ = c.Write([]byte(answer)) // after a failure, the next read fails too
			}
		}
	}()
	return times, nil
}
