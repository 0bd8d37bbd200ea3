package truststore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// maxLinks bounds the symbolic links from the path of a store to its file, as the kernel does.
	maxLinks = 40
	// maxPath is the kernel's bound of a path (PATH_MAX).
	maxPath = 4096
	// maxStore bounds the size of a store; 10,000 certificates in PEM are about 20 MiB.
	maxStore = 32 << 20
	// maxBound bounds one that is mounted over: a daemon reads it, and keeps the copy in memory.
	maxBound = 4 << 20
)

// root is the root of a container's file system. Every path is resolved inside of it.
type root struct {
	dir   *os.File
	mount uint64
	// descriptors is the folder of that name. A file is first opened as O_PATH, looked at, and then opened through this
	// folder, so that it cannot be exchanged for a device in between.
	descriptors *os.File
	bind        *Bind // nil: the root is written
}

// descriptors is the folder with the open files of this process.
const descriptors = "/proc/self/fd"

func openRoot(name string) (*root, error) {
	open, err := os.OpenFile(descriptors, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the folder of descriptors: %w", err)
	}
	dir, err := os.OpenFile(name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening the root: %w", err), open.Close())
	}
	r := &root{dir: dir, descriptors: open}
	info, err := statFD(dir)
	if err != nil {
		r.close()
		return nil, fmt.Errorf("looking at the root %s: %w", name, err)
	}
	r.mount = info.Mnt_id
	return r, nil
}

// close closes descriptors that were only looked through.
func (r *root) close() {
	_ = r.dir.Close()
	_ = r.descriptors.Close()
}

// openat2 opens a path inside of the root.
func (r *root) openat2(name string, flags, resolve uint64) (*os.File, error) {
	fd, err := r.openFD(name, flags, resolve)
	if err != nil {
		return nil, &fs.PathError{Op: "openat2", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// openFD is openat2 for the many paths of which most do not exist. A rename elsewhere makes the kernel give up ".."
// with EAGAIN.
func (r *root) openFD(name string, flags, resolve uint64) (int, error) {
	how := unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: resolve | unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	}
	if flags&(unix.O_PATH|unix.O_DIRECTORY) == 0 {
		how.Flags |= unix.O_NOCTTY | unix.O_NONBLOCK
	}
	for attempt := 0; ; attempt++ {
		fd, err := unix.Openat2(int(r.dir.Fd()), name, &how)
		if err == nil || attempt == 8 || err != unix.EAGAIN && err != unix.EINTR {
			return fd, err
		}
	}
}

// statFD is statx of an open file, with the mount on which it lies.
func statFD(f *os.File) (unix.Statx_t, error) {
	return statAt(f, "", unix.AT_EMPTY_PATH)
}

func statAt(dir *os.File, name string, flags int) (unix.Statx_t, error) {
	var info unix.Statx_t
	flags |= unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	err := unix.Statx(int(dir.Fd()), name, flags, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &info)
	if err == nil && info.Mask&unix.STATX_MNT_ID == 0 {
		err = errors.New("the kernel does not say on which mount the file lies (it does since Linux 5.8)")
	}
	if err != nil {
		return info, &fs.PathError{Op: "statx", Path: path.Join(dir.Name(), name), Err: err}
	}
	return info, nil
}

// isAbsent reports whether an error says that there is no file at a path.
func isAbsent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR)
}

// location identifies a name in a folder. It stays the same when the file is replaced.
type location struct {
	major, minor uint32
	inode        uint64
	name         string
}

// place is the place of a file, at the end of all symbolic links.
type place struct {
	location
	path     string   // by which it was found
	dir      *os.File // O_PATH
	changing bool     // kubelet exchanges the file
}

// exchanged is the link in a volume of a ConfigMap, a Secret or the like that kubelet exchanges when the contents
// change (AtomicWriter in k8s.io/kubernetes/pkg/volume/util).
const exchanged = "..data"

// close closes a descriptor that was only looked through. There may be no place.
func (p *place) close() {
	if p != nil {
		_ = p.dir.Close()
	}
}

// locate follows the symbolic links of a path to the folder and the name of the file.
func (r *root) locate(name string) (*place, error) {
	at := name
	for range maxLinks {
		folder, base := path.Split(at)
		if base == "" || base == "." || base == ".." {
			return nil, fmt.Errorf("%s is no file", name)
		}
		dir, err := r.openat2(folder, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return nil, err
		}
		info, err := statAt(dir, base, 0)
		if err == nil && info.Mode&unix.S_IFMT != unix.S_IFLNK {
			p, err := r.newPlace(name, dir, base)
			if err == nil {
				p.changing = slices.Contains(strings.Split(folder, "/"), exchanged)
			}
			return p, err
		}
		if err == nil {
			at, err = follow(dir, folder, base)
		}
		_ = dir.Close() // a descriptor that was only looked through
		if err != nil {
			return nil, err
		}
	}
	return nil, &fs.PathError{Op: "following links", Path: name, Err: unix.ELOOP}
}

// follow returns the path that a link leads to. The path is not cleaned, because only the kernel can resolve a ".."
// that follows a link.
func follow(dir *os.File, folder, base string) (string, error) {
	buf := make([]byte, maxPath)
	n, err := unix.Readlinkat(int(dir.Fd()), base, buf)
	if err != nil {
		return "", &fs.PathError{Op: "readlink", Path: folder + base, Err: err}
	}
	target := string(buf[:n])
	if !strings.HasPrefix(target, "/") {
		target = folder + target
	}
	if len(target) >= maxPath {
		return "", &fs.PathError{Op: "readlink", Path: folder + base, Err: unix.ENAMETOOLONG}
	}
	return target, nil
}

func (r *root) newPlace(name string, dir *os.File, base string) (*place, error) {
	info, err := statFD(dir)
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	where := location{major: info.Dev_major, minor: info.Dev_minor, inode: info.Ino, name: base}
	return &place{location: where, path: name, dir: dir}, nil
}

func (r *root) sizeLimit() uint64 {
	if r.bind != nil {
		return maxBound
	}
	return maxStore
}

// openRegular opens the file at a place to be read. Opening a FIFO waits and opening a device acts, so neither is done.
func (r *root) openRegular(p *place) (*os.File, error) {
	handle, err := openNoFollow(p.dir, p.name, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer func() { _ = handle.Close() }() // a descriptor that was only looked through
	info, err := statFD(handle)
	if err != nil {
		return nil, err
	}
	if info.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("%s is not a regular file (mode %o)", p.path, info.Mode)
	}
	if most := r.sizeLimit(); info.Size > most {
		return nil, fmt.Errorf("%s has %d bytes, more than %d", p.path, info.Size, most)
	}
	if err := r.refuse(handle); err != nil {
		return nil, err
	}
	fd, err := unix.Openat(int(r.descriptors.Fd()), strconv.Itoa(int(handle.Fd())),
		unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: p.path, Err: err}
	}
	return os.NewFile(uintptr(fd), p.path), nil
}

// openNoFollow opens a name in a folder and follows no link.
func openNoFollow(dir *os.File, name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	full := path.Join(dir.Name(), name)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: full, Err: err}
	}
	return os.NewFile(uintptr(fd), full), nil
}

// pseudo are the file systems whose files are regular by name only: to read /proc/kmsg waits and consumes.
var pseudo = []uint32{
	unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC,
	unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC, unix.EFIVARFS_MAGIC, unix.PSTOREFS_MAGIC,
	unix.SELINUX_MAGIC, unix.SMACK_MAGIC, unix.BINFMTFS_MAGIC, unix.DEVPTS_SUPER_MAGIC, unix.NSFS_MAGIC,
	configfsMagic, mqueueMagic,
}

// Magic numbers that golang.org/x/sys does not name (fs/configfs/mount.c, ipc/mqueue.c).
const (
	configfsMagic = 0x62656570
	mqueueMagic   = 0x19800202
)

// refuse refuses a file or a folder by its file system.
func (r *root) refuse(f *os.File) error {
	if r.bind != nil {
		return refuseUnlisted(f)
	}
	return refusePseudo(f)
}

func refusePseudo(f *os.File) error {
	var info unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &info); err != nil {
		return &fs.PathError{Op: "fstatfs", Path: f.Name(), Err: err}
	}
	if slices.Contains(pseudo, uint32(info.Type)) {
		return fmt.Errorf("%s lies on a file system of the kernel (type %x)", f.Name(), info.Type)
	}
	return nil
}

// openFolder opens a folder to be read, or to be written in. Unlike a place it has no path of its own.
func (r *root) openFolder(name string) (*os.File, error) {
	dir, err := r.openat2(name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	if err := r.refuse(dir); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// expand returns the paths that match patterns, in which "*" stands for any name of a folder or link to one.
func (r *root) expand(patterns []string) []string {
	var found []string
	for _, pattern := range patterns {
		found = append(found, r.expandOne(pattern)...)
	}
	return found
}

// maxMatches bounds the folders that one pattern matches.
const maxMatches = 64

func (r *root) expandOne(pattern string) []string {
	before, _, ok := strings.Cut(pattern, "*")
	if !ok {
		return []string{pattern}
	}
	folder, _ := path.Split(before)
	wild, rest, _ := strings.Cut(pattern[len(folder):], "/")
	dir, err := r.openFolder(folder)
	if err != nil {
		return nil // no folder, no store
	}
	defer func() { _ = dir.Close() }() // only read
	var names []string
	_ = eachEntry(dir, func(e entry) bool { // a folder with too many entries has been read in part
		if e.kind != unix.DT_DIR && e.kind != unix.DT_LNK {
			return true
		}
		if matches, err := path.Match(wild, string(e.name)); matches && err == nil {
			names = append(names, string(e.name))
		}
		return len(names) < maxMatches
	})
	slices.Sort(names)
	var found []string
	for _, name := range names {
		found = append(found, r.expandOne(folder+name+"/"+rest)...)
	}
	return found[:min(len(found), maxMatches)]
}
