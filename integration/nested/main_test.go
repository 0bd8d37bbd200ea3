// Package nested tests HTTPS of containers that a Docker or a BuildKit in a captured pod starts: clients in images of
// several kinds, started in several ways. dockerd and buildkitd are real, and so are sluiced and mitmproxy.
package nested

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestMain runs the tests in a mount namespace of their own.
func TestMain(m *testing.M) { os.Exit(testbed.InMountNS(0, func() int { return testbed.Main(m) })) }
