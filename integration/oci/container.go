// Package oci runs containers by runc as a container runtime does that has sluiced as its NRI plugin:
//
//	c := oci.New(tb, oci.Image{Layers: layers}, "/bin/sleep", "60")
//	c.Adjust(oci.NewSluiced(tb, dir, plugin, ca).Adjustment(c))
//	c.Start()
//	out, err := c.Exec(nil, "", "curl", url)
//
// The caller is root. A container shares the caller's network namespace, unless it joins another one, and has
// namespaces of its own else.
package oci

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// Image is the file system of an image, and its environment.
type Image struct {
	// Layers are folders, the top one first.
	Layers []string
	Env    []string
}

// Container is a container that Start has not started yet, or has.
type Container struct {
	ID string
	// Spec is the configuration. Changes before Start take effect.
	Spec *specs.Spec
	// Root is the root file system: an overlay over the image.
	Root string

	tb    testbed.TB
	dir   string // the bundle
	state string // of runc
}

var containers atomic.Int64

// New prepares a container of an image, whose first process has these arguments.
func New(tb testbed.TB, image Image, args ...string) *Container {
	tb.Helper()
	dir := tb.TempDir()
	mount(tb, "tmpfs", dir, "tmpfs", "size=512m")
	id := fmt.Sprintf("sluice-test-%d-%d", os.Getpid(), containers.Add(1))
	c := &Container{
		ID: id, Spec: newSpec(image, args), Root: filepath.Join(dir, "rootfs"), tb: tb, dir: dir,
		state: filepath.Join(dir, "runc"),
	}
	for _, folder := range []string{"rootfs", "upper", "work"} {
		c.must(os.Mkdir(filepath.Join(dir, folder), 0o755))
	}
	mount(tb, "overlay", c.Root, "overlay",
		fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", strings.Join(image.Layers, ":"), dir, dir))
	c.Write("/etc/hosts", "127.0.0.1 localhost\n")
	return c
}

// Write writes a file in the root.
func (c *Container) Write(path, content string) {
	c.tb.Helper()
	full := filepath.Join(c.Root, path)
	c.must(os.MkdirAll(filepath.Dir(full), 0o755))
	c.must(os.RemoveAll(full))
	c.must(os.WriteFile(full, []byte(content), 0o644))
}

// Bind mounts a file or a folder of the machine into the container, read-only.
func (c *Container) Bind(source, destination string) {
	c.Spec.Mounts = append(c.Spec.Mounts, specs.Mount{
		Destination: destination, Type: "bind", Source: source, Options: []string{"bind", "ro"},
	})
}

// Share mounts a folder of the machine into the container, at the same path.
func (c *Container) Share(folder string) {
	c.Spec.Mounts = append(c.Spec.Mounts, specs.Mount{
		Destination: folder, Type: "bind", Source: folder, Options: []string{"bind"},
	})
}

// Prepare writes the configuration for runc.
func (c *Container) Prepare() {
	c.tb.Helper()
	config, err := json.Marshal(c.Spec)
	c.must(err)
	c.must(os.WriteFile(filepath.Join(c.dir, "config.json"), config, 0o644))
}

// Start starts the container. Its first process goes on until the test's end.
func (c *Container) Start() {
	c.tb.Helper()
	c.Prepare()
	log := filepath.Join(c.dir, "log")
	c.tb.Cleanup(func() {
		if out, err := c.runc("delete", "--force", c.ID).CombinedOutput(); err != nil {
			c.tb.Logf("runc delete: %v\n%s", err, out)
		}
	})
	// No pipe to the process: it would stay open as long as the container runs.
	if err := c.runc("--log", log, "run", "--detach", "--bundle", c.dir, c.ID).Run(); err != nil {
		text, _ := os.ReadFile(log) // the error is enough where runc wrote no log
		c.tb.Fatalf("runc run: %v\n%s", err, text)
	}
}

// Run returns a command that starts the container and waits for its end. Prepare has to be called before.
func (c *Container) Run() *exec.Cmd { return c.runc("run", "--bundle", c.dir, c.ID) }

// Exec runs another process in the container that runs, with the container's environment and more variables. It returns
// the process's output.
func (c *Container) Exec(env []string, input string, args ...string) (output string, err error) {
	command := []string{"exec"}
	for _, e := range env {
		command = append(command, "--env", e)
	}
	cmd := c.runc(append(append(command, c.ID), args...)...)
	cmd.Stdin = strings.NewReader(input)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return out.String(), err
}

// PID is the PID of the first process.
func (c *Container) PID() int {
	c.tb.Helper()
	out, err := c.runc("state", c.ID).Output()
	c.must(err)
	var state specs.State
	c.must(json.Unmarshal(out, &state))
	return state.Pid
}

func (c *Container) runc(args ...string) *exec.Cmd {
	return exec.Command("runc", append([]string{"--root", c.state}, args...)...)
}

func (c *Container) must(err error) {
	c.tb.Helper()
	if err != nil {
		c.tb.Fatalf("container %s: %v", c.ID, err)
	}
}

// kept are the folders of a machine's root that an image has.
var kept = []string{"bin", "etc", "lib", "lib32", "lib64", "libx32", "opt", "sbin", "usr", "var"}

// Machine returns the root of this machine as an image. A layer hides the folders that no image has: a device 0:0 is a
// whiteout of overlayfs.
func Machine(tb testbed.TB) Image {
	tb.Helper()
	layer := tb.TempDir()
	mount(tb, "tmpfs", layer, "tmpfs", "") // overlayfs refuses a layer that lies in another one
	entries, err := os.ReadDir("/")
	if err != nil {
		tb.Fatalf("the machine's root: %v", err)
	}
	for _, e := range entries {
		if slices.Contains(kept, e.Name()) {
			continue
		}
		if err := unix.Mknod(filepath.Join(layer, e.Name()), unix.S_IFCHR, 0); err != nil {
			tb.Fatalf("hiding /%s: %v", e.Name(), err)
		}
	}
	return Image{Layers: []string{layer, "/"}}
}

func mount(tb testbed.TB, source, target, fstype, data string) {
	tb.Helper()
	if err := unix.Mount(source, target, fstype, 0, data); err != nil {
		tb.Fatalf("mounting %s: %v", target, err)
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			tb.Logf("unmounting %s: %v", target, err)
		}
	})
}
