package drill

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// takeEveryProtocol makes the proxy one that serves all protocols. The proxies' secret, which some of them make, is
// there from the start, because it stays.
func (s *drillScene) takeEveryProtocol() {
	s.launch = s.launchConnectProxy
	if _, err := upstream.Secret(filepath.Dir(s.n.ProxySocket())); err != nil {
		s.t.Fatal(err)
	}
}

// changeProtocol starts a successor that has another protocol.
func (s *drillScene) changeProtocol() {
	others := slices.DeleteFunc(slices.Clone(protocols), func(p string) bool {
		return p == s.protocol
	})
	s.setProtocol(others[s.random.IntN(len(others))])
}

func (s *drillScene) setProtocol(protocol string) {
	s.protocol = protocol
	s.n.SetProtocol(protocol)
	s.succeed()
}

// cannotStart starts a successor that fails before it takes over. The daemon goes on.
func cannotStart(name string, spoil, mend func(*testbed.Node) error) fault {
	must := func(s *drillScene, change func(*testbed.Node) error) {
		if err := change(s.n); err != nil {
			s.t.Fatalf("successor that cannot start, %s: %v", name, err)
		}
	}
	return fault{
		name: "successor cannot start: " + name,
		strike: func(s *drillScene) {
			must(s, spoil)
			next := s.n.LaunchDaemon()
			testbed.Eventually(s.t, "the successor ends", next.Ended)
			if strings.Contains(s.d.Log(), "handed over") {
				s.t.Error("the daemon has handed over to a successor that cannot start")
			}
		},
		undo: func(s *drillScene) { must(s, mend) },
	}
}

func spoilMetrics(n *testbed.Node) error {
	n.Config["metricsAddress"] = "192.0.2.1:15090"
	return nil
}

func mendMetrics(n *testbed.Node) error {
	n.Config["metricsAddress"] = metricsAddress
	return nil
}

func spoilDataDir(n *testbed.Node) error {
	n.Config["dataDir"] = filepath.Join(n.Dir, "sluiced.yaml")
	return nil
}

func mendDataDir(n *testbed.Node) error {
	n.Config["dataDir"] = n.DataDir()
	return nil
}

func spoilProxySocket(n *testbed.Node) error {
	return errors.Join(
		os.Rename(n.ProxySocket(), n.ProxySocket()+".aside"), os.MkdirAll(filepath.Join(n.ProxySocket(), "x"), 0o700),
	)
}

func mendProxySocket(n *testbed.Node) error {
	return errors.Join(os.RemoveAll(n.ProxySocket()), os.Rename(n.ProxySocket()+".aside", n.ProxySocket()))
}

// stopBeside stops the daemon and starts another beside it. The probes of each tell about itself, so that the kubelet
// ends the right one.
func (s *drillScene) stopBeside() {
	s.n.ProbeSocket = probeSocket(s.n, "stopped")
	s.succeed()
	s.recovered() // one that stops while it installs the plugin holds the lock, and keeps the other from being ready
	s.n.ProbeSocket = probeSocket(s.n, "beside")
	s.losing(s.ofDaemon(), func() { // the successor ends the listeners of a relay
		s.d.Freeze()
		s.stopped = s.d.Program
		s.retired = append(s.retired, s.stopped)
		s.start()
		s.echoes()
	})
	s.n.ProbeSocket = ""
	for _, c := range []struct {
		daemon, probe string
		passes        bool
	}{
		{"stopped", "--ready", false}, {"stopped", "--alive", false},
		{"beside", "--ready", true}, {"beside", "--alive", true},
	} {
		testbed.Eventually(s.t, c.daemon+" "+c.probe+" is "+strconv.FormatBool(c.passes), func() bool {
			_, err := s.n.Sluiced("status", c.probe, "--agent-socket", probeSocket(s.n, c.daemon))
			return (err == nil) == c.passes
		})
	}
}

func probeSocket(n *testbed.Node, daemon string) string { return filepath.Join(n.Dir, daemon+".sock") }

// wakeBeside lets the stopped daemon go on. It sees that it has been replaced. Probe sockets lie in the container of
// their daemon, and stay as long as that.
func (s *drillScene) wakeBeside() {
	s.stopped.Signal(syscall.SIGCONT)
	testbed.Eventually(s.t, "the stopped daemon notices that another one runs", func() bool {
		return s.stopped.Ended() || strings.Contains(s.stopped.Log(), "this sluiced hung, and another one runs by now")
	})
	if err := errors.Join(os.Remove(probeSocket(s.n, "stopped")), os.Remove(probeSocket(s.n, "beside"))); err != nil {
		s.t.Error(err)
	}
}

// churners is the number of pods that come and go at the same time.
const churners = 4

// terminateUnderChurn ends the daemon while pods are added and deleted.
func (s *drillScene) terminateUnderChurn() {
	for len(s.churned) < churners {
		s.churned = append(s.churned, s.newPod("churn"+strconv.Itoa(len(s.churned))))
	}
	var done atomic.Int64
	var stop atomic.Bool
	var running sync.WaitGroup
	for _, p := range s.churned {
		running.Go(func() {
			for !stop.Load() {
				var again *types.Error
				if err := p.Add(); err != nil && (!errors.As(err, &again) || again.Code != types.ErrTryAgainLater) {
					s.t.Errorf("ADD %s: %s", p, testbed.Describe(err))
				}
				if err := p.Del(); err != nil {
					s.t.Errorf("DEL %s: %s", p, testbed.Describe(err))
				}
				done.Add(1)
			}
		})
	}
	goesOn := func() {
		now := done.Load()
		testbed.Eventually(s.t, "pods come and go", func() bool { return done.Load() >= now+2*churners })
	}
	goesOn()
	s.endDaemon(s.d.Stop)
	goesOn()
	s.stopChurn = func() {
		goesOn()
		stop.Store(true)
		running.Wait()
	}
}

func (s *drillScene) endChurn() {
	s.start()
	s.stopChurn()
	for _, p := range s.churned {
		s.waitForNoTraces(p)
	}
}
