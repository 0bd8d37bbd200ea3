package oci

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// A user namespace has these IDs on the machine.
const (
	firstID = 100000
	ids     = 65536
)

// NewInUserNamespace is New for a container in a user namespace. The files of the image belong to the users of the
// container: the layers are mounted with other IDs, as containerd does it.
func NewInUserNamespace(tb testbed.TB, image Image, args ...string) *Container {
	tb.Helper()
	namespace := userNamespace(tb)
	mapped := Image{Env: image.Env}
	for _, layer := range image.Layers {
		mapped.Layers = append(mapped.Layers, mountMapped(tb, layer, namespace))
	}
	c := New(tb, mapped, args...)
	for _, folder := range []string{c.dir, c.Root} { // an overlay's root has the owner of the upper folder
		c.must(os.Chown(folder, firstID, firstID))
	}
	for _, m := range c.Spec.Mounts {
		path := filepath.Join(c.Root, m.Destination)
		c.must(os.MkdirAll(path, 0o755))
		c.must(os.Chmod(path, os.ModeSticky|0o777)) // runc gives the mode to the mount, and one is /tmp
		c.must(os.Chown(path, firstID, firstID))
	}
	mapping := []specs.LinuxIDMapping{{ContainerID: 0, HostID: firstID, Size: ids}}
	c.Spec.Linux.Namespaces = append(c.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	c.Spec.Linux.UIDMappings, c.Spec.Linux.GIDMappings = mapping, mapping
	return c
}

// userNamespace returns a new user namespace.
func userNamespace(tb testbed.TB) *os.File {
	tb.Helper()
	cmd := exec.Command("sleep", "infinity")
	mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: firstID, Size: ids}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: mapping, GidMappings: mapping, Pdeathsig: syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		tb.Fatalf("making a user namespace: %v", err)
	}
	f, err := os.Open("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/ns/user")
	_ = cmd.Process.Kill() // the file keeps the namespace
	_ = cmd.Wait()         // it was killed
	if err != nil {
		tb.Fatalf("opening a user namespace: %v", err)
	}
	tb.Cleanup(func() { _ = f.Close() }) // nothing was written
	return f
}

// mountMapped mounts a folder with the IDs of a user namespace, and returns the path of the mount.
func mountMapped(tb testbed.TB, folder string, namespace *os.File) string {
	tb.Helper()
	target := tb.TempDir()
	if err := tryMountMapped(folder, target, namespace); err != nil {
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			tb.Logf("unmounting %s: %v", target, err)
		}
	})
	return target
}

func tryMountMapped(folder, target string, namespace *os.File) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, folder, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("cloning the mount of %s: %w", folder, err)
	}
	defer func() { _ = unix.Close(tree) }() // mounted by then, or given up
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(namespace.Fd())}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("mapping the IDs of %s: %w", folder, err)
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mounting %s: %w", folder, err)
	}
	return nil
}
