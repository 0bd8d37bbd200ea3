package relay

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestEarlyBytesOfServersAreCounted: the first bytes of a server that speaks first arrive with the upstream's response,
// or right behind it.
func TestEarlyBytesOfServersAreCounted(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "socks5"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			speech := testbed.RandomBytes(32 << 10)
			// The client misses bytes that are lost.
			n.World.Serve(testbed.Web, func(c net.Conn) { _, _ = c.Write(speech) })
			testbed.StartAnsweringProxy(n, protocol, "").Mend()
			d := n.StartDaemon()
			pod := n.AddPod("listening")
			const count = 100
			testbed.ForEach(t, count, func(int) error {
				c, err := pod.Open(testbed.Context(t), testbed.Web)
				if err != nil {
					return err
				}
				got, err := io.ReadAll(c)
				if err == nil && len(got) != len(speech) {
					err = io.ErrUnexpectedEOF
				}
				return errors.Join(err, c.Close())
			})
			testbed.Eventually(t, "all connections have ended", func() bool { return d.Of(pod).Open == 0 })
			if got, want := d.Of(pod).Bytes, uint64(count*len(speech)); got != want {
				t.Errorf("the daemon counts %d bytes, want %d", got, want)
			}
		})
	}
}
