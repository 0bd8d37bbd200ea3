package testbed

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

var pid = os.Getpid()

// needed are the programs that these worlds are made with.
var needed = []string{"ip", "nft", "iptables-nft", "iptables-legacy", "sysctl"}

// inUserNS marks the process that Main has started in namespaces of its own.
const inUserNS = "SLUICE_TEST_IN_USERNS"

// Main runs a package's tests, as root or in a user namespace in which they are, and returns the exit code.
// What is missing is said; nothing is skipped.
func Main(m *testing.M) int {
	// Where some users do not look, and where the network tools are.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return failMain("PATH", err)
	}
	if os.Geteuid() != 0 {
		return mainInUserNS()
	}
	if os.Getenv(inUserNS) != "" {
		// The machine's /run is not ours to write to.
		if err := errors.Join(unix.Mount("tmpfs", "/run", "tmpfs", 0, ""), os.Mkdir("/run/netns", 0o755)); err != nil {
			return failMain("mounting an own /run", err)
		}
	}
	for _, name := range needed {
		if _, err := exec.LookPath(name); err != nil {
			return failMain("tests need it; `make test` installs what is missing", err)
		}
	}
	return m.Run()
}

func mainInUserNS() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inUserNS+"=1")
	id := func(n int) []syscall.SysProcIDMap {
		return []syscall.SysProcIDMap{{ContainerID: 0, HostID: n, Size: 1}}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
		UidMappings: id(os.Getuid()), GidMappings: id(os.Getgid()),
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		return failMain("these tests make network namespaces: run them as root, or where unprivileged user namespaces are allowed", err)
	}
	return 0
}

func failMain(what string, err error) int {
	fmt.Fprintf(os.Stderr, "%s: %v\n", what, err)
	return 1
}

// Build builds the binaries into a new directory: the daemon with the race detector if asked, the plugin, which
// runs once and has one goroutine, without.
func Build(race bool) (dir string, err error) {
	return buildWith(func(name string, cmd *exec.Cmd) {
		if race && name == "sluiced" {
			cmd.Args = append(cmd.Args, "-race")
		}
	})
}

// BuildReleased builds the binaries as releases are built.
func BuildReleased() (dir string, err error) {
	return buildWith(func(_ string, cmd *exec.Cmd) {
		cmd.Args = append(cmd.Args, "-trimpath", "-ldflags", "-s -w")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	})
}

func buildWith(adjust func(name string, cmd *exec.Cmd)) (dir string, err error) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("finding the module: %w", err)
	}
	dir, err = os.MkdirTemp("", "sluice-bin-")
	if err != nil {
		return "", err
	}
	for name, pkg := range map[string]string{"sluice": "./plugin", "sluiced": "./daemon", "connectproxy": "./integration/connectproxy"} {
		cmd := exec.Command("go", "build", "-o", filepath.Join(dir, name))
		adjust(name, cmd)
		cmd.Args = append(cmd.Args, pkg)
		cmd.Dir = strings.TrimSpace(string(root))
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", errors.Join(fmt.Errorf("building %s: %w\n%s", name, err, out), os.RemoveAll(dir))
		}
	}
	return dir, nil
}
