// Package docker tests pods in which a Docker runs, as in the pods of CI runners: the traffic that stays in such a pod
// is left alone, and the traffic that leaves it is captured.
package docker

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
