// Package cni tests the verbs of the plugin as a runtime calls them, and the agent socket by which it asks the daemon.
package cni

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
