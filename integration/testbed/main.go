package testbed

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

var pid = os.Getpid()

// needed are the programs that a testbed is made with.
var needed = []string{"ip", "nft", "iptables-nft", "iptables-legacy", "sysctl"}

// inUserNS marks the process that Main has started in its own namespaces.
const inUserNS = "SLUICE_TEST_IN_USERNS"

// Main runs the tests of a package and returns the exit code. A package needs one line for it:
//
//	func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }
//
// The tests run as root, or else in a new user namespace in which they are root. Main names a program that is missing;
// no test is skipped.
func Main(m *testing.M) int {
	// The network tools are in folders that the PATH of a plain user lacks.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return failMain("PATH", err)
	}
	// Without it, lines of mitmproxy's log, which tests wait for, stay in a buffer until mitmproxy prints a flow.
	if err := os.Setenv("PYTHONUNBUFFERED", "1"); err != nil {
		return failMain("PYTHONUNBUFFERED", err)
	}
	if os.Geteuid() != 0 {
		return mainInUserNS()
	}
	if os.Getenv(inUserNS) != "" {
		// The user may not write to the machine's /run.
		if err := errors.Join(unix.Mount("tmpfs", "/run", "tmpfs", 0, ""), os.Mkdir("/run/netns", 0o755)); err != nil {
			return failMain("mounting a new /run", err)
		}
	}
	for _, name := range needed {
		if _, err := exec.LookPath(name); err != nil {
			return failMain("tests need this program; `make test` installs it", err)
		}
	}
	if err := runMoreAtATime(); err != nil {
		return failMain("-parallel", err)
	}
	return m.Run()
}

// runMoreAtATime lets more tests run at the same time than there are processors, unless -parallel says how many: most
// of the time they wait, for timeouts of the daemon and for programs that start.
func runMoreAtATime() error {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return nil
	}
	return flag.Set("test.parallel", strconv.Itoa(3*runtime.GOMAXPROCS(0)))
}

func mainInUserNS() int {
	id := func(n int) []syscall.SysProcIDMap {
		return []syscall.SysProcIDMap{{ContainerID: 0, HostID: n, Size: 1}}
	}
	return mainAgain(inUserNS, &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
		UidMappings: id(os.Getuid()), GidMappings: id(os.Getgid()),
	}, "these tests make network namespaces: run them as root, or where unprivileged user namespaces are allowed")
}

// inMountNS marks the process of InMountNS.
const inMountNS = "SLUICE_TEST_IN_MOUNT_NAMESPACE"

// InMountNS calls run in a process of its own, as root, and returns its exit code. The process has a mount namespace,
// which ends with it, and the namespaces of further flags such as CLONE_NEWNET.
func InMountNS(flags uintptr, run func() int) int {
	const hint = "these tests make mounts, as root"
	if os.Getenv(inMountNS) == "" {
		attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | flags, Pdeathsig: syscall.SIGKILL}
		return mainAgain(inMountNS, attr, hint)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return failMain(hint, fmt.Errorf("making the mounts private: %w", err))
	}
	return run()
}

// mainAgain runs this program again with attributes, marked by an environment variable, and returns its exit code.
func mainAgain(mark string, attr *syscall.SysProcAttr, hint string) int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), mark+"=1")
	cmd.SysProcAttr = attr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		return failMain(hint, err)
	}
	return 0
}

func failMain(hint string, err error) int {
	fmt.Fprintf(os.Stderr, "%s: %v\n", hint, err)
	return 1
}
