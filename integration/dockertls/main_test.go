// Package dockertls tests HTTPS of a pod in which a Docker runs: dockerd trusts the proxy's CA, and the TLS of the
// containers that it starts is passed through. dockerd is real, and so are sluiced, its hook, runc and mitmproxy. Of
// the container runtime only NRI is there.
package dockertls

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestMain runs the tests in a mount namespace of their own.
func TestMain(m *testing.M) { os.Exit(testbed.InMountNS(0, func() int { return testbed.Main(m) })) }
