package relay

import (
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestEarlyAnswersArrive: a server may answer an upload before it has read it all, and close the connection, which
// resets it. An app that asks the proxy itself reads the answer even so.
func TestEarlyAnswersArrive(t *testing.T) {
	t.Parallel()
	page := "HTTP/1.1 413 Content Too Large\r\n\r\n" + strings.Repeat("too large ", 2000)
	for _, protocol := range []string{"connect", "socks5"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			testbed.StartEarlyProxy(n, page)
			d := n.StartDaemon()
			pod := n.AddPod("uploads")
			for range 20 {
				testbed.ForEach(t, 20, func(int) error {
					return testbed.UploadTooMuch(testbed.Context(t), pod.Host, testbed.Web, page)
				})
			}
			testbed.Eventually(t, "all connections have ended", func() bool { return d.Of(pod).Open == 0 })
		})
	}
}
