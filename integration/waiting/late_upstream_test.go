package waiting

import (
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestRequestWaitsForMitmproxy(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	serveHTTP(n, testbed.Web)
	d := n.StartDaemon()
	pod := n.AddPod("web")

	type result struct {
		body string
		err  error
	}
	done := make(chan result)
	go func() {
		body, err := pod.Get(testbed.Context(t), "http://"+testbed.Web)
		done <- result{body, err}
	}()
	testbed.Eventually(t, "the request waits at the gate", func() bool { return d.Of(pod).Waiting == 1 })
	if got := n.SYNs(); got != 0 {
		t.Errorf("%d SYNs left the pod, want none", got)
	}
	testbed.StartMitmdump(n)
	if r := <-done; r.err != nil || r.body != "hello 198.51.100.1" {
		t.Errorf("got %q, %v; want the page, asked for by the node", r.body, r.err)
	}
	if err := pod.Check(); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}

// serveHTTP serves a page in the world that names the address of the client.
func serveHTTP(n *testbed.Node, address string) {
	l := n.World.Listen(address)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintf(w, "hello %s", host)
	}), ReadHeaderTimeout: time.Minute}
	go func() { _ = s.Serve(l) }() // ends with the listener
}

func TestThousandConnectionsWaitForTheUpstream(t *testing.T) {
	testbed.ForEachBackend(t, func(t *testing.T, n *testbed.Node) {
		seen := testbed.ServeEcho(n)
		d := n.StartDaemon()
		var pods []*testbed.Pod
		var hosts []*testbed.Host
		for _, name := range []string{"a", "b", "c", "d"} {
			p := n.AddPod(name)
			pods, hosts = append(pods, p), append(hosts, p.Host)
		}
		outcome := testbed.Echoes(t, 250, 200, hosts...)
		testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pods...) == 1000 })
		if got := n.SYNs(); got != 0 || seen.Load() != 0 || len(outcome) != 0 {
			t.Errorf("%d SYNs left the pods, %d connections arrived, %d clients have ended; want none",
				got, seen.Load(), len(outcome))
		}
		testbed.StartConnectProxy(n)
		testbed.WantServed(t, outcome, 1000)
		if got := n.SYNs(); got != 0 {
			t.Errorf("%d SYNs left the pods, want none", got)
		}
	})
}

// TestNestedContainerIsCapturedAndWaits: the pod forwards the packets of a container in it, and does not send them.
func TestNestedContainerIsCapturedAndWaits(t *testing.T) {
	testbed.ForEachBackend(t, func(t *testing.T, n *testbed.Node) {
		testbed.ServeEcho(n)
		d := n.StartDaemon()
		pod := n.AddPod("dind")
		inner := pod.Nested()
		outcome := testbed.Echoes(t, 20, 200, inner)
		testbed.Eventually(t, "all of them wait", func() bool { return d.Of(pod).Waiting == 20 })
		testbed.StartConnectProxy(n)
		testbed.WantServed(t, outcome, 20)
		if got := n.SYNs(); got != 0 {
			t.Errorf("%d SYNs left the pod, want none", got)
		}
	})
}
