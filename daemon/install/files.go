package install

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/files"
)

// tempSuffix ends the name of a temporary file, which begins with a dot. No runtime loads a configuration with this
// extension, or runs a plugin of such a name, so a half-written file does no harm.
const tempSuffix = ".sluice-tmp"

// lockTimeout is much longer than any installation takes, also on a disk that takes seconds to sync.
const lockTimeout = 30 * time.Second

// lock prevents another process, such as the daemon that is about to replace this one, from installing or uninstalling
// at the same time: both would write to the same temporary files. It makes the directory stateDir and locks it with
// flock(2); the kernel unlocks it when the process is killed.
func lock(stateDir string) (unlock func(), err error) {
	if err := os.MkdirAll(stateDir, 0o755); err != nil {
		return nil, err
	}
	d, err := os.Open(stateDir)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(lockTimeout)
	for {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = d.Close() }, nil
		case !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline):
			_ = d.Close() // only opened to be locked
			return nil, fmt.Errorf("locking %s, because another sluiced may be installing: %w", stateDir, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// checkWritable returns an error if this process may not write into the directory dir. The owner of a directory decides
// for root too, unless root has DAC_OVERRIDE. A directory that does not exist is no error.
func checkWritable(dir string) error {
	err := unix.Access(dir, unix.W_OK|unix.X_OK)
	if !errors.Is(err, unix.EACCES) {
		return nil
	}
	owner := "another user"
	var info unix.Stat_t
	if unix.Stat(dir, &info) == nil {
		owner = fmt.Sprintf("user %d", info.Uid)
	}
	return fmt.Errorf("%s belongs to %s, and sluiced may not write there without the capability DAC_OVERRIDE "+
		"(value cni.otherOwner of the chart): %w", dir, owner, err)
}

// step is called before every change on disk. Tests end the process in it.
var step = func(string) {}

// replace replaces the content of the file at path, or makes the file. A reader finds the old content or the new one at
// every moment, after a crash too. If path is a symbolic link, its target is replaced. Unless was is nil, the file must
// have that content still; otherwise its owner is writing it, and the error is ErrNoNetwork.
func replace(path string, data []byte, mode fs.FileMode, was []byte) error {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	dir, name := filepath.Split(path)
	temp := filepath.Join(dir, "."+name+tempSuffix)
	err := write(temp, data, mode, path)
	if err == nil && was != nil && !same(path, was) { // to write and sync takes milliseconds
		err = fmt.Errorf("%w: another program is writing it", ErrNoNetwork)
	}
	if err == nil {
		step("rename " + path)
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("writing %s: %w", path, err), files.Remove(temp))
	}
	return syncDir(dir)
}

// write makes the file temp and syncs it to disk. It has the owner of the file like, which it is about to replace, if
// the process may set it.
func write(temp string, data []byte, mode fs.FileMode, like string) (err error) {
	step("create " + temp)
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	step("write " + temp)
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil { // before the file belongs to another user
		return err
	}
	if info, err := os.Stat(like); err == nil {
		if old, ok := info.Sys().(*syscall.Stat_t); ok {
			if err := f.Chown(int(old.Uid), int(old.Gid)); err != nil && !errors.Is(err, os.ErrPermission) {
				return err
			}
		}
	}
	step("sync " + temp)
	return f.Sync()
}

// remove removes the file at path, if there is one, and syncs its directory.
func remove(path string) error {
	step("remove " + path)
	if err := os.Remove(path); err != nil {
		return ignoreMissing(err)
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes renames and removals in dir survive a power loss.
func syncDir(dir string) error {
	step("sync " + dir)
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// sweep removes temporary files that interrupted writes have left in dir.
func sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ignoreMissing(err)
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") && strings.HasSuffix(e.Name(), tempSuffix) {
			errs = append(errs, remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// same tells whether the file at path has this content.
func same(path string, data []byte) bool {
	have, err := os.ReadFile(path)
	return err == nil && bytes.Equal(have, data)
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
