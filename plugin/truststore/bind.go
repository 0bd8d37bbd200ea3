package truststore

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MountSource is the source of the mounts that are made with Options.Bind, as /proc/PID/mountinfo shows it.
const MountSource = "sluice-ca"

// Bind makes Add write nothing in the root: a changed copy is mounted over every store. It is for containers whose root
// becomes an image. Anchors and the fallback are left out.
type Bind struct {
	// Copy returns an empty file on a tmpfs of the caller, whose source is MountSource, and a mount of it that has no
	// place yet. discard closes both and removes the name: a mount that has a place keeps the file.
	Copy func() (file, mount *os.File, discard func(), err error)
	// Mountinfo reads the file of that name of a process in the container's mount namespace.
	Mountinfo func() ([]byte, error)
}

// selinuxLabel is the attribute with the label of SELinux. A copy has no others: they take memory that the bounds of a
// tmpfs do not count.
const selinuxLabel = "security.selinux"

// opensslFiles are the files that OpenSSL reads before the directory with hashed names.
var opensslFiles = []string{"/usr/lib/ssl/cert.pem", "/etc/ssl/cert.pem", "/etc/pki/tls/cert.pem"}

// storable are the file systems with files over which a copy is mounted: others, such as FUSE, are served by processes
// that may never answer.
var storable = []uint32{
	unix.OVERLAYFS_SUPER_MAGIC, unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC,
	unix.TMPFS_MAGIC, unix.F2FS_SUPER_MAGIC, zfsMagic, unix.SQUASHFS_MAGIC, unix.EROFS_SUPER_MAGIC_V1,
}

// zfsMagic is not in golang.org/x/sys (ZFS_SUPER_MAGIC in OpenZFS).
const zfsMagic = 0x2fc12fc1

// refuseUnlisted refuses a file system that is not listed.
func refuseUnlisted(f *os.File) error {
	var info unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &info); err != nil {
		return &os.PathError{Op: "fstatfs", Path: f.Name(), Err: err}
	}
	if !slices.Contains(storable, uint32(info.Type)) {
		return fmt.Errorf("%s lies on a file system (type %x) over which sluice mounts nothing", f.Name(), info.Type)
	}
	return nil
}

// bindOver mounts a changed copy over a store.
func (r *root) bindOver(p *place, old *os.File, info unix.Statx_t, contents change) error {
	if err := r.refuseShared(info.Mnt_id, p.path); err != nil {
		return err
	}
	f, mount, discard, err := r.bind.Copy()
	if err != nil {
		return fmt.Errorf("mounting over %s: %w", p.path, err)
	}
	defer discard()
	err = writeBuffered(f, contents)
	if err == nil {
		err = inherit(f, old, info, selinuxLabel)
	}
	if err == nil {
		err = r.unmountOurs(p)
	}
	if err == nil {
		err = r.mountAt(mount, p)
	}
	if err != nil {
		return fmt.Errorf("mounting over %s: %w", p.path, err)
	}
	return nil
}

// refuseShared refuses a mount that propagates: what is mounted there would appear outside of the container.
func (r *root) refuseShared(id uint64, path string) error {
	mounts, err := r.bind.mounts()
	if err != nil {
		return err
	}
	at := slices.IndexFunc(mounts, func(m mountpoint) bool { return m.id == id })
	switch {
	case at < 0:
		return fmt.Errorf("%s lies on a mount that the container does not see: its root is a folder of another", path)
	case mounts[at].shared:
		return fmt.Errorf("%s lies on a mount that other mount namespaces share", path)
	}
	return nil
}

// mountpoint is a line of mountinfo.
type mountpoint struct {
	id     uint64
	path   string // from the root of the process
	shared bool
	ours   bool
}

func (b *Bind) mounts() ([]mountpoint, error) {
	data, err := b.Mountinfo()
	if err != nil {
		return nil, fmt.Errorf("reading the container's mounts: %w", err)
	}
	return parseMountinfo(string(data)), nil
}

// parseMountinfo parses the file as proc_pid_mountinfo(5) describes it. Lines that are not like that are left out.
func parseMountinfo(text string) []mountpoint {
	var found []mountpoint
	for line := range strings.Lines(text) {
		fields, system, ok := strings.Cut(line, " - ")
		before, after := strings.Fields(fields), strings.Fields(system)
		if !ok || len(before) < 6 || len(after) < 2 {
			continue
		}
		id, err := strconv.ParseUint(before[0], 10, 64)
		if err != nil {
			continue
		}
		found = append(found, mountpoint{
			id: id, path: unescape(before[4]), ours: after[0] == "tmpfs" && after[1] == MountSource,
			shared: slices.ContainsFunc(before[6:], func(f string) bool { return strings.HasPrefix(f, "shared:") }),
		})
	}
	return found
}

// unescape undoes the kernel's escapes of spaces and the like: \040.
func unescape(path string) string {
	var b strings.Builder
	for i := 0; i < len(path); i++ {
		if path[i] == '\\' && i+3 < len(path) {
			if value, err := strconv.ParseUint(path[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(value))
				i += 3
				continue
			}
		}
		b.WriteByte(path[i])
	}
	return b.String()
}

// Unbind takes away the mounts that Add has made with Options.Bind: all, or those over stores of Python packages alone.
// enter is as Options.Enter.
func Unbind(rootPath string, bind *Bind, packagesOnly bool, enter func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for ever: its mount namespace is not the process's
		done <- unbind(rootPath, bind, packagesOnly, enter)
	}()
	return <-done
}

func unbind(rootPath string, bind *Bind, packagesOnly bool, enter func() error) error {
	r, err := openRoot(rootPath)
	if err != nil {
		return err
	}
	defer r.close()
	if err := enter(); err != nil {
		return err
	}
	mounts, err := bind.mounts()
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range slices.Backward(mounts) { // those that lie on others come last
		if m.ours && (!packagesOnly || isInPackage(m.path)) {
			errs = append(errs, r.unmountID(m))
		}
	}
	return errors.Join(errs...)
}

// unmountID takes a mount away, if it is the one on top at its path.
func (r *root) unmountID(m mountpoint) error {
	target, err := r.openat2(m.path, unix.O_PATH, unix.RESOLVE_NO_SYMLINKS)
	if isAbsent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = target.Close() }() // a descriptor that was only looked through
	info, err := statFD(target)
	if err != nil || info.Mnt_id != m.id {
		return err
	}
	return r.unmount(target)
}
