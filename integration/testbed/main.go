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
		return failMain("these tests make network namespaces: "+
			"run them as root, or where unprivileged user namespaces are allowed", err)
	}
	return 0
}

func failMain(hint string, err error) int {
	fmt.Fprintf(os.Stderr, "%s: %v\n", hint, err)
	return 1
}
