package relay

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestPodDoesNotFloodTheLog: a pod can cause resets and refusals at any rate. A line stands for many of them.
func TestPodDoesNotFloodTheLog(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.StartAnsweringProxy(n, "connect", "HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n")
	n.Config["capture"] = map[string]any{"source": "all", "excludeCIDRs": []string{}}
	d := n.StartDaemon()
	pod := n.AddPod("loud")
	const count = 300
	for message, address := range map[string]string{
		"connection reset": testbed.Web, "connection refused": "169.254.169.254:80",
	} {
		for range count / 10 {
			testbed.ForEach(t, 10, func(int) error {
				c, err := pod.Open(testbed.Context(t), address)
				if err == nil {
					_, err = io.ReadAll(c)
					_ = c.Close() // read to its end
				}
				if !errors.Is(err, unix.ECONNRESET) {
					return fmt.Errorf("connecting to %s: got %w, want a reset", address, err)
				}
				return nil
			})
		}
		if got := strings.Count(d.Log(), `msg="`+message+`"`); got == 0 || got > count/10 {
			t.Errorf("%d lines %q for %d connections, want a few", got, message, count)
		}
		testbed.WantMatch(t, d.Log(), message+`" pod=default/loud source=.* count=1 `)
	}
}
