package truststore

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/oci"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// idleCommand is the argument of a test binary that is the first process of a container.
const idleCommand = "idle"

// idle waits until the container is removed.
func idle() {
	for {
		_ = unix.Pause() // it returns after a signal, and only the one that kills ends the process
	}
}

// mode is a part of what sluiced adds to containers.
type mode struct {
	name              string
	hook, environment bool // both use the mount
}

// modes are in the order of outcome.
var modes = []mode{
	{name: "hook and environment", hook: true, environment: true},
	{name: "hook", hook: true},
	{name: "environment", environment: true},
}

// adjust adds to a container what sluiced adds in a mode.
func adjust(s *oci.Sluiced, c *oci.Container, m mode) {
	adjustment := s.Adjustment(c)
	if !m.hook {
		adjustment.Hooks = nil
	}
	if !m.environment {
		adjustment.Env = nil
	}
	c.Adjust(adjustment)
}

func newSluiced(t *testing.T, ca authority) *oci.Sluiced {
	t.Helper()
	dir := t.TempDir()
	for _, folder := range []string{filepath.Dir(dir), dir} { // both are the test's own, and for no other user
		if err := os.Chmod(folder, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return oci.NewSluiced(t, dir, filepath.Join(testbed.Binaries(t), "sluice"), ca.pem)
}

// newIdle prepares a container with the test binary in it, whose first process does nothing.
func newIdle(t *testing.T, image oci.Image) *oci.Container {
	t.Helper()
	return addBinary(t, oci.New(t, image, clients.GoFile, idleCommand))
}

// addBinary adds the test binary to a container.
func addBinary(t *testing.T, c *oci.Container) *oci.Container {
	t.Helper()
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	c.Bind(self, clients.GoFile)
	return c
}
