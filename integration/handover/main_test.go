// Package handover tests that connections survive a daemon that hands over, hangs, ends or is killed.
package handover

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
