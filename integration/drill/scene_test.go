package drill

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// drillScene is a node under load.
type drillScene struct {
	t      *testing.T
	size   drillSize
	random *rand.Rand // only for the goroutine of the test
	n      *testbed.Node
	d      *testbed.Daemon
	proxy  *testbed.Program
	launch func() *testbed.Program
	pods   []*testbed.Pod
	// witnesses is the number of veths that newPod has made.
	witnesses int

	happened int
	over     time.Time     // the end of the last disaster
	recovery time.Duration // the longest

	// atStake counts the connections and streams that a killed daemon or proxy may have had: no others may be reset.
	atStake int

	begun, finished                    atomic.Int64 // connections and streams of the load
	made, refused, reset, wrong, other atomic.Int64
	ended                              atomic.Int64 // without a reset, before the echo was complete
	streamsReset                       atomic.Int64
	longest                            atomic.Int64 // ns, from connect to the echo
}

func newDrillScene(t *testing.T, protocol string, size drillSize, random *rand.Rand, dr drill) *drillScene {
	s := &drillScene{t: t, size: size, random: random}
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
	if protocol == "sockets" {
		s.launch = func() *testbed.Program { return testbed.LaunchAddon(s.n, "--set", "ignore_hosts=.*", "--quiet") }
		if *long { // mitmdump can serve a tenth of the load
			s.launch = func() *testbed.Program {
				return testbed.StartConnectProxy(s.n, "-quiet", "-sockets", s.n.ProxySocket())
			}
		}
	} else {
		s.launch = func() *testbed.Program { return testbed.StartConnectProxy(s.n, "-quiet") }
	}
	// Without it the proxy would run out of ports in less than a minute.
	s.n.Exec("sysctl", "-qw", "net.ipv4.tcp_tw_reuse=1")
	s.n.LogLevel = "INFO"
	s.n.Config["metricsAddress"] = "127.0.0.1:15090"
	testbed.ServeEcho(s.n)
	if dr.prepare != nil {
		dr.prepare(s)
	}
	s.proxy = s.launch()
	s.start()
	testbed.Eventually(t, "the daemon has installed itself", func() bool { return s.d.Status().NotReady == "" })
	for i := range 4 { // one address has ports for some 28,000 connections in TIME_WAIT
		s.pods = append(s.pods, s.addPod("pod"+strconv.Itoa(i)))
	}
	return s
}

// pause sleeps for a random time.
func (s *drillScene) pause() {
	time.Sleep(s.size.pause/2 + time.Duration(s.random.Int64N(int64(s.size.pause))))
}

// lasts lets a disaster go on for a random time, and then it is over.
func (s *drillScene) lasts() { s.pause(); s.over = time.Now() }

// kill kills programs, and counts the connections that may be lost: those that have begun when the last program is
// dead, without those that had ended before.
func (s *drillScene) kill(programs ...*testbed.Program) {
	ended := s.finished.Load()
	for _, p := range programs {
		p.Kill()
	}
	s.atStake += int(s.begun.Load() - ended)
}

func (s *drillScene) start() { s.d = s.n.StartDaemon() }

func (s *drillScene) succeed() { s.d = s.n.HandOver(s.d) }

func (s *drillScene) ready() bool { return s.d.Status().Upstream.Ready }

// recovered waits until the upstream is ready and a new connection of every pod has been answered over both families.
// The time to recover is from the end of the disaster until then.
func (s *drillScene) recovered() {
	testbed.Eventually(s.t, "the upstream is there again", s.ready)
	var hosts []*testbed.Host
	for _, p := range s.pods {
		hosts = append(hosts, p.Host)
	}
	outcome := testbed.Echoes(s.t, 2, 100, hosts...)
	for range 2 * len(hosts) {
		s.count(<-outcome)
	}
	s.recovery = max(s.recovery, time.Since(s.over))
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

// removePod removes a pod as a runtime does.
func (s *drillScene) removePod(p *testbed.Pod) {
	s.t.Helper()
	if err := p.Del(); err != nil {
		s.t.Errorf("DEL %s: %v", p, testbed.Describe(err))
	}
	p.Delete()
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

// drillState is the resources that a daemon may leak.
type drillState struct {
	descriptors, goroutines int
	rss                     float64 // MiB
}

func (s *drillScene) state() drillState {
	s.t.Helper()
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
	var state drillState
	testbed.Eventually(s.t, "the metrics are served", func() bool { // a daemon that took over waits for their port
		text, err := testbed.Get(testbed.Context(s.t), c, "http://127.0.0.1:15090/metrics")
		state = drillState{
			int(value(text, "process_open_fds")), int(value(text, "go_goroutines")),
			value(text, "process_resident_memory_bytes") / (1 << 20),
		}
		return err == nil && state.goroutines > 0
	})
	return state
}
