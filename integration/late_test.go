package integration

import (
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

const web = testbed.WorldIPv4 + ":80"

func TestRequestWaitsForMitmproxy(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	serveHTTP(n, web)
	d := n.StartDaemon()
	pod := n.AddPod("web")

	type result struct {
		body string
		err  error
	}
	done := make(chan result)
	go func() {
		body, err := get(patience(t), client(pod.Host), "http://"+web)
		done <- result{body, err}
	}()
	testbed.Eventually(t, "the request waits at the gate", func() bool { return d.Of(pod).Waiting == 1 })
	if got := n.SYNs(); got != 0 {
		t.Errorf("%d SYNs left the pod, want none", got)
	}
	n.StartMitmdump()
	if r := <-done; r.err != nil || r.body != "hello 198.51.100.1" {
		t.Errorf("got %q, %v; want the page, asked for by the node", r.body, r.err)
	}
	if err := pod.Check(); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}

func TestThousandConnectionsWaitForTheUpstream(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			n.Plugin["backend"] = backend
			seen := echoWorld(n)
			d := n.StartDaemon()
			var pods []*testbed.Pod
			var hosts []*testbed.Host
			for _, name := range []string{"a", "b", "c", "d"} {
				p := n.AddPod(name)
				pods, hosts = append(pods, p), append(hosts, p.Host)
			}
			outcome := clients(patience(t), 250, random(200), hosts...)
			testbed.Eventually(t, "all of them wait", func() bool { return waiting(d, pods...) == 1000 })
			if got := n.SYNs(); got != 0 || seen.Load() != 0 || len(outcome) != 0 {
				t.Errorf("%d SYNs left the pods, %d connections arrived, %d clients have ended; want none", got, seen.Load(), len(outcome))
			}
			startConnectProxy(n)
			allWell(t, outcome, 1000)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pods, want none", got)
			}
		})
	}
}

// A container nested in the pod has a netns of its own; its packets are forwarded, not sent, by the pod.
func TestNestedContainerIsCapturedAndWaits(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewNode(t, bin)
			n.Plugin["backend"] = backend
			echoWorld(n)
			d := n.StartDaemon()
			pod := n.AddPod("dind")
			inner := pod.Nested()
			outcome := clients(patience(t), 20, random(200), inner)
			testbed.Eventually(t, "all of them wait", func() bool { return d.Of(pod).Waiting == 20 })
			startConnectProxy(n)
			allWell(t, outcome, 20)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}
