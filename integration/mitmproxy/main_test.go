// Package mitmproxy tests every kind of traffic through a real mitmproxy, with and without the addon.
package mitmproxy

import (
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
