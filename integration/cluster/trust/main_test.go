// Package trust tests the daemon's NRI plugin (daemon/trust) with a real containerd and runc. containerd runs alone, in
// namespaces of the test's own, and the test calls its CRI as a kubelet does.
package trust

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Variables that mark the processes of this program.
const (
	stageVariable  = "SLUICE_TRUST_STAGE"  // "init": the first process of the namespaces; "test"; "daemon"
	folderVariable = "SLUICE_TRUST_FOLDER" // the folder of the test's files, and the name of its cgroup
)

func TestMain(m *testing.M) {
	var code int
	var err error
	switch os.Getenv(stageVariable) {
	case "":
		code, err = outside()
	case "init":
		code, err = initialize()
	case "daemon":
		err = daemonMain()
	default:
		code = m.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// outside runs the tests in namespaces of their own. All processes and mounts end with the namespaces' first process.
func outside() (int, error) {
	runtime.LockOSThread() // Pdeathsig is about the thread
	folder, err := os.MkdirTemp("", "sluice-trust")
	if err != nil {
		return 1, err
	}
	code, err := again("init", "/proc/self/exe", &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}, folderVariable+"="+folder)
	return code, errors.Join(err, removeCgroups(filepath.Base(folder)), os.RemoveAll(folder))
}

// again runs this program as another stage and returns its exit code.
func again(stage, program string, attr *syscall.SysProcAttr, environment ...string) (int, error) {
	cmd := exec.Command(program, os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(append(os.Environ(), stageVariable+"="+stage), environment...)
	cmd.SysProcAttr = attr
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// initialize is the first process of the namespaces: it reaps the processes that others leave behind.
func initialize() (int, error) {
	program, err := os.Executable()
	if err != nil {
		return 1, err
	}
	err = errors.Join(
		os.Setenv(stageVariable, "test"),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("proc", "/proc", "proc", 0, ""),
		unix.Mount("tmpfs", "/run", "tmpfs", 0, ""),
	)
	if err != nil {
		return 1, fmt.Errorf("these tests need root: %w", err)
	}
	process, err := os.StartProcess(program, os.Args, &os.ProcAttr{
		Files: []*os.File{nil, os.Stdout, os.Stderr},
	})
	if err != nil {
		return 1, err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return 1, err
		}
		if pid == process.Pid {
			return status.ExitStatus(), nil
		}
	}
}

// removeCgroups removes the cgroups of the name in every hierarchy.
func removeCgroups(name string) error {
	found, err := filepath.Glob("/sys/fs/cgroup/*/" + name)
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range append(found, "/sys/fs/cgroup/"+name) {
		errs = append(errs, removeCgroup(dir))
	}
	return errors.Join(errs...)
}

func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, removeCgroup(filepath.Join(dir, e.Name())))
		}
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		// A killed process leaves its cgroup with a delay.
		if rmdir := unix.Rmdir(dir); !errors.Is(rmdir, unix.EBUSY) || time.Now().After(deadline) {
			return errors.Join(err, rmdir)
		}
	}
}
