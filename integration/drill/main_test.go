// Package drill tests that a node under load recovers from disasters: programs killed, a full disk, no descriptors.
package drill

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
