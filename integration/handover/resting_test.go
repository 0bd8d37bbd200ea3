package handover

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestRestingConnectionsOutliveTheHandOver: those that have carried nothing for long have no goroutines, and wait in an
// epoll of their own.
func TestRestingConnectionsOutliveTheHandOver(t *testing.T) {
	t.Parallel()
	n, d, pod := relayingNode(t)
	const count = 50
	talks := testbed.StartTalks(t, pod.Host, count, 1000)
	testbed.WantEchoes(t, talks)
	rest := func() {
		t.Helper()
		testbed.Eventually(t, "each of their sockets is in two epolls", func() bool {
			return watched(t, d) >= 2*2*count
		})
	}
	rest()
	successor := n.HandOver(d)
	echoAgain := func() {
		t.Helper()
		testbed.ForEach(t, count, func(i int) error { return talks[i].Send(testbed.RandomBytes(1000)) })
		testbed.WantEchoes(t, talks)
	}
	echoAgain()
	rest()
	echoAgain()
	rest()
	for _, c := range talks {
		_ = c.Close() // everything was read
	}
	testbed.Eventually(t, "the former daemon ends with its last connection", d.Ended)
	successor.Stop()
}

// watched sums up the descriptors in all epolls of a daemon.
func watched(t *testing.T, d *testbed.Daemon) (sum int) {
	t.Helper()
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", d.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range all {
		text, _ := os.ReadFile(file) // fails if closed meanwhile
		sum += bytes.Count(text, []byte("tfd:"))
	}
	return sum
}
