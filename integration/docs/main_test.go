package docs

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
