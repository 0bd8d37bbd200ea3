// Package waiting tests that connections wait while the upstream is late, and which events end the wait.
package waiting

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
