package capture

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestPortsAreReused makes many connections one after the other, and some from one and the same port. The server ends
// each, so the gate's side of it goes to TIME_WAIT, and a later SYN from that port meets that socket and not the
// listener. If the SYN gate dropped it, the client would have to send it again after a second.
func TestPortsAreReused(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			testbed.StartConnectProxy(n)
			n.StartDaemon()
			for _, a := range testbed.EchoAddresses {
				n.World.ServeCaller(a)
			}
			pod := f.AddPod(t, n, "sequential", nil)
			for i := range 10_000 {
				if again := connectFrom(t, pod.Host, testbed.EchoAddresses[i%2], 0); again > 0 {
					t.Fatalf("connection %d: the SYN was sent %d times more than once", i, again)
				}
			}
			for i := range 50 {
				if again := connectFrom(t, pod.Host, testbed.EchoAddresses[0], 12345); again > 0 {
					t.Fatalf("connection %d from one port: the SYN was sent %d times more than once", i, again)
				}
			}
		})
	}
}

// connectFrom connects from a port (0 for any), reads until the server closes, and returns how many segments had to be
// sent again.
func connectFrom(t *testing.T, h *testbed.Host, address string, port int) (again uint32) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{Port: port}, Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		})
		if err != nil {
			return fmt.Errorf("SO_REUSEADDR: %w", err)
		}
		return cerr
	}}
	ctx := testbed.Context(t)
	var c net.Conn
	testbed.Eventually(t, "the port is free", func() bool { // the last connection's FIN may not be acknowledged yet
		err := h.Do(func() (err error) {
			c, err = d.DialContext(ctx, "tcp", address)
			return err
		})
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			t.Fatal(err)
		}
		return err == nil
	})
	defer c.Close() //nolint:errcheck // read to its end
	if _, err := testbed.ReadAll(ctx, c); err != nil {
		t.Fatal(err)
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		var info *unix.TCPInfo
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			again = info.Total_retrans
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return again
}
