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
	random *rand.Rand // for the one goroutine that has things happen
	n      *testbed.Node
	d      *testbed.Daemon
	proxy  *testbed.Program
	launch func() *testbed.Program
	pods   []*testbed.Pod

	happened int
	over     time.Time     // when the last that happened was over
	recovery time.Duration // the longest

	// atStake are the connections, and streams, that the daemon or the proxy had when it was killed: no others may be reset.
	atStake int

	made, refused, reset, wrong, other atomic.Int64
	ended                              atomic.Int64 // as if the server had no more to say
	streamsReset                       atomic.Int64
	longest                            atomic.Int64 // ns, from connect to the echo
}

func newDrillScene(t *testing.T, protocol string, size drillSize, random *rand.Rand, prepare func(*drillScene)) *drillScene {
	s := &drillScene{t: t, size: size, random: random}
	binaries := testbed.Binaries(t)
	if *long { // drill the binaries that people run
		var err error
		if binaries, err = testbed.BuildReleased(); err != nil {
			t.Fatal(err)
		}
	}
	s.n = testbed.NewNode(t, binaries)
	s.n.SetProtocol(protocol)
	if protocol == "sockets" {
		s.launch = func() *testbed.Program { return s.n.LaunchAddon("--set", "ignore_hosts=.*", "--quiet") }
		if *long { // mitmdump bears a tenth of the load
			s.launch = func() *testbed.Program { return s.n.StartConnectProxy("-quiet", "-sockets", s.n.ProxySocket()) }
		}
	} else {
		s.launch = func() *testbed.Program { return s.n.StartConnectProxy("-quiet") }
	}
	s.n.Exec("sysctl", "-qw", "net.ipv4.tcp_tw_reuse=1") // the proxy has ports for less than a minute of this otherwise
	s.n.LogLevel = "INFO"
	s.n.Config["metricsAddress"] = "127.0.0.1:15090"
	s.n.ServeEcho()
	if prepare != nil {
		prepare(s)
	}
	s.proxy = s.launch()
	s.start()
	testbed.Eventually(t, "the daemon is ready", func() bool { return s.d.Status().NotReady == "" }) // it has installed itself
	for i := range 4 {                                                                               // an address has ports for some 28,000 connections that have ended
		s.pods = append(s.pods, s.addPod("pod"+strconv.Itoa(i)))
	}
	return s
}

// pause is as long as chance has it.
func (s *drillScene) pause() {
	time.Sleep(s.size.pause/2 + time.Duration(s.random.Int64N(int64(s.size.pause))))
}

// lasts is while something goes on that is over then.
func (s *drillScene) lasts() { s.pause(); s.over = time.Now() }

// stake notes what there is to lose, with what comes in the time that it takes to ask.
func (s *drillScene) stake() {
	s.atStake += s.size.rate/4 + 4
	for _, p := range s.pods {
		a := s.d.Of(p)
		s.atStake += a.Open + a.Waiting
	}
}

func (s *drillScene) start() { s.d = s.n.StartDaemon() }

func (s *drillScene) succeed() { s.d = s.n.HandOver(s.d) }

func (s *drillScene) ready() bool { return s.d.Status().Upstream.Ready }

// recovered waits until the upstream is ready and a new connection of every pod, over both families, has been answered:
// the time to recover is how long that takes from when what happened was over.
func (s *drillScene) recovered() {
	testbed.Eventually(s.t, "the upstream is there again", s.ready)
	var hosts []*testbed.Host
	for _, p := range s.pods {
		hosts = append(hosts, p.Host)
	}
	outcome := testbed.Echoes(testbed.Context(s.t), 2, testbed.RandomBytes(100), hosts...)
	for range 2 * len(hosts) {
		s.count(<-outcome)
	}
	s.recovery = max(s.recovery, time.Since(s.over))
}

// addPod adds a pod, and a veth that ends in it: the kernel takes away the end on the node when the netns is really
// gone, whoever deletes it, and not while somebody holds a socket or a descriptor of it.
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
	s.n.IP("link", "add", witness+name, "type", "veth", "peer", "name", "witness", "netns", p.Host.Name)
	return p
}

const witness = "witness-"

// removePod ends a pod as a runtime does.
func (s *drillScene) removePod(p *testbed.Pod) {
	s.t.Helper()
	if err := p.Del(); err != nil {
		s.t.Errorf("DEL %s: %v", p, testbed.Describe(err))
	}
	p.Delete()
}

// leakedNetns waits for the netns of all pods to go; how many stay is asked for at the end of that.
func (s *drillScene) leakedNetns() (left int) {
	s.t.Helper()
	testbed.Eventually(s.t, "the netns of every pod is gone", func() bool {
		left = strings.Count(s.n.Exec("ip", "-br", "link", "show", "type", "veth"), witness)
		return left == 0
	})
	return left
}

// drillState is what a daemon may leak.
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
	testbed.Eventually(s.t, "the metrics are served", func() bool { // by the daemon that took over, in a moment
		text, err := testbed.Get(testbed.Context(s.t), c, "http://127.0.0.1:15090/metrics")
		state = drillState{int(value(text, "process_open_fds")), int(value(text, "go_goroutines")), value(text, "process_resident_memory_bytes") / (1 << 20)}
		return err == nil && state.goroutines > 0
	})
	return state
}
