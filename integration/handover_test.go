package integration

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// succeed starts another daemon while d runs, and returns when it has taken over.
func succeed(t *testing.T, n *testbed.Node, d *testbed.Daemon) *testbed.Daemon {
	t.Helper()
	next := n.StartDaemon()
	testbed.Eventually(t, "the one has handed over to the other", func() bool {
		return strings.Contains(d.Log(), "handed over") && strings.Contains(next.Log(), "sluiced is up")
	})
	return next
}

// TestHandOverLosesNothing: not a connection that waits, not one that is relayed, and not one that is made meanwhile.
func TestHandOverLosesNothing(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	seen := echoWorld(n)
	d := n.StartDaemon()
	pods := []*testbed.Pod{n.AddPod("one"), n.AddPod("two")}
	inner := pods[0].Nested()
	outcome := clients(patience(t), 100, random(16<<10), pods[0].Host, pods[1].Host, inner)
	testbed.Eventually(t, "all of them wait", func() bool { return waiting(d, pods...) == 300 })

	d = succeed(t, n, d)
	if got := waiting(d, pods...); got != 300 {
		t.Errorf("the next daemon sees %d wait, want 300", got)
	}
	startConnectProxy(n)
	allWell(t, outcome, 300)

	open, err := pods[0].Dial(patience(t), "tcp", echoAddresses[0])
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // closed below
	say(t, open, "before")
	before := d
	d = succeed(t, n, d)
	say(t, open, "after the daemon that relays it has handed over")
	if err := echo(patience(t), pods[0].Host, echoAddresses[1], []byte("hello")); err != nil {
		t.Errorf("a new connection: %v", err)
	}
	if before.Ended() {
		t.Error("it ended while it had a connection to relay")
	}
	if err := open.Close(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "it ends with the last of its connections", before.Ended)
	if got := int(seen.Load()); got != 302 {
		t.Errorf("the destination saw %d connections, want 302", got)
	}
	if got := n.SYNs(); got != 0 {
		t.Errorf("%d SYNs left the pods, want none", got)
	}
	d.Stop()
}

func say(t *testing.T, c net.Conn, what string) {
	t.Helper()
	got := make([]byte, len(what))
	_, err := io.WriteString(c, what)
	if err == nil {
		_, err = io.ReadFull(c, got)
	}
	if err != nil || string(got) != what {
		t.Errorf("%s: the open connection echoes %q, %v", what, got, err)
	}
}

// TestHandOversUnderLoad: somebody connects at every moment of them, and nobody notices.
func TestHandOversUnderLoad(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	startConnectProxy(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	ctx, stop := context.WithCancel(patience(t))
	defer stop()
	failures := make(chan error, 4)
	for i := range cap(failures) {
		go func() {
			var err error
			for err == nil && ctx.Err() == nil {
				err = echo(patience(t), pod.Host, echoAddresses[i%2], []byte("hello"))
			}
			failures <- err
		}()
	}
	for range 5 {
		d = succeed(t, n, d)
	}
	stop()
	for range cap(failures) {
		if err := <-failures; err != nil {
			t.Errorf("during a hand-over: %v", err)
		}
	}
	if got := n.SYNs(); got != 0 {
		t.Errorf("%d SYNs left the pod, want none", got)
	}
}

// TestWhatWasHandedOverEndsWithItsPod: the daemon that has handed over learns from nobody that the pod is gone, and what
// it still relays would hold the pod's netns.
func TestWhatWasHandedOverEndsWithItsPod(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	startConnectProxy(n)
	before := n.StartDaemon()
	pod := n.AddPod("web")
	open := mustOpen(t, pod.Host, echoAddresses[0])
	say(t, open, "before")
	succeed(t, n, before)
	if err := pod.Del(); err != nil {
		t.Fatalf("DEL: %v", describe(err))
	}
	pod.Delete()
	testbed.Eventually(t, "it ends with the last of its pods", before.Ended)
}

// TestHandOverToOneThatDies: the old daemon goes on as if nothing had been asked.
func TestHandOverToOneThatDies(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	outcome := clients(patience(t), 20, random(1<<10), pod.Host)
	testbed.Eventually(t, "all of them wait", func() bool { return waiting(d, pod) == 20 })

	c, err := net.Dial("unix", n.AgentSocket())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "POST /v1/handover HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: sluice-handover/1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	oob := make([]byte, 1024)
	testbed.Eventually(t, "the listeners came", func() bool {
		_, oobn, _, _, err := c.(*net.UnixConn).ReadMsgUnix(make([]byte, 4096), oob)
		if err != nil {
			t.Fatal(err)
		}
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range messages {
			fds, err := unix.ParseUnixRights(&m)
			if err != nil {
				t.Fatal(err)
			}
			for _, fd := range fds {
				_ = unix.Close(fd)
			}
		}
		return len(messages) > 0
	})
	_ = c.Close()
	testbed.Eventually(t, "the daemon notices", func() bool { return strings.Contains(d.Log(), "still here") })
	startConnectProxy(n)
	allWell(t, outcome, 20)
	if err := n.AddPod("next").Check(); err != nil {
		t.Errorf("CHECK of a pod that was added then: %v", err)
	}
}

// TestDaemonHangs: the next one does not wait for it, and it goes when it wakes. What the proxies have, they go on serving.
func TestDaemonHangs(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "sockets"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n, start := newNodeFor(t, protocol)
			n.Config["metricsAddress"] = "127.0.0.1:15090"
			echoWorld(n)
			start()
			d := n.StartDaemon()
			pods := []*testbed.Pod{n.AddPod("one"), n.AddPod("two")}
			talks := startTalks(t, pods[0].Host, 2, 1000)
			hearAll(t, talks)
			d.Freeze()
			outcome := clients(patience(t), 4, random(100), pods[0].Host, pods[1].Host)
			if protocol == "sockets" {
				allWell(t, outcome, 8)
			}
			next := n.StartDaemon()
			if protocol == "connect" {
				for range 8 {
					if err := <-outcome; !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("got %v, want a reset of what waited for the one that hangs", err)
					}
				}
			}
			allWell(t, clients(patience(t), 20, random(1<<10), pods[0].Host, pods[1].Host), 40)
			testbed.Eventually(t, "every pod is as it should be", func() bool {
				return len(next.Of(pods[0]).Notes)+len(next.Of(pods[1]).Notes) == 0
			})
			if evicted := strings.Contains(next.Log(), "ended the listeners of another process"); evicted != (protocol == "connect") {
				t.Errorf("listeners were ended: %t", evicted)
			}
			d.Signal(syscall.SIGCONT)
			testbed.Eventually(t, "it notices when it wakes", func() bool { return strings.Contains(d.Log(), "another sluiced has gone on without this one") })
			for _, c := range talks {
				if err := c.say(random(1000)); err != nil {
					t.Error(err)
				}
			}
			hearAll(t, talks) // what it relays goes on
			for _, c := range talks {
				_ = c.Close()
			}
			testbed.Eventually(t, "it ends with the last of its connections", d.Ended)
			allWell(t, clients(patience(t), 20, random(1<<10), pods[0].Host, pods[1].Host), 40)
			testbed.Eventually(t, "the metrics are served, now that their port is free", func() bool {
				_, err := get(patience(t), client(n.Host), "http://127.0.0.1:15090/metrics")
				return err == nil
			})
		})
	}
}

// TestDaemonHangsAndTheNextIsKilled: the one after that, which finds nobody at the socket, has the listeners all the same.
func TestDaemonHangsAndTheNextIsKilled(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	startConnectProxy(n)
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
	allWell(t, clients(patience(t), 4, random(100), pod.Host), 4)
}

// TestRetiredAndToldToEnd, as kubelet does with the pod of the daemon that has handed over: what it has accepted waits on
// for the upstream.
func TestRetiredAndToldToEnd(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	proxy := startConnectProxy(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	allWell(t, clients(patience(t), 2, random(100), pod.Host), 2)
	proxy.Freeze()
	outcome := clients(patience(t), 10, random(100), pod.Host)
	testbed.Eventually(t, "the daemon has accepted them", func() bool { return d.Of(pod).Waiting == 10 && queued(pod.Host) == 0 })
	proxy.Kill()
	testbed.Eventually(t, "the upstream is late", func() bool { return !d.Status().Upstream.Ready })
	succeed(t, n, d)
	d.Signal(syscall.SIGTERM)
	notYet(t, outcome)
	startConnectProxy(n)
	allWell(t, outcome, 10)
	testbed.Eventually(t, "it ends", d.Ended)
}
