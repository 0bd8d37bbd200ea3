package handover

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestHungDaemonIsReplaced: the next daemon does not wait for it, and it ends when it wakes. Proxies go on serving the
// listeners that they have.
func TestHungDaemonIsReplaced(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			n.Config["metricsAddress"] = "127.0.0.1:15090"
			testbed.ServeEcho(n)
			testbed.StartUpstream(n)
			d := n.StartDaemon()
			pods := []*testbed.Pod{n.AddPod("one"), n.AddPod("two")}
			talks := testbed.StartTalks(t, pods[0].Host, 2, 1000)
			testbed.WantEchoes(t, talks)
			d.Freeze()
			outcome := testbed.Echoes(t, 4, 100, pods[0].Host, pods[1].Host)
			if protocol == "sockets" {
				testbed.WantServed(t, outcome, 8)
			}
			next := n.StartDaemon()
			if protocol == "connect" {
				for range 8 {
					if err := <-outcome; !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("got %v, want a reset of a connection that waited for the hung daemon", err)
					}
				}
			}
			testbed.EchoAll(t, 20, 1<<10, pods[0].Host, pods[1].Host)
			testbed.Eventually(t, "every pod is in order", func() bool {
				return len(next.Of(pods[0]).Notes)+len(next.Of(pods[1]).Notes) == 0
			})
			evicted := strings.Contains(next.Log(), "listeners of another process were closed")
			if evicted != (protocol == "connect") {
				t.Errorf("listeners were ended: %t", evicted)
			}
			d.Signal(syscall.SIGCONT)
			testbed.Eventually(t, "the hung daemon notices when it wakes", func() bool {
				return strings.Contains(d.Log(), "this sluiced hung, and another one runs by now")
			})
			for _, c := range talks {
				if err := c.Send(testbed.RandomBytes(1000)); err != nil {
					t.Error(err)
				}
			}
			testbed.WantEchoes(t, talks) // its connections go on
			for _, c := range talks {
				_ = c.Close()
			}
			testbed.Eventually(t, "it ends with its last connection", d.Ended)
			testbed.EchoAll(t, 20, 1<<10, pods[0].Host, pods[1].Host)
			testbed.Eventually(t, "the next daemon serves the metrics, since their port is free", func() bool {
				_, err := n.Get(testbed.Context(t), "http://127.0.0.1:15090/metrics")
				return err == nil
			})
		})
	}
}

// TestListenersOfAForgottenDaemonAreEnded: a daemon hangs, and the next one is killed. The one after that finds no
// daemon at the agent socket and takes the capture port all the same.
func TestListenersOfAForgottenDaemonAreEnded(t *testing.T) {
	t.Parallel()
	n, d, pod := relayingNode(t)
	d.Kill()
	var hung net.Listener // stands for the listener of the hung daemon
	err := pod.Do(func() (err error) {
		var c net.ListenConfig
		c.SetMultipathTCP(false) // the daemon has plain TCP listeners
		hung, err = c.Listen(t.Context(), "tcp", "[::]:15001")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close() //nolint:errcheck // it has been ended
	d = n.StartDaemon()
	testbed.Eventually(t, "the pod is in order", func() bool { return len(d.Of(pod).Notes) == 0 })
	testbed.EchoAll(t, 4, 100, pod.Host)
}
