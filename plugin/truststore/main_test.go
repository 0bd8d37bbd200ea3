package truststore

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestMain runs the tests in a mount namespace of their own.
func TestMain(m *testing.M) { os.Exit(testbed.InMountNS(0, m.Run)) }
