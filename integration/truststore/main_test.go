// Package truststore tests the hook `sluice ca-hook` with real clients: in a container's root they refuse a server
// whose certificate the test's CA has issued, the hook runs, and they accept it.
package truststore

import (
	"os"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestMain runs the tests in a mount and a network namespace of their own. With getVariable set the process is a client
// instead.
func TestMain(m *testing.M) {
	if url := os.Getenv(getVariable); url != "" {
		os.Exit(goClient(url))
	}
	os.Exit(testbed.InMountNS(syscall.CLONE_NEWNET, func() int { return testbed.Main(m) }))
}
