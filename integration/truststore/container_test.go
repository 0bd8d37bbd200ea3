package truststore

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// container is an OCI bundle whose root is an overlay, as that of a runtime is. Only the overlay is written.
type container struct {
	t      *testing.T
	bundle string
	root   string
}

// kept are the folders of a machine's root that an image has.
var kept = []string{"bin", "etc", "lib", "lib32", "lib64", "libx32", "opt", "sbin", "usr", "var"}

// newContainer makes a container whose image is the file system at lower.
func newContainer(t *testing.T, lower string) *container {
	t.Helper()
	dir := t.TempDir()
	mount(t, "tmpfs", dir, "tmpfs", 0, "size=512m")
	c := &container{t: t, bundle: dir, root: filepath.Join(dir, "rootfs")}
	for _, folder := range []string{"rootfs", "upper", "work"} {
		c.must(os.Mkdir(filepath.Join(dir, folder), 0o755))
	}
	c.hide(lower, filepath.Join(dir, "upper"))
	mount(t, "overlay", c.root, "overlay", 0,
		fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", lower, dir, dir))
	for folder, fstype := range map[string]string{"proc": "proc", "dev": "tmpfs", "tmp": "tmpfs"} {
		c.must(os.Mkdir(filepath.Join(c.root, folder), 0o755))
		mount(t, fstype, filepath.Join(c.root, folder), fstype, 0, "")
	}
	for name, minor := range map[string]uint32{"null": 3, "random": 8, "urandom": 9} {
		c.must(unix.Mknod(filepath.Join(c.root, "dev", name), unix.S_IFCHR|0o666, int(unix.Mkdev(1, minor))))
		c.must(os.Chmod(filepath.Join(c.root, "dev", name), 0o666))
	}
	c.write("/etc/hosts", "127.0.0.1 localhost\n")
	c.must(os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"root":{"path":"rootfs"}}`), 0o644))
	return c
}

// hide makes the overlay hide the folders of the machine that no image has: a whiteout is a device 0:0.
func (c *container) hide(lower, upper string) {
	c.t.Helper()
	entries, err := os.ReadDir(lower)
	c.must(err)
	for _, e := range entries {
		if !slices.Contains(kept, e.Name()) {
			c.must(unix.Mknod(filepath.Join(upper, e.Name()), unix.S_IFCHR, 0))
		}
	}
}

func (c *container) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *container) write(path, content string) {
	c.t.Helper()
	full := filepath.Join(c.root, path)
	c.must(os.MkdirAll(filepath.Dir(full), 0o755))
	c.must(os.RemoveAll(full))
	c.must(os.WriteFile(full, []byte(content), 0o644))
}

// command is a command in the container.
func (c *container) command(env []string, args ...string) *exec.Cmd {
	cmd := exec.Command("/usr/bin/env", append([]string{"-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/"},
		append(env, args...)...)...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: c.root}
	return cmd
}

// exec runs a command in the container.
func (c *container) exec(env []string, input string, args ...string) (output string, err error) {
	cmd := c.command(env, args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// addGo adds the client of Go's.
func (c *container) addGo() {
	c.t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	c.must(err)
	c.write(clients.GoFile, string(self))
	c.must(os.Chmod(filepath.Join(c.root, clients.GoFile), 0o755))
}

// hook runs the hook as a runtime does, and returns its report.
func (c *container) hook(ca []byte, args ...string) truststore.Report {
	c.t.Helper()
	caFile, report := filepath.Join(c.bundle, "ca.pem"), filepath.Join(c.bundle, "report.json")
	c.must(os.WriteFile(caFile, ca, 0o600))
	sluice := filepath.Join(testbed.Binaries(c.t), "sluice")
	cmd := exec.Command(sluice, append([]string{"ca-hook", "--ca", caFile, "--report", report}, args...)...)
	state := fmt.Sprintf(`{"ociVersion":"1.2.0","id":"c","status":"creating","bundle":%q}`, c.bundle)
	cmd.Stdin = strings.NewReader(state)
	cmd.Env = []string{}
	start := time.Now()
	out, err := cmd.CombinedOutput()
	c.must(err)
	data, err := os.ReadFile(report)
	c.must(err)
	usage, _ := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	c.t.Logf("hook: %s, %s of CPU, %d KiB at most\n%s", time.Since(start),
		cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime(), usage.Maxrss, out)
	var parsed truststore.Report
	c.must(json.Unmarshal(data, &parsed))
	return parsed
}

func mount(t *testing.T, source, target, fstype string, flags uintptr, data string) {
	t.Helper()
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		t.Fatalf("mounting %s: %v", target, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			t.Errorf("unmounting %s: %v", target, err)
		}
	})
}
