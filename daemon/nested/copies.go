package nested

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/truststore"
)

// copies makes files on a tmpfs, each with a mount of it that has no place yet. Only a mount of the calling thread's
// own mount namespace can be cloned (before Linux 6.15), and the tmpfs must not appear on the node. So a thread has a
// mount namespace of its own, which ends with close.
type copies struct {
	begin    sync.Once
	requests chan chan<- madeCopy
	done     chan struct{}
}

type madeCopy struct {
	file, mount *os.File
	discard     func()
	err         error
}

func newCopies() *copies {
	return &copies{requests: make(chan chan<- madeCopy), done: make(chan struct{})}
}

// New makes an empty file. discard closes both and removes the name, which the file needs until its mount has a place.
func (c *copies) New() (file, mount *os.File, discard func(), err error) {
	c.begin.Do(func() { go c.serve() })
	answer := make(chan madeCopy, 1)
	select {
	case c.requests <- answer:
	case <-c.done:
		return nil, nil, nil, errors.New("making a copy of a store: too late")
	}
	made := <-answer
	return made.file, made.mount, made.discard, made.err
}

func (c *copies) close() { close(c.done) }

// copiesAt is where the tmpfs is mounted, for the thread alone. It exists wherever a daemon runs.
const copiesAt = "/proc"

func (c *copies) serve() {
	runtime.LockOSThread() // for ever: the thread ends with this function
	folder, err := mountCopies()
	if err == nil {
		defer func() { _ = folder.Close() }() // only looked through
	}
	for count := 0; ; count++ {
		select {
		case answer := <-c.requests:
			made := madeCopy{err: err}
			if err == nil {
				made = makeCopy(folder, strconv.Itoa(count))
			}
			answer <- made
		case <-c.done:
			return
		}
	}
}

// copiesSize bounds the copies for one container.
const copiesSize = 128 << 20

func mountCopies() (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("making a mount namespace for copies of stores: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("making mounts private: %w", err)
	}
	err := unix.Mount(truststore.MountSource, copiesAt, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC,
		fmt.Sprintf("mode=0700,size=%d", copiesSize))
	if err != nil {
		return nil, fmt.Errorf("mounting a tmpfs for copies of stores: %w", err)
	}
	folder, err := os.Open(copiesAt)
	if err != nil {
		return nil, fmt.Errorf("opening the tmpfs for copies of stores: %w", err)
	}
	return folder, nil
}

func makeCopy(folder *os.File, name string) madeCopy {
	fd, err := unix.Openat(int(folder.Fd()), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return madeCopy{err: fmt.Errorf("making a copy of a store: %w", err)}
	}
	file := os.NewFile(uintptr(fd), "a copy of a store")
	remove := func() { _ = unix.Unlinkat(int(folder.Fd()), name, 0) } // the tmpfs goes away with its last mount
	fd, err = unix.OpenTree(int(folder.Fd()), name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		remove()
		return madeCopy{err: errors.Join(fmt.Errorf("making a mount of a copy: %w", err), file.Close())}
	}
	mount := os.NewFile(uintptr(fd), "the mount of a copy")
	return madeCopy{file: file, mount: mount, discard: func() {
		_, _ = file.Close(), mount.Close() // the mount has a place, or is given up
		remove()
	}}
}
