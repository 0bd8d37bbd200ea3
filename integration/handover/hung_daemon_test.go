package handover

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestDaemonHangs: the next one does not wait for it, and it goes when it wakes. What the proxies have, they go on serving.
func TestDaemonHangs(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			n.Config["metricsAddress"] = "127.0.0.1:15090"
			n.ServeEcho()
			n.StartUpstream()
			d := n.StartDaemon()
			pods := []*testbed.Pod{n.AddPod("one"), n.AddPod("two")}
			talks := testbed.StartTalks(t, pods[0].Host, 2, 1000)
			testbed.WantEchoes(t, talks)
			d.Freeze()
			outcome := testbed.Echoes(testbed.Context(t), 4, testbed.RandomBytes(100), pods[0].Host, pods[1].Host)
			if protocol == "sockets" {
				testbed.WantServed(t, outcome, 8)
			}
			next := n.StartDaemon()
			if protocol == "connect" {
				for range 8 {
					if err := <-outcome; !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("got %v, want a reset of what waited for the one that hangs", err)
					}
				}
			}
			testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 20, testbed.RandomBytes(1<<10), pods[0].Host, pods[1].Host), 40)
			testbed.Eventually(t, "every pod is as it should be", func() bool {
				return len(next.Of(pods[0]).Notes)+len(next.Of(pods[1]).Notes) == 0
			})
			if evicted := strings.Contains(next.Log(), "ended the listeners of another process"); evicted != (protocol == "connect") {
				t.Errorf("listeners were ended: %t", evicted)
			}
			d.Signal(syscall.SIGCONT)
			testbed.Eventually(t, "it notices when it wakes", func() bool { return strings.Contains(d.Log(), "another sluiced has gone on without this one") })
			for _, c := range talks {
				if err := c.Send(testbed.RandomBytes(1000)); err != nil {
					t.Error(err)
				}
			}
			testbed.WantEchoes(t, talks) // what it relays goes on
			for _, c := range talks {
				_ = c.Close()
			}
			testbed.Eventually(t, "it ends with the last of its connections", d.Ended)
			testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 20, testbed.RandomBytes(1<<10), pods[0].Host, pods[1].Host), 40)
			testbed.Eventually(t, "the metrics are served, now that their port is free", func() bool {
				_, err := n.Host.Get(testbed.Context(t), "http://127.0.0.1:15090/metrics")
				return err == nil
			})
		})
	}
}

// TestDaemonHangsAndTheNextIsKilled: the one after that, which finds nobody at the socket, has the listeners all the same.
func TestDaemonHangsAndTheNextIsKilled(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.ServeEcho()
	n.StartConnectProxy()
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.Kill()
	var hung net.Listener // what is left of one that hangs, and that nobody remembers
	err := pod.Do(func() (err error) {
		var c net.ListenConfig
		c.SetMultipathTCP(false) // its listeners are plain ones
		hung, err = c.Listen(t.Context(), "tcp", "[::]:15001")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close() //nolint:errcheck // it has been ended
	d = n.StartDaemon()
	testbed.Eventually(t, "the pod is as it should be", func() bool { return len(d.Of(pod).Notes) == 0 })
	testbed.WantServed(t, testbed.Echoes(testbed.Context(t), 4, testbed.RandomBytes(100), pod.Host), 4)
}
