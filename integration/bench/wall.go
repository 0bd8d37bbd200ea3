package main

import (
	"context"
	"net/netip"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

const (
	// The world has a second address, which is excluded.
	excludedAddress = "198.51.100.20:7"
	inboundPort     = 7000
)

// benchWall compares a captured pod with itself while it has no wall: two pods differ by more than the wall costs.
func benchWall(b *bench) {
	load := relayLoad{rounds: 200, bytes: 128 << 20, echoes: 50}
	if b.short {
		load = relayLoad{rounds: 10, bytes: 64 << 20, echoes: 50}
	}
	n := newSocketsNode(b)
	excluded := netip.MustParseAddrPort(excludedAddress)
	n.World.IP("addr", "add", excluded.Addr().String()+"/24", "dev", "eth0")
	n.World.Serve(excludedAddress, serve)
	n.Config["capture"] = map[string]any{"source": "all", "excludeCIDRs": []string{excluded.Addr().String() + "/32"}}
	d := n.StartDaemon()
	// It accepts in the pod's netns, and needs no daemon to go on.
	p := testbed.Launch(n.Host, filepath.Join(b.bin, "connectproxy"), "-quiet", "-sockets", n.ProxySocket())
	n.WaitListening(p, testbed.ProxyAddress)
	pod := n.AddPod("captured")
	taken(b, d, 1, 1)
	pod.Serve(netip.AddrPortFrom(netip.MustParseAddr(pod.IPv4), inboundPort).String(), serve)
	d.Freeze() // it would restore the wall
	inbound := netip.AddrPortFrom(netip.MustParseAddr(pod.IPv4), inboundPort)
	w := &wall{b: b, pod: pod, installed: b.installed(n, pod), standing: true}
	captured, let, reached := w.sides(pod.Host, server), w.sides(pod.Host, excluded), w.sides(n.World, inbound)
	b.add(w.compare("captured connect and echo, p50", b.latency(captured, load), "µs").atMost(1.03))
	b.add(w.compare("excluded connect and echo, p50", b.latency(let, load), "µs").atMost(1.03))
	download, upload := ways[0], ways[1]
	for _, c := range []struct {
		name  string
		sides []side
		way   way
	}{
		{"captured download", captured, download}, {"captured upload", captured, upload},
		{"excluded download", let, download}, {"excluded upload", let, upload},
		{"inbound download", reached, download},
	} {
		b.add(w.compare(c.name, b.throughput(c.sides, load, c.way), "Gbit/s").atLeast(0.97))
	}
	d.Signal(syscall.SIGCONT) // the pod's DEL asks it
}

// installed returns the ruleset of a captured pod. It fails unless that has the whole wall.
func (b *bench) installed(n *testbed.Node, pod *testbed.Pod) ruleset.Installed {
	for _, r := range n.Records() {
		if r.ContainerID == pod.ID && r.Installed != nil && r.Installed.Wall == ruleset.WallFull {
			return *r.Installed
		}
	}
	b.tb.Fatalf("%s has no wall, or a part of it: the kernel lacks nftables or its egress hook", pod)
	return ruleset.Installed{}
}

// wall is the wall of a pod, which can be taken away. The rules of nat stay as they are.
type wall struct {
	b         *bench
	pod       *testbed.Pod
	installed ruleset.Installed
	standing  bool
}

// The indices of the sides with and without the wall.
const (
	walled = iota
	unwalled
)

func (w *wall) sides(from *testbed.Host, to netip.AddrPort) []side {
	return []side{
		{name: "with the wall", from: from, to: to, ready: w.raise},
		{name: "without the wall", from: from, to: to, ready: w.lower},
	}
}

func (w *wall) lower() {
	if !w.standing {
		return
	}
	for _, t := range []string{"netdev sluice-wall", "inet sluice-wall", "inet sluice-refuse"} {
		w.pod.Exec("nft", "delete table "+t)
	}
	w.changed(false)
}

// raise restores the wall as the daemon restores it.
func (w *wall) raise() {
	if w.standing {
		return
	}
	in := &w.installed
	_, err := ruleset.Apply(context.Background(), w.pod.Path(), in.Ruleset, in.Backend, in)
	w.b.tb.must(err, "restoring the wall")
	w.changed(true)
}

// changed keeps the cost of the change out of the measurement that follows.
func (w *wall) changed(standing bool) {
	w.standing = standing
	runtime.GC()
	time.Sleep(20 * time.Millisecond) // the kernel frees the old rules
}

func (w *wall) compare(name string, got [][]float64, unit string) result {
	return ratio("wall", "wall: "+name+", relative to none", got[walled], got[unwalled]).
		beside("wall", median(got[walled]), unit).beside("none", median(got[unwalled]), unit)
}
