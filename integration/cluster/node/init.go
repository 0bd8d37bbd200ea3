package node

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Descriptors that start hands on, through the first process to the supervisor.
const (
	reportFD = 3 // where what is said to follow goes
	apiFD    = 4 // the machine's listener for the API server
)

// initialize is the node's first process, in namespaces that are still as the machine's: it makes the node's root,
// starts the supervisor, and then collects processes that nobody else does.
func initialize(argument string) (err error) {
	report := os.NewFile(reportFD, "report")
	defer func() { fmt.Fprintln(report, err) }()
	var c Config
	if err := json.Unmarshal([]byte(argument), &c); err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return fmt.Errorf("waiting to be recorded: %w", err)
	}
	if err := c.enterRoot(); err != nil {
		return fmt.Errorf("making the node's root: %w", err)
	}
	if err := unix.Sethostname([]byte(Name)); err != nil {
		return fmt.Errorf("setting the host name: %w", err)
	}
	cmd := exec.Command("/proc/self/exe", superviseName, argument)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), environment...)
	cmd.ExtraFiles = []*os.File{report, os.NewFile(apiFD, "api")}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the supervisor: %w", err)
	}
	_ = report.Close() // its end is the supervisor's, from now on
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("waiting for processes: %w", err)
		case pid == cmd.Process.Pid:
			return fmt.Errorf("the supervisor has ended with status %d", status)
		}
	}
}

// enterRoot makes this process's root the node's.
func (c Config) enterRoot() error {
	if strings.ContainsAny(c.Dir, `:,\`) {
		return fmt.Errorf("the path %q has a character that overlayfs takes for its own", c.Dir)
	}
	root := c.path(mergedDir)
	in := func(path string) string { return filepath.Join(root, path) }
	type mount struct {
		source, target, kind string
		flags                uintptr
		data                 string
	}
	steps := []mount{
		{"", "/", "", unix.MS_REC | unix.MS_PRIVATE, ""}, // from here on nothing reaches the machine
		{"overlay", root, "overlay", 0, fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", c.path(rootDir), c.path(workDir))},
		{"proc", in("/proc"), "proc", 0, ""},
		{"sysfs", in("/sys"), "sysfs", 0, ""},
		{"/sys/fs/cgroup", in("/sys/fs/cgroup"), "", unix.MS_BIND | unix.MS_REC, ""},
		{"/dev", in("/dev"), "", unix.MS_BIND | unix.MS_REC, ""},
		{"tmpfs", in("/run"), "tmpfs", 0, "mode=0755"},
		{c.path(containerdDir), in("/var/lib/containerd"), "", unix.MS_BIND, ""},
		{c.path(kubeletDir), in("/var/lib/kubelet"), "", unix.MS_BIND, ""},
	}
	for _, m := range steps {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mounting %s on %s: %w", m.source, m.target, err)
		}
	}
	if err := os.Mkdir(in("/run/old"), 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot(root, in("/run/old")); err != nil {
		return fmt.Errorf("pivot_root to %s: %w", root, err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/run/old", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("letting go of the machine's root: %w", err)
	}
	// As systemd has it: what is mounted in one place is seen by whoever has that place mounted.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("sharing mounts: %w", err)
	}
	return errors.Join(os.Remove("/run/old"), pretendTunables(), c.makeCgroups())
}

// pretendTunables shows kubelet the settings that it wants of the kernel, so that it does not set them: they are
// the machine's.
func pretendTunables() error {
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0",
		"kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		file := filepath.Join("/run/tunables", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
			return err
		}
		if err := unix.Mount(file, filepath.Join("/proc/sys", name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("hiding the kernel's %s: %w", name, err)
		}
	}
	return nil
}
