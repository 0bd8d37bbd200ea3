package integration

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestBytesOfServersThatSpeakAtOnceAreCounted: what they say arrives with the upstream's answer, or right behind it.
func TestBytesOfServersThatSpeakAtOnceAreCounted(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "socks5"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := withUpstream(t, protocol)
			speech := random(32 << 10)
			n.World.Serve(web, func(c net.Conn) { _, _ = c.Write(speech) }) // what is lost is missed
			startAnsweringProxy(n, protocol, "").mend()
			d := n.StartDaemon()
			pod := n.AddPod("listening")
			const count = 100
			forEach(t, make([]*talk, count), func(int) error {
				c, err := open(patience(t), pod.Host, web)
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
