package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// addon makes mitmproxy accept on the sockets that sluiced hands over. The benchmark runs in the repository's root.
const addon = "deploy/mitmproxy/sluice.py"

// mitmproxies are the versions of mitmproxy that are measured: Debian 12's, and the one of the example.
var mitmproxies = []string{"8.1.1", "12.3.1"}

// newSocketsNode creates a node where the proxies accept connections in the netns of pods.
func newSocketsNode(b *bench) *testbed.Node {
	n := b.newNode()
	n.Config["upstream"] = map[string]any{"protocol": "sockets"}
	return n
}

// unrecorded makes mitmdump forward without recording, as in benchMitmdump.
const unrecorded = "--set=ignore_hosts=.*"

// launchAddon starts a mitmdump that receives the sockets.
func launchAddon(n *testbed.Node, args ...string) *testbed.Program {
	return testbed.LaunchMitmdump(n, append([]string{
		"--listen-host", "0.0.0.0", "--quiet", "--set", "sluice_socket=" + n.ProxySocket(), "-s", addon,
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
	for _, version := range mitmproxies {
		b.tb.within(func() { mitmdumpSockets(b, version, load) })
		b.tb.within(func() { sharedSockets(b, version) })
	}
	fastSockets(b)
	waitingSockets(b)
	attachSockets(b)
}

func mitmdumpSockets(b *bench, version string, load relayLoad) {
	n := newSocketsNode(b)
	n.MitmproxyVersion = version
	p := launchAddon(n, unrecorded)
	n.WaitListening(p, testbed.ProxyAddress)
	sides := b.newSides(n, false)
	name := func(measurement string) string {
		return fmt.Sprintf("sockets, mitmdump %s: %s, relative to explicit", version, measurement)
	}
	got := b.latency(sides, load)
	b.add(b.compare("sockets", name("connect and echo, p50"), got, explicit, "µs").atMost(1))
	for _, w := range ways {
		got := b.throughput(sides, load, w)
		b.add(b.compare("sockets", name(w.name), got, explicit, "Gbit/s").atLeast(1))
	}
	p.Kill() // another mitmdump parses the requests
	p = launchAddon(n)
	n.WaitListening(p, testbed.ProxyAddress)
	got = b.takeTurns(sides, load.rounds, "requests", func(s side) (float64, error) {
		return rate(b, s.proxy, time.Second, s.from), nil
	})
	b.add(b.compare("sockets", name("HTTP requests"), got, explicit, "/s"))
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
	launchAddon(n, unrecorded)
	start := time.Now()
	c.run(all, "served", func() bool { return c.in[served]+c.in[lost] == all })
	b.add(measured("sockets", "sockets: connections that mitmdump serves then", float64(c.in[served]), "").
		atLeast(float64(all)).
		beside("time from the start of mitmdump", time.Since(start).Seconds(), "s"))
	c.close()
}

// sharedSockets compares two processes of mitmdump that share the sockets of a pod with one process, and with two that
// share nothing: each on a node of its own. They parse every request.
func sharedSockets(b *bench, version string) {
	period, rounds := 2*time.Second, 7
	if b.short {
		period, rounds = time.Second, 3
	}
	var nodes []*testbed.Node
	var daemons []*testbed.Daemon
	var pods []*testbed.Host
	for range 2 {
		n := newSocketsNode(b)
		n.MitmproxyVersion = version
		nodes, daemons = append(nodes, n), append(daemons, n.StartDaemon())
		pods = append(pods, n.AddPod("captured").Host)
		launchAddon(n)
		taken(b, daemons[len(daemons)-1], 1, 1)
	}
	none := netip.AddrPort{}
	rate(b, none, period, pods...) // warm-up
	var one, shared, apart []float64
	for range rounds {
		one = append(one, rate(b, none, period, pods[0]))
		apart = append(apart, rate(b, none, period, pods...))
		second := launchAddon(nodes[0], "--listen-port", "18081")
		taken(b, daemons[0], 2, 1)
		rate(b, none, period, pods[0])
		shared = append(shared, rate(b, none, period, pods[0]))
		second.Kill()
		taken(b, daemons[0], 1, 1)
	}
	const what = "requests of two processes that share, relative to two that do not"
	name := fmt.Sprintf("sockets, mitmdump %s: %s", version, what)
	b.add(ratio("sockets", name, shared, apart).atLeast(0.95).
		beside("sharing", median(shared), "/s").beside("apart", median(apart), "/s").beside("one", median(one), "/s"))
}

// rate measures for a duration the number of HTTP requests per second. 16 clients in the netns of pods send requests at
// a time, each on a new connection, through a proxy if it is valid.
func rate(b *bench, proxy netip.AddrPort, d time.Duration, pods ...*testbed.Host) float64 {
	var count atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for i := range 16 {
		wg.Go(func() {
			err := pods[i%len(pods)].Do(func() error {
				for time.Now().Before(end) {
					c, err := dial(proxy, web)
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
