// Package handover tests that connections survive a daemon that hands over, hangs, ends or is killed.
package handover

import (
	"fmt"
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) {
	if program := os.Getenv(withoutInotify); program != "" {
		fmt.Fprintln(os.Stderr, becomeWithoutInotify(program))
		os.Exit(1)
	}
	os.Exit(testbed.Main(m))
}
