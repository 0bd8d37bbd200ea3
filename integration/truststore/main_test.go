// Package truststore tests the hook `sluice ca-hook` with real clients: in a container's root they refuse a server
// whose certificate the test's CA has issued, the hook runs, and they accept it.
package truststore

import (
	"os"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestMain runs the tests in a mount and a network namespace of their own. In a container the process is a client, or
// the first process, instead.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == clients.GetCommand {
		os.Exit(clients.Get(os.Args[2]))
	}
	if len(os.Args) == 2 && os.Args[1] == idleCommand {
		idle()
	}
	os.Exit(testbed.InMountNS(syscall.CLONE_NEWNET, func() int { return testbed.Main(m) }))
}
