package escape

import (
	"flag"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

var (
	seed     = flag.Uint64("escape.seed", 1, "the seed of everything random")
	only     = flag.Uint64("escape.step", 0, "repeat this step of the seed and no other, after the same settings")
	count    = flag.Int("escape.packets", 1_000_000, "the packets to send, over all flavours")
	duration = flag.Duration("escape.duration", 0, "send for this time instead")
	every    = flag.Bool("escape.every", false, "change the rules of every flavour and of more settings")
)

// stepSize is the number of packets that are sent in a step at least.
const stepSize = 4000

// TestNothingEscapes sends random packets out of a captured pod by every way that there is, and compares the frames
// that leave with the model. A failure names the seed and the step, which repeat it:
//
//	go test -run 'TestNothingEscapes/nftables' ./integration/escape -args -escape.seed=1 -escape.step=2
func TestNothingEscapes(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			newAttack(t, f).run()
		})
	}
}

// attack is one run.
type attack struct {
	*scene
	proxy  *testbed.Program
	daemon *testbed.Daemon
	frozen []*testbed.Program
	ways   []way
	outer  way // from outside, to the pod
	pool   pool
	sent   atomic.Int64
}

func newAttack(t *testing.T, f testbed.Flavour) *attack {
	t.Helper()
	a := &attack{scene: newScene(t, f)}
	// Steps of the same seed begin with the same settings.
	a.current = randomSettings(a.random(0, 0))
	a.proxy, a.daemon = testbed.StartConnectProxy(a.n), a.n.StartDaemon()
	a.furnish(f.AddPod(t, a.n, "captured", a.n.Annotated(a.current.annotations())))
	a.ways = append(a.ways, openWays(t, a.pod.Host, "pod: ", ways)...)
	a.ways = append(a.ways, openWays(t, a.pod.Host, "pod: ", bridgeWays)...)
	a.ways = append(a.ways, openWays(t, a.nested, "nested: ", ways)...)
	a.outer = openWays(t, a.n.Host, "node: ", []wayConfig{{name: "packet", kind: frames, device: "lo"}})[0]
	a.outer.index, _ = link(t, a.pod.Host, "eth0")
	t.Cleanup(a.pool.close)
	return a
}

// random is the generator of one worker in one step.
func (a *attack) random(step, worker uint64) *rand.Rand {
	return rand.New(rand.NewPCG(*seed, step<<8|worker))
}

func (a *attack) run() {
	a.t.Logf("seed %d, settings %s", *seed, a.current)
	a.wantAlive()
	first, deadline := uint64(1), time.Now().Add(*duration)
	if *only != 0 {
		first = *only
	}
	quota := int64(*count / len(testbed.Flavours))
	more := func() bool {
		if *duration > 0 {
			return time.Now().Before(deadline)
		}
		return a.sent.Load() < quota
	}
	for step := first; !a.t.Failed() && (step == first || *only == 0 && more()); step++ {
		a.step(step)
		if step%25 == 0 {
			a.wantAlive()
		}
	}
	if !a.t.Failed() {
		a.wantAlive()
	}
	a.tap.mu.Lock()
	defer a.tap.mu.Unlock()
	a.t.Logf("sent %d packets; of these and of ordinary traffic left: %v", a.sent.Load(), a.tap.left)
}

// step sends packets while the programs, the rules or conntrack's entries change.
func (a *attack) step(step uint64) {
	a.t.Helper()
	var wg sync.WaitGroup
	var changed atomic.Bool
	const workers = 2
	for w := range uint64(workers) {
		wg.Go(func() {
			r := a.random(step, w+1)
			m := a.maker(r)
			for i := 0; i < stepSize/workers || !changed.Load() && i < 40*stepSize; i++ {
				a.send(m)
			}
		})
	}
	r := a.random(step, 0)
	a.pool.act(r, a)
	what := a.change(r)
	changed.Store(true)
	wg.Wait()
	a.settle(step)
	a.tap.change(a.current)
	for _, b := range a.tap.breaches() {
		a.t.Errorf("seed %d, step %d (%s), %s, settings %s: %s", *seed, step, what, a.flavour.Name, a.current, b)
	}
	if lost, err := a.tap.lost(); err != nil || lost > 0 {
		a.t.Errorf("step %d: the tap has lost %d frames, %v", step, lost, err)
	}
}

// settle waits until the tap has seen all frames that were sent before.
func (a *attack) settle(step uint64) {
	a.t.Helper()
	if !a.tap.settle(a.ways[0], a.macs, step, time.Minute) {
		a.t.Fatalf("step %d: the tap does not see a marker", step)
	}
}

// change changes one thing, or nothing.
func (a *attack) change(r *rand.Rand) string {
	a.t.Helper()
	a.thaw()
	switch r.IntN(12) {
	case 0:
		if a.daemon.Ended() {
			a.daemon = a.n.StartDaemon()
			return "daemon started"
		}
		a.daemon.Kill()
		return "daemon killed"
	case 1:
		if a.proxy.Ended() {
			a.proxy = testbed.StartConnectProxy(a.n)
			return "proxy started"
		}
		a.proxy.Kill()
		return "proxy killed"
	case 2:
		for _, p := range []*testbed.Program{a.daemon.Program, a.proxy} {
			if !p.Ended() && r.IntN(2) == 0 {
				p.Freeze()
				a.frozen = append(a.frozen, p)
			}
		}
		return "programs stopped"
	case 3, 4, 5:
		if a.daemon.Ended() {
			return "no change"
		}
		next := randomSettings(r)
		a.tap.change(a.current, next)
		if err := a.replace(next); err != nil {
			a.t.Fatalf("replacing the rules: %s", testbed.Describe(err))
		}
		a.current = next
		return "rules replaced"
	case 6, 7:
		a.forget(nil)
		return "conntrack flushed"
	case 8, 9:
		a.forget(some{r})
		return "conntrack entries deleted"
	default:
		return "no change"
	}
}

func (a *attack) thaw() {
	for _, p := range a.frozen {
		p.Signal(unix.SIGCONT)
	}
	a.frozen = nil
}

// some matches one entry of conntrack in three.
type some struct{ *rand.Rand }

func (s some) MatchConntrackFlow(*netlink.ConntrackFlow) bool { return s.IntN(3) == 0 }

// forget deletes entries of conntrack in the pod, all of them without a filter.
func (a *attack) forget(filter netlink.CustomConntrackFilter) {
	a.t.Helper()
	err := a.pod.Do(func() error {
		if filter == nil {
			return netlink.ConntrackTableFlush(netlink.ConntrackTable)
		}
		for _, f := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			// An entry that has ended meanwhile is an error of the library, and of no matter here.
			_, _ = netlink.ConntrackDeleteFilters(netlink.ConntrackTable, f, filter)
		}
		return nil
	})
	if err != nil {
		a.t.Fatalf("conntrack: %v", err)
	}
}

// wantAlive fails the test unless allowed traffic passes and captured traffic is served.
func (a *attack) wantAlive() {
	a.t.Helper()
	a.thaw()
	if a.daemon.Ended() {
		a.daemon = a.n.StartDaemon()
	}
	if a.proxy.Ended() {
		a.proxy = testbed.StartConnectProxy(a.n)
	}
	probes := append(a.passing(), a.inbound()...)
	for _, f := range a.families() {
		probes = append(probes,
			reads("captured "+f.name, a.pod.Host, at(f.world, webPort), f.gateway),
			reads("captured, nested "+f.name, a.nested, at(f.world, webPort), f.gateway),
		)
	}
	m := model{settings: []settings{a.current}}
	quic := packet{proto: unix.IPPROTO_UDP, dst: netip.MustParseAddrPort(testbed.WorldIPv4 + ":443"), hasPorts: true}
	if !m.mayLeave(quic) {
		probes = append(probes, a.quic()...)
	}
	for name, err := range check(time.Minute, probes) {
		a.t.Errorf("%s: %v; seed %d, settings %s", name, err, *seed, a.current)
	}
	for name, frame := range plainFrames(a.scene) {
		before := a.tap.seen(frame)
		a.ways[0].mark(0)
		a.ways[0].send(frame, unix.ETH_P_ALL)
		testbed.Eventually(a.t, name+" leaves the pod", func() bool { return a.tap.seen(frame) > before })
	}
}

// maker makes a generator of packets that fit the scene.
func (a *attack) maker(r *rand.Rand) *maker {
	m := &maker{Rand: r, macs: a.macs, sources: map[bool][]netip.Addr{}, destinations: map[bool][]netip.Addr{}}
	m.ports = []uint16{webPort, webPort, 443, freePort, podPort, 15001, 15006, 22, 40000, 40001, 20000, 20001, 20002}
	add := func(pool map[bool][]netip.Addr, all ...string) {
		for _, s := range all {
			ip := netip.MustParseAddr(s)
			pool[ip.Is6()] = append(pool[ip.Is6()], ip)
		}
	}
	for _, f := range a.families() {
		add(m.sources, f.pod, f.pod, f.pod, f.nested, f.bridge, f.world)
		add(m.destinations, f.world, f.world, f.world, f.other, f.excluded, f.gateway, f.pod, f.nested, f.bridge)
	}
	add(m.destinations, "10.88.0.1", "fd00:88::1", "169.254.169.254", "127.0.0.1", "224.0.0.1", "255.255.255.255",
		"::1", "ff02::1", "fe80::1", "10.88.255.255")
	add(m.sources, "127.0.0.1", "::1", "0.0.0.0", "::")
	return m
}

// send sends the fragments of one random packet by a random way.
func (a *attack) send(m *maker) {
	v6 := m.chance(2)
	w := pick(m, a.ways...)
	outer := m.chance(24)
	if outer {
		w = a.outer
		fromOutside := *m
		fromOutside.sources, fromOutside.destinations = m.destinations, m.sources
		m = &fromOutside
		m.ports = []uint16{40000, 40001, podPort, 22, 20000}
		m.macs = [][]byte{a.macs[1], a.macs[0]}
	}
	if m.chance(16) && !outer {
		w.mark(pick(m, marks...))
	}
	switch w.kind {
	case packetsIPv4:
		v6 = false
	case packetsIPv6:
		v6 = true
	}
	etherType := uint16(unix.ETH_P_IP)
	if v6 {
		etherType = unix.ETH_P_IPV6
	}
	if m.chance(8) {
		etherType = pick(m, unix.ETH_P_ALL, unix.ETH_P_ARP, unix.ETH_P_8021Q, uint16(m.Uint32()))
	}
	for _, p := range m.ip(v6) {
		if w.kind == frames {
			p = m.frame(v6, p)
		}
		if w.name == "pod: packet on lo" && len(p) > 12 { // its address; frames to another are for another host
			copy(p, make([]byte, 12))
		}
		w.send(p, etherType)
		a.sent.Add(1)
	}
	runtime.KeepAlive(m)
}

// pool are connections of ordinary sockets, in all states.
type pool struct{ fds []int }

// poolSize bounds the connections that are open.
const poolSize = 64

func (p *pool) close() {
	for _, fd := range p.fds {
		_ = unix.Close(fd) // nothing was written that matters
	}
}

// act does something with every connection, and opens new ones.
func (p *pool) act(r *rand.Rand, a *attack) {
	var kept []int
	for _, fd := range p.fds {
		switch r.IntN(12) {
		case 0:
			_ = unix.Shutdown(fd, unix.SHUT_WR)
		case 1:
			_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // a reset
			_ = unix.Close(fd)
			continue
		case 2:
			_ = unix.Close(fd)
			continue
		case 3, 4, 5, 6:
			_ = unix.Sendto(fd, []byte("data"), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
		case 7:
			_, _, _ = unix.Recvfrom(fd, make([]byte, 100), unix.MSG_DONTWAIT)
		}
		kept = append(kept, fd)
	}
	p.fds = kept
	for range 8 {
		if len(p.fds) >= poolSize {
			_ = unix.Close(p.fds[0])
			p.fds = p.fds[1:]
		}
		if fd, err := dial(r, a); err == nil {
			p.fds = append(p.fds, fd)
		}
	}
}

// dial begins a connection of an ordinary socket, from the pod, a nested container or the world.
func dial(r *rand.Rand, a *attack) (fd int, err error) {
	f := a.families()[r.IntN(2)]
	to := []string{f.world, f.world, f.other, f.excluded, f.gateway, f.nested}[r.IntN(6)]
	port := []int{webPort, webPort, 443, freePort, 22}[r.IntN(5)]
	from := []*testbed.Host{a.pod.Host, a.pod.Host, a.nested, a.n.World}[r.IntN(4)]
	if from == a.n.World {
		to, port = f.pod, podPort
	}
	source := []string{"", "", f.pod, "20000"}[r.IntN(4)]
	err = from.Do(func() error {
		kind := unix.SOCK_STREAM
		if r.IntN(6) == 0 {
			kind = unix.SOCK_DGRAM
		}
		family, address := sockaddr(to, port)
		var err error
		if fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		// A socket that cannot be had in one way is had in another.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(marks[r.IntN(len(marks))]))
		if r.IntN(3) == 0 {
			_ = unix.BindToDevice(fd, "eth0")
		}
		if number, err := strconv.Atoi(source); err == nil {
			unspecified := "0.0.0.0"
			if family == unix.AF_INET6 {
				unspecified = "::"
			}
			_, bound := sockaddr(unspecified, number+r.IntN(3))
			_ = unix.Bind(fd, bound)
		} else if source != "" && from == a.pod.Host {
			_, bound := sockaddr(source, 0)
			_ = unix.Bind(fd, bound)
		}
		_ = unix.Connect(fd, address) // in progress
		return nil
	})
	return fd, err
}

func sockaddr(ip string, port int) (family int, s unix.Sockaddr) {
	a := netip.MustParseAddr(ip)
	if a.Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Addr: a.As4(), Port: port}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Addr: a.As16(), Port: port}
}
