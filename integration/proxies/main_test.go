// Package proxies tests sluice with real proxies other than mitmproxy: Squid, tinyproxy, HAProxy, Dante, microsocks and
// nginx, as Debian packages them.
package proxies

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestMain runs the tests in a mount namespace of their own: a Squid that is killed leaves files in /dev/shm.
func TestMain(m *testing.M) {
	os.Exit(testbed.InMountNS(0, func() int {
		if err := unix.Mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777"); err != nil {
			fmt.Fprintln(os.Stderr, "mounting a new /dev/shm:", err)
			return 1
		}
		return testbed.Main(m)
	}))
}
