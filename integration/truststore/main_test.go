// Package truststore tests the hook `sluice ca-hook` with real clients: in a container's root they refuse a server
// whose certificate the test's CA has issued, the hook runs, and they accept it.
package truststore

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// inNamespaces marks the process whose mounts and network go away with it.
const inNamespaces = "SLUICE_TEST_IN_NAMESPACES"

// TestMain runs the tests in a mount and a network namespace of their own, as root. With getVariable set the process is
// a client instead.
func TestMain(m *testing.M) {
	if url := os.Getenv(getVariable); url != "" {
		os.Exit(goClient(url))
	}
	if os.Getenv(inNamespaces) != "" {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			fmt.Fprintln(os.Stderr, "making the mounts private:", err)
			os.Exit(1)
		}
		os.Exit(testbed.Main(m))
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inNamespaces+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL,
	}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintln(os.Stderr, "these tests make mounts, as root:", err)
		os.Exit(1)
	}
}
