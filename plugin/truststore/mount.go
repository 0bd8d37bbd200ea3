package truststore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

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
func mountFile(f *os.File, p *place) error {
	if err := unmountOurs(p); err != nil {
		return err
	}
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

// unmountOurs takes away the mount of an earlier run, which is known by its file that has no name any more: the kernel
// mounts nothing over such a file (ENOENT).
func unmountOurs(p *place) error {
	target, err := openNoFollow(p.dir, p.name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer func() { _ = target.Close() }() // a descriptor that was only looked through
	info, err := statFD(target)
	if err != nil || info.Nlink > 0 {
		return err
	}
	if err := unix.Unmount(fmt.Sprintf("%s/%d", descriptors, target.Fd()), unix.MNT_DETACH); err != nil {
		return &fs.PathError{Op: "unmount", Path: p.path, Err: err}
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

// mountFallback mounts the container's own bundle, which has the CA, over the fallback, so that the programs that an
// environment variable leads to the fallback trust the roots of the image as well.
func (r *run) mountFallback(ctx context.Context, own *place) {
	if own == nil {
		return // the fallback stays as it is
	}
	err := r.tryMountFallback(ctx, own)
	r.note(r.options.Fallback, Fallback, Bound, err)
}

func (r *run) tryMountFallback(ctx context.Context, own *place) error {
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
	info, err := statFD(f)
	if err != nil {
		return err
	}
	if info.Nlink == 0 { // a changed copy: the kernel mounts a file without a name only once
		return r.root.mountOver(target, f, info, func(w io.Writer) error {
			return copyWithout(ctx, w, f, int64(info.Size), nil)
		})
	}
	if err := mountFile(f, target); err != nil {
		return fmt.Errorf("mounting %s over %s: %w", own.path, target.path, err)
	}
	return nil
}
