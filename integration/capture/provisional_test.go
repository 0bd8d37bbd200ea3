package capture

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/daemon/agent"
	policy "github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// journey is a connection to a server of ServeCaller that has begun.
type journey struct {
	from, to string
	caller   chan string // the answer of the server, or the error
}

// setOut begins a connection from h. It may wait.
func setOut(t *testing.T, h *testbed.Host, to string) journey {
	t.Helper()
	j := journey{h.Name, to, make(chan string, 1)}
	ctx := testbed.Context(t)
	go func() {
		caller, err := h.Caller(ctx, to)
		if err != nil {
			caller = err.Error()
		}
		j.caller <- caller
	}()
	return j
}

// wantFrom fails the test unless the server sees the connection come from want.
func (j journey) wantFrom(t *testing.T, want string) {
	t.Helper()
	if got := <-j.caller; got != want {
		t.Errorf("from %s to %s: got %q; want a connection from %s", j.from, j.to, got, want)
	}
}

// waitForSYNs waits until n connections from h have sent their SYNs and have no answer.
func waitForSYNs(t *testing.T, h *testbed.Host, n int) {
	t.Helper()
	testbed.Eventually(t, fmt.Sprintf("%d SYNs wait", n), func() bool {
		return strings.Count(h.Exec("ss", "--no-header", "--tcp", "--numeric", "state", "syn-sent"), "\n") == n
	})
}

// webAddresses are the world's, in both families.
var webAddresses = []string{testbed.WorldIPv4 + ":80", "[" + testbed.WorldIPv6 + "]:80"}

// TestProvisionalPodThatIsNotCaptured: its connections, and those of containers in it, go straight. The plugin and the
// agent are the real ones. The test makes the decision: capture.source all captures every pod, and kubernetes needs an
// API server.
func TestProvisionalPodThatIsNotCaptured(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.World.ServeCaller(":80")
			pod := f.AddPod(t, n, "early", nil)
			nested := pod.Nested()
			var journeys []journey
			for _, address := range webAddresses {
				journeys = append(journeys, setOut(t, pod.Host, address), setOut(t, nested, address))
			}
			waitForSYNs(t, pod.Host, 2)
			waitForSYNs(t, nested, 2)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod before the decision, want none", got)
			}

			leaveAlone(t, n)
			for _, j := range journeys {
				j.wantFrom(t, caller(pod, j.to, straight))
			}
			if left := pod.Traces(); left != "" {
				t.Errorf("left in the netns:\n%s", left)
			}
			if r := n.Records(); len(r) != 1 || r[0].State != attach.Passed || r[0].Installed != nil {
				t.Errorf("got records %s, want one of a pod that is not captured", testbed.JSON(r))
			}
			// A decision stays until another one is made. The daemon that starts now captures every pod.
			leaveAlone(t, n)
			for _, address := range webAddresses {
				wantWay(t, pod, address, straight)
			}
			testbed.StartRecordingProxy(n, testbed.ProxyAddress)
			d := n.StartDaemon()
			testbed.Eventually(t, "the pod is captured", func() bool { return d.Of(pod).State == attach.Captured })
			for _, address := range webAddresses {
				wantWay(t, pod, address, captured)
			}
		})
	}
}

// leaveAlone settles the node's provisional attachments as a daemon that decides not to capture them.
func leaveAlone(t *testing.T, n *testbed.Node) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	accept := func(endpoint.Served) endpoint.Acceptor { return nil } // nothing is captured
	agent.New(agent.Config{
		Orchestrator: optedOut{}, Store: attach.NewStore(n.StateDir()),
		Table: endpoint.NewTable(accept, policy.Policy{}, log), Log: log,
		Upstream: upstream.New(config.Upstream{Address: testbed.ProxyAddress, Protocol: config.Connect}, nil, log),
	}).Reconcile(t.Context())
}

// optedOut is an orchestrator in which no pod has opted in.
type optedOut struct{}

// Decision implements agent.Orchestrator.
func (optedOut) Decision(context.Context, attach.Attachment, []string, bool) (attach.Decision, error) {
	return attach.Decision{Reason: "it did not opt in"}, nil
}

// Running implements agent.Orchestrator.
func (optedOut) Running() []optin.Running { return nil }

// Changed implements agent.Orchestrator.
func (optedOut) Changed() <-chan struct{} { return nil }

// Report implements agent.Orchestrator.
func (optedOut) Report(attach.Pod, bool, string, string) {}

// TestExclusionsOfProvisionalPods: when the daemon comes, connections that its configuration or annotations exclude go
// straight, and the others through the proxy. The conntrack entry of a dropped SYN does not keep its redirect.
func TestExclusionsOfProvisionalPods(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := newSelectiveNode(t)
			var journeys []journey
			var wants []string
			for i, c := range exclusions {
				annotations := map[string]string{}
				for k, v := range c.annotations {
					annotations["sluice.dev/"+k] = v
				}
				pod := f.AddPod(t, n, fmt.Sprint("pod", i), n.Annotated(annotations))
				nested := pod.Nested()
				waiting := 0
				for destination, way := range c.want {
					if strings.HasPrefix(destination, linkLocalIPv4) {
						continue // goes straight before the decision
					}
					journeys = append(journeys, setOut(t, pod.Host, destination), setOut(t, nested, destination))
					want := caller(pod, destination, way)
					wants = append(wants, want, want)
					waiting++
				}
				waitForSYNs(t, pod.Host, waiting)
				waitForSYNs(t, nested, waiting)
			}
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pods before the decision, want none", got)
			}
			n.StartDaemon()
			for i, j := range journeys {
				j.wantFrom(t, wants[i])
			}
		})
	}
}

// TestProvisionalNestedContainer waits like its pod, first for the daemon and then for the upstream.
func TestProvisionalNestedContainer(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			seen := testbed.ServeEcho(n)
			pod := f.AddPod(t, n, "dind", nil)
			inner := pod.Nested()
			outcome := testbed.Echoes(t, 10, 16<<10, inner, pod.Host)
			waitForSYNs(t, pod.Host, 10)
			waitForSYNs(t, inner, 10)
			d := n.StartDaemon()
			testbed.Eventually(t, "all of them wait for the upstream", func() bool { return d.Of(pod).Waiting == 20 })
			if got := seen.Load(); got != 0 || len(outcome) != 0 {
				t.Errorf("%d connections have arrived, %d have ended; want none", got, len(outcome))
			}
			testbed.StartConnectProxy(n)
			testbed.WantServed(t, outcome, 20)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}

// TestProvisionalPodIsCapturedWhenTheDaemonComes: its connections wait for the daemon.
func TestProvisionalPodIsCapturedWhenTheDaemonComes(t *testing.T) {
	testbed.ForEachBackend(t, func(t *testing.T, n *testbed.Node) {
		testbed.ServeEcho(n)
		testbed.StartConnectProxy(n)
		pod := n.AddPod("early")
		if r := n.Records(); len(r) != 1 || r[0].State != attach.Provisional {
			t.Fatalf("got records %s, want one that is provisional", testbed.JSON(r))
		}
		outcome := testbed.Echoes(t, 20, 200, pod.Host)
		testbed.WantPending(t, outcome)
		if got := n.SYNs(); got != 0 {
			t.Errorf("%d SYNs left the pod, want none", got)
		}
		d := n.StartDaemon()
		testbed.WantServed(t, outcome, 20)
		if got := d.Of(pod).State; got != attach.Captured {
			t.Errorf("got state %q, want captured", got)
		}
		if err := pod.Check(); err != nil {
			t.Errorf("CHECK: %v", err)
		}
	})
}

// TestProvisionalConnectionsToExcludedPortsGoStraight: the conntrack entry of a dropped SYN has the redirect of the
// provisional rules. The connection must leave it when the daemon's rules exclude the port.
func TestProvisionalConnectionsToExcludedPortsGoStraight(t *testing.T) {
	testbed.ForEachBackend(t, func(t *testing.T, n *testbed.Node) {
		n.Config["capture"] = map[string]any{"source": "all", "excludePorts": []string{testbed.EchoPort}}
		testbed.ServeEcho(n)
		pod := n.AddPod("early")
		outcome := testbed.Echoes(t, 10, 200, pod.Host)
		testbed.WantPending(t, outcome)
		n.StartDaemon() // without an upstream only connections that go straight can end
		testbed.WantServed(t, outcome, 10)
	})
}
