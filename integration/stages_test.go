package integration

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// handshakes is how many connections the daemon brings to the upstream at a time.
const handshakes = 64

// TestHandshakesAreBounded: an upstream that comes late meets everybody at once, and its backlog is short.
func TestHandshakesAreBounded(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	d := n.StartDaemon()
	pods := []*testbed.Pod{n.AddPod("a"), n.AddPod("b"), n.AddPod("c")}
	const count = 300
	outcome := clients(patience(t), count/3, random(200), pods[0].Host, pods[1].Host, pods[2].Host)
	testbed.Eventually(t, "all of them wait", func() bool { return waiting(d, pods...) == count })
	proxy := startHoldingProxy(n, nil)
	for answered := 0; answered < count; {
		batch := min(handshakes, count-answered)
		testbed.Eventually(t, "as many ask as may", func() bool { return proxy.waiting() >= batch })
		answered += proxy.release()
	}
	allWell(t, outcome, count)
	if held, connected := proxy.most(); held > handshakes || connected > handshakes+1 {
		t.Errorf("%d asked at a time, on %d connections; want at most %d, and one spare connection", held, connected, handshakes)
	}
	if got := n.SYNs(); got != 0 {
		t.Errorf("%d SYNs left the pods, want none", got)
	}
}

// TestDeadDestinationsDelayNobodyElse: what the upstream takes long to answer for does not use up the handshakes.
func TestDeadDestinationsDelayNobodyElse(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	dead := echoAddresses[1]
	proxy := startHoldingProxy(n, func(destination string) bool { return destination == dead })
	d := n.StartDaemon()
	unlucky, other := n.AddPod("unlucky"), n.AddPod("other")
	const count = 3 * handshakes
	var outcomes []<-chan error
	for range count {
		outcome := make(chan error, 1)
		outcomes = append(outcomes, outcome)
		go func() { outcome <- echo(patience(t), unlucky.Host, dead, random(200)) }()
	}
	testbed.Eventually(t, "more are held than may be at a time", func() bool { return proxy.waiting() > handshakes })
	if err := echo(patience(t), other.Host, echoAddresses[0], random(200)); err != nil {
		t.Errorf("another pod's connection: %v", err)
	}
	testbed.Eventually(t, "the upstream is asked for every one of them", func() bool { return proxy.waiting() == count })
	if got := d.Of(unlucky).Waiting; got != count {
		t.Errorf("%d connections wait, want all %d", got, count)
	}
	proxy.release()
	for _, outcome := range outcomes {
		allWell(t, outcome, 1)
	}
}

// queued is how many connections wait in the accept queues of h's capture port.
func queued(h *testbed.Host) int {
	n := 0
	for line := range strings.Lines(listeners(h)) {
		if w := strings.Fields(line); len(w) > 1 { // "LISTEN 3 4096 0.0.0.0:15001 …"
			q, _ := strconv.Atoi(w[1])
			n += q
		}
	}
	return n
}

// TestUpstreamKilledAtEveryStage: connections that it has not answered for lose nothing and reach the
// destination once; those whose bytes it had in hand end as they would have without sluice, by a reset.
func TestUpstreamKilledAtEveryStage(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			n.Plugin["backend"] = backend
			seen := echoWorld(n)
			proxy := startConnectProxy(n)
			d := n.StartDaemon()
			pod := n.AddPod("busy")
			inner := pod.Nested()

			const relayedCount, waitingCount, size = 10, 400, 16 << 10
			relayed := startTalks(t, pod.Host, relayedCount, size)
			hearAll(t, relayed)
			proxy.Freeze()
			carried := d.Of(pod).Bytes
			forEach(t, relayed, func(i int) error { return relayed[i].say(random(size)) })
			testbed.Eventually(t, "the frozen upstream has bytes of each in hand", func() bool {
				return d.Of(pod).Bytes == carried+relayedCount*size
			})
			late := append(startTalks(t, pod.Host, waitingCount/2, size), startTalks(t, inner, waitingCount/2, size)...)
			testbed.Eventually(t, "connections are at every stage", func() bool {
				s, q := d.Of(pod), queued(pod.Host)
				return q > 0 && s.Waiting > q && s.Open == relayedCount
			})
			proxy.Kill()
			wantAllReset(t, relayed)
			testbed.Eventually(t, "the upstream is late", func() bool { return !d.Status().Upstream.Ready })
			testbed.Eventually(t, "all that were not answered for wait", func() bool { return d.Of(pod).Waiting == waitingCount })
			if got := seen.Load(); got != relayedCount {
				t.Errorf("%d connections have reached the destination, want the %d that were relayed", got, relayedCount)
			}
			startConnectProxy(n)
			hearAll(t, late)
			if got := seen.Load(); got != relayedCount+waitingCount {
				t.Errorf("%d connections have reached the destination, want %d, each once", got, relayedCount+waitingCount)
			}
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}

func kill(d *testbed.Daemon)      { d.Kill() }
func terminate(d *testbed.Daemon) { d.Stop() }

// TestKilledDaemonResetsWhatItRelayed: an app must not take what it has got so far for all there is. What is
// opened meanwhile waits.
func TestKilledDaemonResetsWhatItRelayed(t *testing.T) {
	t.Parallel()
	for _, end := range []struct {
		name string
		end  func(*testbed.Daemon)
	}{{"SIGKILL", kill}, {"SIGTERM", terminate}} {
		t.Run(end.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			echoWorld(n)
			startConnectProxy(n)
			d := n.StartDaemon()
			pod := n.AddPod("web")
			inner := pod.Nested()
			relayed := append(startTalks(t, pod.Host, 10, 200), startTalks(t, inner, 10, 200)...)
			hearAll(t, relayed)

			end.end(d)
			wantAllReset(t, relayed)
			outcome := clients(patience(t), 20, random(16<<10), pod.Host, inner)
			notYet(t, outcome)
			n.StartDaemon()
			allWell(t, outcome, 40)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}

// TestRestartsRefuseNobody: somebody connects at every moment of them. What an old daemon had accepted, or
// what waited in its accept queue, may be reset; no connect fails.
func TestRestartsRefuseNobody(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	echoWorld(n)
	startConnectProxy(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")

	ctx := patience(t)
	stop := make(chan struct{})
	outcomes := make(chan error, 1<<16) // more than there will be
	const callers = 4
	done := make(chan struct{}, callers)
	for i := range callers {
		go func() {
			defer func() { done <- struct{}{} }()
			for {
				select {
				case <-stop:
					return
				case outcomes <- echo(ctx, pod.Host, echoAddresses[i%2], []byte("hello")):
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

// wellAgain returns after a number of new successes in a row, and wants nothing but resets before them.
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
