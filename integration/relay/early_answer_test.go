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

// TestEarlyAnswersArrive: a server may answer an upload before it has read it all, and close the connection, which
// resets it. An app that asks the proxy itself reads the answer even so.
func TestEarlyAnswersArrive(t *testing.T) {
	t.Parallel()
	page := "HTTP/1.1 413 Content Too Large\r\n\r\n" + strings.Repeat("too large ", 2000)
	for _, protocol := range []string{"connect", "socks5"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			testbed.StartEarlyProxy(n, protocol, page)
			d := n.StartDaemon()
			pod := n.AddPod("uploads")
			for range 20 {
				testbed.ForEach(t, 20, func(int) error { return uploadEarly(t, pod.Host, page) })
			}
			testbed.Eventually(t, "all connections have ended", func() bool { return d.Of(pod).Open == 0 })
		})
	}
}

// uploadEarly uploads until that fails, and fails itself unless the answer can be read to its end.
func uploadEarly(t *testing.T, h *testbed.Host, answer string) error {
	c, err := h.Open(testbed.Context(t), testbed.Web)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // read to its end
	_, err = io.Copy(c, endless{})
	if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		return fmt.Errorf("the upload ended with %w; want a reset", err)
	}
	got, err := io.ReadAll(c)
	if string(got) != answer {
		return errors.Join(fmt.Errorf("got %d of %d bytes of the answer", len(got), len(answer)), err)
	}
	return nil
}
