package truststore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// mountFlags are the attributes of all mounts made here. Nothing in the container may write the changed copy.
const mountFlags = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC

// mountOver mounts a changed copy over a store.
func (r *root) mountOver(p *place, old *os.File, info unix.Statx_t, contents change) error {
	f, discard, err := r.scratchFile()
	if err != nil {
		return fmt.Errorf("mounting over %s: %w", p.path, err)
	}
	defer discard() // the mount keeps the file
	err = writeBuffered(f, contents)
	if err == nil {
		err = inherit(f, old, info, "")
	}
	if err == nil {
		err = r.mountFile(f, p)
	}
	if err != nil {
		return fmt.Errorf("mounting over %s: %w", p.path, err)
	}
	return nil
}

// scratchFile makes a file in the container's /dev, which every runtime makes a tmpfs, or else in the root. discard
// removes its name; a mount of the file keeps the file. The kernel does not mount a file that never had a name.
func (r *root) scratchFile() (f *os.File, discard func(), err error) {
	var failed error
	for _, folder := range []string{"/dev", "/"} {
		f, discard, err := r.scratchFileIn(folder)
		if err == nil {
			return f, discard, nil
		}
		failed = errors.Join(failed, err)
	}
	return nil, nil, fmt.Errorf("finding a place for the changed copy: %w", failed)
}

func (r *root) scratchFileIn(folder string) (f *os.File, discard func(), err error) {
	dir, err := r.openat2(folder, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return nil, nil, err
	}
	if err := r.mayKeepScratch(dir); err != nil {
		return nil, nil, errors.Join(err, dir.Close())
	}
	name, err := temporaryName()
	if err == nil {
		f, err = openNew(dir, name)
	}
	if err != nil {
		return nil, nil, errors.Join(err, dir.Close())
	}
	return f, func() {
		_ = f.Close() // the mount keeps the file, or nothing does
		_ = unix.Unlinkat(int(dir.Fd()), name, 0)
		_ = dir.Close()
	}, nil
}

// mayKeepScratch refuses a volume that is no tmpfs.
func (r *root) mayKeepScratch(dir *os.File) error {
	info, err := statFD(dir)
	if err != nil {
		return err
	}
	var system unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &system); err != nil {
		return &fs.PathError{Op: "fstatfs", Path: dir.Name(), Err: err}
	}
	if info.Mnt_id != r.mount && system.Type != unix.TMPFS_MAGIC {
		return fmt.Errorf("%s is on another mount than the root and is no tmpfs", dir.Name())
	}
	return nil
}

// mountFile mounts a file over the one at a place.
func (r *root) mountFile(f *os.File, p *place) error {
	if err := r.unmountOurs(p); err != nil {
		return err
	}
	tree, err := unix.OpenTree(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return &fs.PathError{Op: "open_tree", Path: f.Name(), Err: err}
	}
	mount := os.NewFile(uintptr(tree), f.Name())
	defer func() { _ = mount.Close() }() // attached or given up
	return r.mountAt(mount, p)
}

// mountAt moves a mount that has no place yet over the file at a place.
func (r *root) mountAt(mount *os.File, p *place) error {
	target, err := openNoFollow(p.dir, p.name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer func() { _ = target.Close() }() // a descriptor that was only looked through
	attr := unix.MountAttr{Attr_set: mountFlags}
	if err := unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return &fs.PathError{Op: "mount_setattr", Path: p.path, Err: err}
	}
	return attach(mount, target)
}

// unmountOurs takes away the mount of an earlier run, which is known by its file that has no name any more: the kernel
// mounts nothing over such a file (ENOENT).
func (r *root) unmountOurs(p *place) error {
	target, err := openNoFollow(p.dir, p.name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer func() { _ = target.Close() }() // a descriptor that was only looked through
	info, err := statFD(target)
	if err != nil || info.Nlink > 0 {
		return err
	}
	return r.unmount(target)
}

// unmount takes away the mount that an open file is the root of. umount2(2) takes a path only, and the one of a
// descriptor must not start at a /proc of the container: the thread works in the folder of descriptors.
func (r *root) unmount(target *os.File) error {
	err := unix.Unshare(unix.CLONE_FS)
	if err == nil {
		err = unix.Fchdir(int(r.descriptors.Fd()))
	}
	if err == nil {
		err = unix.Unmount(strconv.Itoa(int(target.Fd())), unix.MNT_DETACH)
	}
	if err != nil {
		return &fs.PathError{Op: "unmount", Path: target.Name(), Err: err}
	}
	return nil
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
