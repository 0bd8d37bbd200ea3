// Package escape tries by force to get TCP out of a captured pod around the proxy. It sends random packets by every way
// that a container has, in every state of the connections, the programs and the rules, and compares the frames that
// leave the pod's link with a model of the frames that may (model_test.go). It also takes the rules away one by one and
// tests that each loss is noticed.
package escape

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
