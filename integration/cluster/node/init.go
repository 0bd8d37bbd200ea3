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

// Descriptors that start passes to the node's first process, and that process to the supervisor.
const (
	reportFD = 3 // the pipe that follow reads
	apiFD    = 4 // the machine's listener for the API server
)

// initialize runs in the node's first process, whose new namespaces still have the machine's content. It creates the
// node's root, starts the supervisor, and then reaps orphaned processes.
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
	_ = report.Close() // only the supervisor keeps the pipe open now: follow notices when the supervisor ends
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

// enterRoot mounts the node's root and makes it the root of this process.
func (c Config) enterRoot() error {
	if strings.ContainsAny(c.Dir, `:,\`) {
		return fmt.Errorf("the path %q contains a character that has a meaning in overlayfs options", c.Dir)
	}
	root := c.path(mergedDir)
	in := func(path string) string { return filepath.Join(root, path) }
	type mount struct {
		source, target, kind string
		flags                uintptr
		data                 string
	}
	steps := []mount{
		{"", "/", "", unix.MS_REC | unix.MS_PRIVATE, ""}, // from here on, mounts do not propagate to the machine
		{"overlay", root, "overlay", 0, "lowerdir=/,upperdir=" + c.path(rootDir) + ",workdir=" + c.path(workDir)},
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
		return fmt.Errorf("unmounting the machine's root: %w", err)
	}
	// systemd makes mounts shared too. Pods rely on it: a new mount propagates into their hostPath volumes.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("sharing mounts: %w", err)
	}
	return errors.Join(os.Remove("/run/old"), pretendTunables(), c.makeCgroups())
}

// pretendTunables shows kubelet the sysctl values that it requires, so that it does not set them: these sysctls are not
// namespaced, and belong to the machine.
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
