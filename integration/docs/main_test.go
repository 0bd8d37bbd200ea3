package docs

import (
	"os"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) {
	code := testbed.Main(m)
	if built {
		if dir, err := build(); err == nil {
			_ = os.RemoveAll(dir)
		}
	}
	os.Exit(code)
}

var (
	// build builds the binaries once, when the first test needs them.
	build = sync.OnceValues(func() (string, error) {
		built = true
		return testbed.BuildReleased()
	})
	built bool
)

// binaries returns the directory of the built binaries.
func binaries(t *testing.T) string {
	t.Helper()
	dir, err := build()
	if err != nil {
		t.Fatalf("building the binaries: %v", err)
	}
	return dir
}
