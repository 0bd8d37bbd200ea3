package truststore

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// replace makes a store have its changed contents: by rename where the store is the container's own, or else by a
// mount over it. old is the store's file.
func (r *root) replace(p *place, old *os.File, contents change) (Action, error) {
	info, err := statFD(old)
	if err != nil {
		return Failed, err
	}
	if r.bind != nil {
		if err := r.bindOver(p, old, info, contents); err != nil {
			return Failed, err
		}
		return Bound, nil
	}
	renameErr := r.checkOwn(info, p.path)
	if renameErr == nil {
		renameErr = rename(p, old, info, contents)
	}
	if renameErr == nil {
		return Appended, nil
	}
	if err := r.mountOver(p, old, info, contents); err != nil {
		return Failed, errors.Join(renameErr, err)
	}
	return Bound, nil
}

// checkOwn returns an error for a file or a folder on another mount than the root, such as a volume.
func (r *root) checkOwn(info unix.Statx_t, path string) error {
	if info.Mnt_id != r.mount {
		return fmt.Errorf("%s is on another mount than the root, and is not written", path)
	}
	return nil
}

// rename writes the changed contents beside a file and renames them over it. Nothing is synced: after a crash of the
// node the container is started anew.
func rename(p *place, old *os.File, info unix.Statx_t, contents change) error {
	err := writeBeside(p.dir, p.name, func(f *os.File) error {
		if err := writeBuffered(f, contents); err != nil {
			return err
		}
		return inherit(f, old, info, "")
	})
	if err != nil {
		return fmt.Errorf("replacing %s: %w", p.path, err)
	}
	return nil
}

// writeBeside writes a file under a temporary name in a folder, and renames it.
func writeBeside(dir *os.File, name string, write func(*os.File) error) error {
	temporary, err := temporaryName()
	if err != nil {
		return err
	}
	f, err := openNew(dir, temporary)
	if err != nil {
		return err
	}
	err = write(f)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = unix.Renameat(int(dir.Fd()), temporary, int(dir.Fd()), name)
		if err != nil {
			err = fmt.Errorf("renaming the new file: %w", err)
		}
	}
	if err != nil {
		_ = unix.Unlinkat(int(dir.Fd()), temporary, 0) // the error that counts is the first
	}
	return err
}

func openNew(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name,
		unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &fs.PathError{Op: "create", Path: dir.Name() + "/" + name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

func temporaryName() (string, error) {
	var random [8]byte
	if _, err := rand.Read(random[:]); err != nil {
		return "", fmt.Errorf("naming a temporary file: %w", err)
	}
	return "." + namePrefix + hex.EncodeToString(random[:]), nil
}

// writeBuffered writes in large pieces, for the sake of small certificates.
func writeBuffered(f *os.File, contents change) error {
	w := bufio.NewWriterSize(f, 64<<10)
	if err := contents(w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("writing the new file: %w", err)
	}
	return nil
}

// inherit gives a new file the owner, the mode and the extended attributes of the old one, or only one attribute. The
// owner is last: to change the mode of another user's file would take one more capability.
func inherit(f, old *os.File, info unix.Statx_t, only string) error {
	copyAttributes(f, old, only)
	if err := unix.Fchmod(int(f.Fd()), uint32(info.Mode)&0o7777); err != nil {
		return fmt.Errorf("giving the new file its mode: %w", err)
	}
	if err := f.Chown(int(info.Uid), int(info.Gid)); err != nil {
		return fmt.Errorf("giving the new file its owner: %w", err)
	}
	return nil
}

// maxAttributes bounds the names, and the values together, of extended attributes.
const maxAttributes = 64 << 10

// copyAttributes copies the extended attributes that can be copied, or one only. A label that this process may not set
// is left out: the file system gives the new file one.
func copyAttributes(f, old *os.File, only string) {
	size, err := unix.Flistxattr(int(old.Fd()), nil)
	if err != nil || size == 0 || size > maxAttributes {
		return
	}
	left := maxAttributes
	names := make([]byte, size)
	if size, err = unix.Flistxattr(int(old.Fd()), names); err != nil {
		return
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:size]), "\x00"), "\x00") {
		length, err := unix.Fgetxattr(int(old.Fd()), name, nil)
		if err != nil || length > left || only != "" && name != only ||
			strings.HasPrefix(name, "trusted.overlay.") {
			continue
		}
		left -= length
		value := make([]byte, length)
		if length, err = unix.Fgetxattr(int(old.Fd()), name, value); err == nil {
			_ = unix.Fsetxattr(int(f.Fd()), name, value[:length], 0) // as the comment above says
		}
	}
}

// writeFile makes a small file in a folder have some contents. It reports whether the file had them already.
func writeFile(dir *os.File, name string, contents []byte) (present bool, err error) {
	if current, err := readSmall(dir, name); err == nil && bytes.Equal(current, contents) {
		return true, nil
	}
	err = writeBeside(dir, name, func(f *os.File) error {
		if err := writeAll(f, contents); err != nil {
			return err
		}
		if err := f.Chmod(0o644); err != nil {
			return fmt.Errorf("giving the new file its mode: %w", err)
		}
		giveToOwner(f, dir)
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("writing %s: %w", dir.Name()+"/"+name, err)
	}
	return false, nil
}

// giveToOwner gives a new file, or a new folder, to the owner of the folder in which it lies: where the container has a
// user namespace and this process has not, the container would show it without an owner. Such a file serves as well,
// so an error does not count.
func giveToOwner(f, dir *os.File) {
	its, err := statFD(f)
	if err != nil {
		return
	}
	owner, err := statFD(dir)
	if err == nil && (its.Uid != owner.Uid || its.Gid != owner.Gid) {
		_ = unix.Fchownat(int(f.Fd()), "", int(owner.Uid), int(owner.Gid), unix.AT_EMPTY_PATH)
	}
}

// maxSmall bounds the files with a single certificate.
const maxSmall = 4 * maxCA

// readSmall reads a file of ours. Another kind of file by its name is opened without waiting and not read.
func readSmall(dir *os.File, name string) ([]byte, error) {
	info, err := statAt(dir, name, 0)
	if err != nil {
		return nil, err
	}
	if info.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("%s/%s is not a regular file", dir.Name(), name)
	}
	f, err := openNoFollow(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	data, err := io.ReadAll(io.LimitReader(f, maxSmall))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", f.Name(), err)
	}
	return data, nil
}
