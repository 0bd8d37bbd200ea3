package handover

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func kill(d *testbed.Daemon) { d.Kill() }

func terminate(d *testbed.Daemon) { d.Stop() }

func TestConnectionsWaitForAKilledDaemon(t *testing.T) {
	testbed.ForEachBackend(t, func(t *testing.T, n *testbed.Node) {
		testbed.ServeEcho(n)
		testbed.StartConnectProxy(n)
		d := n.StartDaemon()
		pod := n.AddPod("web")
		inner := pod.Nested()
		testbed.EchoAll(t, 2, 200, pod.Host, inner)

		d.Kill()
		outcome := testbed.Echoes(t, 20, 200, pod.Host, inner)
		testbed.WantPending(t, outcome)
		n.StartDaemon()
		testbed.WantServed(t, outcome, 40)
		if got := n.SYNs(); got != 0 {
			t.Errorf("%d SYNs left the pod, want none", got)
		}
	})
}

// TestKilledDaemonResetsRelayedConnections: an app must not take the bytes so far for the whole response. Connections
// that are opened meanwhile wait.
func TestKilledDaemonResetsRelayedConnections(t *testing.T) {
	t.Parallel()
	for _, end := range []struct {
		name string
		end  func(*testbed.Daemon)
	}{{"SIGKILL", kill}, {"SIGTERM", terminate}} {
		t.Run(end.name, func(t *testing.T) {
			t.Parallel()
			n, d, pod := relayingNode(t)
			inner := pod.Nested()
			relayed := append(testbed.StartTalks(t, pod.Host, 10, 200), testbed.StartTalks(t, inner, 10, 200)...)
			testbed.WantEchoes(t, relayed)

			end.end(d)
			testbed.WantAllReset(t, relayed)
			outcome := testbed.Echoes(t, 20, 16<<10, pod.Host, inner)
			testbed.WantPending(t, outcome)
			n.StartDaemon()
			testbed.WantServed(t, outcome, 40)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}

// TestRestartsRefuseNoConnection: clients connect all the time. Connections that an old daemon had accepted, or that
// waited in its accept queue, may be reset; no connect fails.
func TestRestartsRefuseNoConnection(t *testing.T) {
	t.Parallel()
	n, d, pod := relayingNode(t)

	ctx := testbed.Context(t)
	stop := make(chan struct{})
	outcomes := make(chan error, 1<<16) // more than the test has
	const callers = 4
	done := make(chan struct{}, callers)
	for i := range callers {
		go func() {
			defer func() { done <- struct{}{} }()
			for {
				select {
				case <-stop:
					return
				case outcomes <- testbed.Echo(ctx, pod.Host, testbed.EchoAddresses[i%2], []byte("hello")):
				}
			}
		}()
	}
	for _, end := range []func(*testbed.Daemon){terminate, kill} {
		wellAgain(t, outcomes)
		end(d)
		d = n.StartDaemon()
	}
	wellAgain(t, outcomes)
	close(stop)
	for range callers {
		<-done
	}
	if got := n.SYNs(); got != 0 {
		t.Errorf("%d SYNs left the pod, want none", got)
	}
}

// wellAgain returns after 50 new successes in a row. It accepts no error but a reset before them.
func wellAgain(t *testing.T, outcomes <-chan error) {
	t.Helper()
	for row := -len(outcomes); row < 50; row++ {
		err := <-outcomes
		if err == nil {
			continue
		}
		row = min(row, 0)
		if !errors.Is(err, unix.ECONNRESET) { // a connect that is refused says so
			t.Fatal(err)
		}
	}
}
