package integration

import (
	"testing"

	"github.com/sluice-cni/sluice/integration/netns"
)

const web = netns.WorldIPv4 + ":80"

func TestRequestWaitsForMitmproxy(t *testing.T) {
	t.Parallel()
	n := netns.NewNode(t, bin)
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
	netns.Eventually(t, "the request waits at the gate", func() bool { return d.Of(pod).Waiting == 1 })
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
