// Package capture tests which traffic of a pod is captured, which passes through, and that the listeners are no way in.
package capture

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
