package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const cgroupRoot = "/sys/fs/cgroup"

// cgroups returns the node's cgroup in each hierarchy of the machine, of cgroup v1 and v2.
func (c Config) cgroups() ([]string, error) {
	data, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	var dirs []string
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 3 || !strings.HasPrefix(fields[1], cgroupRoot) {
			continue
		}
		if fields[2] == "cgroup" || fields[2] == "cgroup2" {
			dirs = append(dirs, filepath.Join(fields[1], c.cgroup()))
		}
	}
	return dirs, nil
}

func (c Config) makeCgroups() error {
	dirs, err := c.cgroups()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("making the node's cgroup: %w", err)
		}
		// True only on a machine with the unified hierarchy alone.
		if parent := filepath.Dir(dir); parent == cgroupRoot {
			if err := enableControllers(parent); err != nil {
				return err
			}
		}
	}
	return nil
}

// enableControllers enables all controllers of dir for the cgroups in dir: kubelet requires them in its root cgroup.
func enableControllers(dir string) error {
	controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(controllers)) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+name), 0o600); err != nil {
			return fmt.Errorf("enabling the controller %s in %s: %w", name, dir, err)
		}
	}
	return nil
}

// removeCgroups removes the node's cgroups. Their processes must have ended.
func (c Config) removeCgroups() error {
	dirs, err := c.cgroups()
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, removeCgroup(dir))
	}
	return errors.Join(errs...)
}

// removeCgroup removes a cgroup and the cgroups in it, from the leaves up. The kernel removes the files in it.
func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroup(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	// A killed process leaves its cgroup with a delay.
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := syscall.Rmdir(dir)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("removing the cgroup %s: %w", dir, err)
		}
	}
}
