package drill

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// drillScene is a node under load.
type drillScene struct {
	load
	t        *testing.T
	size     drillSize
	random   *rand.Rand // only for the goroutine of the test
	protocol string     // of the upstream
	n        *testbed.Node
	d        *testbed.Daemon
	retired  []*testbed.Program // daemons before d
	proxy    *testbed.Program
	launch   func() *testbed.Program
	pods     []*testbed.Pod
	hostile  *testbed.Pod // has no part in the load
	// witnesses is the number of veths that newPod has made.
	witnesses int

	// These belong to single faults.
	impostor        *impostor
	stopped         *testbed.Program // the daemon that is stopped
	churned         []*testbed.Pod
	stopChurn       func()
	stopAttack      func()
	moreDescriptors func()

	over     time.Time     // the end of the last fault
	recovery time.Duration // the longest
}

const metricsAddress = "127.0.0.1:15090"

func newDrillScene(t *testing.T, protocol string, size drillSize, random *rand.Rand, faults []fault) *drillScene {
	t.Helper()
	s := &drillScene{t: t, size: size, random: random, protocol: protocol}
	s.began = time.Now()
	if *long { // drill the binaries that people run
		binaries, err := testbed.BuildReleased()
		if err != nil {
			t.Fatal(err)
		}
		s.n = testbed.NewNode(t, binaries)
	} else {
		s.n = testbed.New(t)
	}
	s.n.SetProtocol(protocol)
	s.launch = s.launchConnectProxy
	if protocol == "sockets" && !*long { // mitmdump can serve a tenth of the long load
		s.launch = func() *testbed.Program { return testbed.LaunchAddon(s.n, "--set", "ignore_hosts=.*", "--quiet") }
	}
	// Without it the proxy would run out of ports in less than a minute. A proxy that connects to a dead destination
	// should not do so for minutes after the drill.
	s.n.Exec("sysctl", "-qw", "net.ipv4.tcp_tw_reuse=1", "net.ipv4.tcp_syn_retries=2")
	s.n.World.Exec("iptables", "-A", "INPUT", "-p", "tcp", "--dport", deadPort, "-j", "DROP")
	s.n.LogLevel = "INFO"
	s.n.Config["metricsAddress"] = metricsAddress
	testbed.ServeEcho(s.n)
	for _, f := range faults {
		if f.prepare != nil {
			f.prepare(s)
		}
	}
	s.launchProxy()
	s.start()
	testbed.Eventually(t, "the daemon and its upstream are ready", s.ready)
	for i := range 4 { // one address has ports for some 28,000 connections in TIME_WAIT
		s.pods = append(s.pods, s.addPod("pod"+strconv.Itoa(i)))
	}
	s.hostile = s.addPod("hostile")
	return s
}

// launchConnectProxy starts a proxy that serves all protocols.
func (s *drillScene) launchConnectProxy() *testbed.Program {
	return testbed.StartConnectProxy(s.n, "-quiet", "-sockets", s.n.ProxySocket())
}

func (s *drillScene) launchProxy() { s.proxy = s.launch() }

// pause sleeps for a random time.
func (s *drillScene) pause() {
	time.Sleep(s.size.pause/2 + time.Duration(s.random.Int64N(int64(s.size.pause))))
}

// ofDaemon is the harm that the end of the daemon does.
func (s *drillScene) ofDaemon() loss {
	if s.protocol == "sockets" {
		return nothing
	}
	return resets
}

func (s *drillScene) killDaemon() { s.endDaemon(s.d.Kill) }

// endDaemon ends the daemon. A child that it has just forked may have its listeners until it runs its own program.
func (s *drillScene) endDaemon(end func()) {
	s.losing(s.ofDaemon(), func() {
		end()
		s.waitForNoListener()
	})
}

// waitForNoListener waits until no process of the daemon's program listens. Proxies may: they keep the listeners that
// they have for some seconds after the protocol has changed.
func (s *drillScene) waitForNoListener() {
	for _, p := range s.pods {
		testbed.Eventually(s.t, "the listeners of the daemon are gone", func() bool {
			return !strings.Contains(p.Exec("ss", "-Hlntp", "sport = :15001"), `"sluiced"`)
		})
	}
}

func (s *drillScene) killProxy() { s.losing(ends, s.proxy.Kill) }

func (s *drillScene) start() { s.d = s.n.StartDaemon() }

func (s *drillScene) succeed() {
	s.retired = append(s.retired, s.d.Program)
	s.d = s.n.HandOver(s.d)
}

// ready tells whether the daemon is installed and its upstream there.
func (s *drillScene) ready() bool {
	status := s.d.Status()
	return status.Upstream.Ready && status.NotReady == ""
}

// happen lets a fault happen, and returns when the node has recovered.
func (s *drillScene) happen(f fault) {
	s.struck.Store(true)
	f.strike(s)
	if f.undo != nil {
		s.pause()
		f.undo(s)
	}
	s.over = time.Now()
	s.recovered()
	s.struck.Store(false)
}

// recovered waits until the upstream is ready and a new connection of every pod has been answered over both families.
// The time to recover is from the end of the fault until then.
func (s *drillScene) recovered() {
	testbed.Eventually(s.t, "the daemon and its upstream are ready", s.ready)
	s.echoes()
	s.recovery = max(s.recovery, time.Since(s.over))
}

// echoes connects from every pod over both families.
func (s *drillScene) echoes() {
	began := s.now()
	ctx, cancel := testbed.Minute()
	defer cancel()
	testbed.ForEach(s.t, 2*len(s.pods), func(i int) error {
		s.count(testbed.Echo(ctx, s.pods[i/2].Host, testbed.EchoAddresses[i%2], testbed.RandomBytes(100)), began)
		return nil
	})
}

// addPod adds a pod, and a veth that ends in it, as a witness: the kernel removes the end on the node when the netns is
// really gone, and not while a process holds a socket or a descriptor of it.
func (s *drillScene) addPod(name string) *testbed.Pod {
	s.t.Helper()
	p := s.newPod(name)
	if err := p.Add(); err != nil {
		s.t.Fatalf("ADD %s: %v", name, testbed.Describe(err))
	}
	return p
}

// newPod is addPod without ADD.
func (s *drillScene) newPod(name string) *testbed.Pod {
	p := s.n.NewPod(name)
	s.witnesses++ // the kernel takes its time to remove one, so a pod of the same name needs another
	link := witness + strconv.Itoa(s.witnesses)
	s.n.IP("link", "add", link, "type", "veth", "peer", "name", "witness", "netns", p.Host.Name)
	return p
}

const witness = "witness-"

// removePod removes a pod as a runtime does. Nothing is left in its netns.
func (s *drillScene) removePod(p *testbed.Pod) {
	s.t.Helper()
	if err := p.Del(); err != nil {
		s.t.Errorf("DEL %s: %v", p, testbed.Describe(err))
	}
	s.waitForNoTraces(p)
	p.Delete()
}

// waitForNoTraces waits until nothing is left of a pod that was deleted. Proxies that hold its listeners close them a
// moment later.
func (s *drillScene) waitForNoTraces(p *testbed.Pod) {
	s.t.Helper()
	testbed.Eventually(s.t, "no listener is left in "+p.String(), func() bool { return len(p.Queues()) == 0 })
	testbed.WantNoTraces(s.t, s.n, p.Host)
}

// leakedNetns waits until the netns of all pods are gone, and returns how many are left.
func (s *drillScene) leakedNetns() (left int) {
	s.t.Helper()
	// The kernel removes netns one after the other, in its own time: with busy processors it was seen to take minutes.
	testbed.Within(s.t, 10*time.Minute, "the netns of every pod is gone", func() bool {
		left = strings.Count(s.n.Exec("ip", "-br", "link", "show", "type", "veth"), witness)
		return left == 0
	})
	return left
}

// remains is everything that the daemon and the plugin may leave behind, with the same pods.
type remains struct {
	descriptors, goroutines int
	rss                     float64 // MiB
	files                   []string
	rules                   string // of the node and of the pods
}

func (s *drillScene) remains() remains {
	s.t.Helper()
	var r remains
	c := s.n.HTTPClient()
	value := func(text, name string) float64 {
		for line := range strings.Lines(text) {
			if v, ok := strings.CutPrefix(line, name+" "); ok {
				f, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
				if err == nil {
					return f
				}
			}
		}
		return 0
	}
	testbed.Eventually(s.t, "the metrics are served", func() bool { // a daemon that took over waits for their port
		ctx, cancel := testbed.Minute()
		defer cancel()
		text, err := testbed.Get(ctx, c, "http://"+metricsAddress+"/metrics")
		r.descriptors, r.goroutines = int(value(text, "process_open_fds")), int(value(text, "go_goroutines"))
		r.rss = value(text, "process_resident_memory_bytes") / (1 << 20)
		return err == nil && r.goroutines > 0
	})
	err := filepath.WalkDir(s.n.Dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			r.files = append(r.files, path)
		}
		return err
	})
	if err != nil {
		s.t.Fatalf("listing the files of the node: %v", err)
	}
	r.rules = s.n.Rules()
	for _, p := range append(slices.Clone(s.pods), s.hostile) {
		r.rules += p.String() + "\n" + p.Rules()
	}
	return r
}

// beyond is what r has and before has not. A few descriptors and goroutines come and go.
func (r remains) beyond(before remains) []string {
	const few = 5
	left := minus(r.files, before.files)
	if r.descriptors > before.descriptors+few {
		left = append(left, fmt.Sprintf("descriptors: %d, were %d", r.descriptors, before.descriptors))
	}
	if r.goroutines > before.goroutines+few {
		left = append(left, fmt.Sprintf("goroutines: %d, were %d", r.goroutines, before.goroutines))
	}
	return left
}

// minus is a without the elements of b.
func minus(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(s string) bool { return slices.Contains(b, s) })
}

// isUnpublished tells whether a file is the socket of a daemon that was killed before it served the socket.
func isUnpublished(file string) bool {
	info, err := os.Lstat(file)
	return err == nil && info.Mode().Type() == os.ModeSocket && strings.HasPrefix(filepath.Base(file), ".")
}
