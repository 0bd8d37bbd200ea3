package truststore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// mountFlags are the attributes of all mounts made here. Nothing in the container may write the changed copy.
const mountFlags = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC

// mountOver mounts a changed copy over a store. After a rotation the new mount covers the earlier one.
func (r *root) mountOver(p *place, old *os.File, info unix.Statx_t, contents change) error {
	f, err := r.unnamedFile()
	if err != nil {
		return fmt.Errorf("mounting over %s: %w", p.path, err)
	}
	defer func() { _ = f.Close() }() // the mount keeps the file
	err = writeBuffered(f, contents)
	if err == nil {
		err = inherit(f, old, info)
	}
	if err == nil {
		err = mountFile(f, p)
	}
	if err != nil {
		return fmt.Errorf("mounting over %s: %w", p.path, err)
	}
	return nil
}

// unnamedFile makes a file without a name, which lives as long as a mount of it: in the container's /dev, which every
// runtime makes a tmpfs, or else in the root.
func (r *root) unnamedFile() (*os.File, error) {
	var failed error
	for _, folder := range []string{"/dev", "/"} {
		f, err := r.unnamedFileIn(folder)
		if err == nil {
			return f, nil
		}
		failed = errors.Join(failed, err)
	}
	return nil, fmt.Errorf("finding a place for the changed copy: %w", failed)
}

func (r *root) unnamedFileIn(folder string) (*os.File, error) {
	dir, err := r.openat2(folder, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }() // a descriptor that was only looked through
	info, err := statFD(dir)
	if err != nil {
		return nil, err
	}
	var fsInfo unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &fsInfo); err != nil {
		return nil, &fs.PathError{Op: "fstatfs", Path: folder, Err: err}
	}
	if info.Mnt_id != r.mount && fsInfo.Type != unix.TMPFS_MAGIC {
		return nil, fmt.Errorf("%s is on another mount than the root and is no tmpfs", folder)
	}
	fd, err := unix.Openat(int(dir.Fd()), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &fs.PathError{Op: "open an unnamed file in", Path: folder, Err: err}
	}
	return os.NewFile(uintptr(fd), folder), nil
}

// mountFile mounts a file over the one at a place.
func mountFile(f *os.File, p *place) error {
	target, err := openNoFollow(p.dir, p.name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer func() { _ = target.Close() }() // a descriptor that was only looked through
	tree, err := unix.OpenTree(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return &fs.PathError{Op: "open_tree", Path: f.Name(), Err: err}
	}
	mount := os.NewFile(uintptr(tree), f.Name())
	defer func() { _ = mount.Close() }() // attached or given up
	attr := unix.MountAttr{Attr_set: mountFlags}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return &fs.PathError{Op: "mount_setattr", Path: p.path, Err: err}
	}
	return attach(mount, target)
}

// attach moves a mount that has no place yet over a file or a folder.
func attach(mount, target *os.File) error {
	err := unix.MoveMount(int(mount.Fd()), "", int(target.Fd()), "",
		unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	if err != nil {
		return &fs.PathError{Op: "move_mount", Path: target.Name(), Err: err}
	}
	return nil
}

// mountFallback mounts the container's own bundle, which has the CA, over the fallback, so that the programs that an
// environment variable leads to the fallback trust the roots of the image as well.
func (r *run) mountFallback(own *place) {
	if own == nil {
		return // the fallback stays as it is
	}
	err := r.tryMountFallback(own)
	r.note(r.options.Fallback, Fallback, Bound, err)
}

func (r *run) tryMountFallback(own *place) error {
	target, err := r.root.locate(r.options.Fallback)
	if err != nil {
		return err
	}
	defer target.close()
	f, err := r.root.openRegular(own)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // the mount keeps the file
	if err := mountFile(f, target); err != nil {
		return fmt.Errorf("mounting %s over %s: %w", own.path, target.path, err)
	}
	return nil
}
