// Package relay tests the byte path between a captured connection and the upstream: its ends, its volume, its counts.
package relay

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
