package nested

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/truststore"
)

// tmpfs is the file system with the copies of stores for the containers of a pod. The kernel bounds it: a mount
// namespace may keep copies for longer than its container runs. Its memory is free again when the engine has closed it,
// and the last mount in a container has gone.
type tmpfs struct {
	names atomic.Uint64 // of the copies so far

	mu     sync.Mutex // guards the fields below
	mount  *os.File   // it has no place; nil before the first copy
	closed bool
}

// The bounds of the copies for the containers of a pod, which are enough for some hundred containers: in bytes, and in
// files.
const (
	tmpfsSize  = 128 << 20
	tmpfsFiles = 8 << 10
)

func (t *tmpfs) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	if t.mount != nil {
		_ = t.mount.Close() // only kept
	}
}

// placeAt is where the tmpfs is mounted, for a thread alone. It exists wherever a daemon runs.
const placeAt = "/proc"

// place mounts the tmpfs in a new mount namespace of the calling thread, and opens it. Only a mount of the thread's own
// mount namespace can be cloned (before Linux 6.15), and the tmpfs must not appear on the node. The namespace is not
// kept for the next copy: the mounts of the daemon in it would pin the netns of pods.
func (t *tmpfs) place() (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("making a mount namespace for copies of stores: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("making mounts private: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, errors.New("making a copy of a store: its pod is not looked after any more")
	}
	if t.mount == nil {
		mount, err := newTmpfs()
		if err != nil {
			return nil, fmt.Errorf("making a tmpfs for copies of stores: %w", err)
		}
		t.mount = mount
	}
	err := unix.MoveMount(int(t.mount.Fd()), "", unix.AT_FDCWD, placeAt, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("mounting the tmpfs for copies of stores: %w", err)
	}
	placed := t.mount
	if t.mount, err = cloneMount(placed, ""); err != nil { // for the next copy
		_ = placed.Close() // the next copy is on a tmpfs of its own
		return nil, err
	}
	return placed, nil
}

// newTmpfs makes the tmpfs, and a mount of it that has no place.
func newTmpfs() (*os.File, error) {
	fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen: %w", err)
	}
	system := os.NewFile(uintptr(fd), "a tmpfs")
	defer func() { _ = system.Close() }() // the mount keeps it
	for _, option := range [][2]string{
		{"source", truststore.MountSource}, {"mode", "0700"},
		{"size", strconv.Itoa(tmpfsSize)}, {"nr_inodes", strconv.Itoa(tmpfsFiles)},
	} {
		if err := unix.FsconfigSetString(fd, option[0], option[1]); err != nil {
			return nil, fmt.Errorf("fsconfig %s: %w", option[0], err)
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return nil, fmt.Errorf("fsconfig: %w", err)
	}
	mount, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC,
		unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsmount: %w", err)
	}
	return os.NewFile(uintptr(mount), "the tmpfs for copies of stores"), nil
}

// cloneMount makes a mount, which has no place yet, of a file in a mount, or of all of it for no name.
func cloneMount(mount *os.File, name string) (*os.File, error) {
	fd, err := unix.OpenTree(int(mount.Fd()), name, unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: mount.Name() + "/" + name, Err: err}
	}
	return os.NewFile(uintptr(fd), mount.Name()), nil
}

// copies makes files on the tmpfs of a pod for one container, each with a mount of it that has no place yet. A thread
// does it that has the tmpfs in a mount namespace of its own, until close.
type copies struct {
	tmpfs    *tmpfs
	begin    sync.Once
	requests chan chan<- madeCopy
	done     chan struct{}
}

type madeCopy struct {
	file, mount *os.File
	discard     func()
	err         error
}

func newCopies(t *tmpfs) *copies {
	return &copies{tmpfs: t, requests: make(chan chan<- madeCopy), done: make(chan struct{})}
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

func (c *copies) serve() {
	runtime.LockOSThread() // for ever: the thread ends with this function
	folder, err := c.tmpfs.place()
	if err == nil {
		defer func() { _ = folder.Close() }() // only looked through
	}
	for {
		select {
		case answer := <-c.requests:
			made := madeCopy{err: err}
			if err == nil {
				made = makeCopy(folder, strconv.FormatUint(c.tmpfs.names.Add(1), 10))
			}
			answer <- made
		case <-c.done:
			return
		}
	}
}

func makeCopy(folder *os.File, name string) madeCopy {
	fd, err := unix.Openat(int(folder.Fd()), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return madeCopy{err: fmt.Errorf("making a copy of a store: %w", err)}
	}
	file := os.NewFile(uintptr(fd), "a copy of a store")
	remove := func() { _ = unix.Unlinkat(int(folder.Fd()), name, 0) } // the tmpfs goes away with its last mount
	mount, err := cloneMount(folder, name)
	if err != nil {
		remove()
		return madeCopy{err: errors.Join(fmt.Errorf("making a mount of a copy: %w", err), file.Close())}
	}
	return madeCopy{file: file, mount: mount, discard: func() {
		_, _ = file.Close(), mount.Close() // the mount has a place, or is given up
		remove()
	}}
}
