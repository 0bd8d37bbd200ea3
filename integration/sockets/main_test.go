// Package sockets tests the protocol by which a proxy accepts in the netns of pods: waiting, sharing, daemon restarts.
package sockets

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
