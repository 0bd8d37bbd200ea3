package handover

import (
	"context"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestHandOverLosesNothing: no connection that waits, none that is relayed, and none that is made meanwhile.
func TestHandOverLosesNothing(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	seen := testbed.ServeEcho(n)
	d := n.StartDaemon()
	pods := []*testbed.Pod{n.AddPod("one"), n.AddPod("two")}
	inner := pods[0].Nested()
	outcome := testbed.Echoes(t, 100, 16<<10, pods[0].Host, pods[1].Host, inner)
	testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pods...) == 300 })

	d = n.HandOver(d)
	if got := d.Waiting(pods...); got != 300 {
		t.Errorf("the next daemon sees %d wait, want 300", got)
	}
	testbed.StartConnectProxy(n)
	testbed.WantServed(t, outcome, 300)

	open, err := pods[0].Dial(testbed.Context(t), "tcp", testbed.EchoAddresses[0])
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close() //nolint:errcheck // closed below
	testbed.WantEcho(t, open, "before")
	before := d
	d = n.HandOver(d)
	testbed.WantEcho(t, open, "after the daemon that relays it has handed over")
	if err := testbed.Echo(testbed.Context(t), pods[0].Host, testbed.EchoAddresses[1], []byte("hello")); err != nil {
		t.Errorf("a new connection: %v", err)
	}
	if before.Ended() {
		t.Error("the former daemon ended while it had a connection to relay")
	}
	if err := open.Close(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the former daemon ends with its last connection", before.Ended)
	if got := int(seen.Load()); got != 302 {
		t.Errorf("the destination saw %d connections, want 302", got)
	}
	if got := n.SYNs(); got != 0 {
		t.Errorf("%d SYNs left the pods, want none", got)
	}
	d.Stop()
}

// TestHandOversUnderLoad: clients connect all the time, and no connection fails.
func TestHandOversUnderLoad(t *testing.T) {
	t.Parallel()
	n, d, pod := relayingNode(t)
	ctx, stop := context.WithCancel(testbed.Context(t))
	defer stop()
	failures := make(chan error, 4)
	for i := range cap(failures) {
		go func() {
			var err error
			for err == nil && ctx.Err() == nil {
				err = testbed.Echo(testbed.Context(t), pod.Host, testbed.EchoAddresses[i%2], []byte("hello"))
			}
			failures <- err
		}()
	}
	for range 5 {
		d = n.HandOver(d)
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

// TestRetiredDaemonEndsWithItsLastPod: the runtime does not tell a daemon that has handed over that a pod is deleted,
// but the connections that it still relays would keep the pod's netns alive.
func TestRetiredDaemonEndsWithItsLastPod(t *testing.T) {
	t.Parallel()
	n, before, pod := relayingNode(t)
	open := testbed.MustOpen(t, pod.Host, testbed.EchoAddresses[0])
	testbed.WantEcho(t, open, "before")
	n.HandOver(before)
	if err := pod.Del(); err != nil {
		t.Fatalf("DEL: %v", testbed.Describe(err))
	}
	pod.Delete()
	testbed.Eventually(t, "the former daemon ends with its last pod", before.Ended)
}

// TestHandOverToADaemonThatDies: the old daemon goes on as if it had not been asked for its listeners.
func TestHandOverToADaemonThatDies(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	outcome := testbed.Echoes(t, 20, 1<<10, pod.Host)
	testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pod) == 20 })

	c, err := net.Dial("unix", n.AgentSocket())
	if err != nil {
		t.Fatal(err)
	}
	const request = "POST /v1/handover HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: sluice-handover/1\r\n\r\n"
	if _, err := io.WriteString(c, request); err != nil {
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
	testbed.Eventually(t, "the daemon notices", func() bool { return strings.Contains(d.Log(), "hand-over failed") })
	testbed.StartConnectProxy(n)
	testbed.WantServed(t, outcome, 20)
	if err := n.AddPod("next").Check(); err != nil {
		t.Errorf("CHECK of a pod that was added then: %v", err)
	}
}

// TestRetiredDaemonThatIsTerminated: kubelet terminates the pod of a daemon that has handed over. The connections that
// it has accepted still wait for the upstream.
func TestRetiredDaemonThatIsTerminated(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	proxy := testbed.StartConnectProxy(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	testbed.EchoAll(t, 2, 100, pod.Host)
	proxy.Freeze()
	outcome := testbed.Echoes(t, 10, 100, pod.Host)
	testbed.Eventually(t, "the daemon has accepted them", func() bool {
		return d.Of(pod).Waiting == 10 && pod.Queued() == 0
	})
	proxy.Kill()
	testbed.Eventually(t, "the upstream is late", func() bool { return !d.Status().Upstream.Ready })
	n.HandOver(d)
	d.Signal(syscall.SIGTERM)
	testbed.WantPending(t, outcome)
	testbed.StartConnectProxy(n)
	testbed.WantServed(t, outcome, 10)
	testbed.Eventually(t, "the former daemon ends", d.Ended)
}
