package truststore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// addFallback makes the fallback lead to the container's own bundle, or checks that the fallback itself has the CA. A
// link leads to the bundle by name, so certificates that update-ca-certificates adds later are in it.
func (r *run) addFallback(ctx context.Context, own *place) {
	action, err := r.tryFallback(ctx, own)
	r.note(Store{Path: r.options.Fallback, Kind: Fallback, Action: action}, err)
}

func (r *run) tryFallback(ctx context.Context, own *place) (Action, error) {
	folder, name := path.Split(r.options.Fallback)
	dir, err := r.root.openMount(folder)
	if err != nil {
		return Failed, err
	}
	defer func() { _ = dir.Close() }() // a descriptor that was only looked through
	target, linked := readLink(dir, name)
	if linked && own != nil && target == own.path {
		return Present, nil
	}
	if linked { // by an earlier run, to a bundle that is gone
		if err := r.root.unmount(dir); err != nil {
			return Failed, err
		}
		return r.tryFallback(ctx, own)
	}
	if own == nil {
		err := r.checkFallback(ctx)
		if err == nil && !r.hasBundle() {
			r.linkBundle()
		}
		return Present, err
	}
	return Linked, r.root.mountLink(dir, name, own.path)
}

// hasBundle reports whether the container has a bundle, be it a damaged one.
func (r *run) hasBundle() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.report.Stores, func(s Store) bool { return s.Kind == Bundle })
}

// rpmMarks are paths of which one exists where packages of RPM are, or may come.
var rpmMarks = []string{"/usr/bin/rpm", "/var/lib/rpm", "/usr/lib/sysimage/rpm"}

// bundleToMake is the place of a bundle where a container has none. It is Debian's, which programs from elsewhere know
// best, but with RPM that of Fedora and RHEL: their package ca-certificates makes /etc/ssl/certs a link, and cannot be
// installed where that is a folder.
func (r *root) bundleToMake() string {
	if r.hasOne(rpmMarks) {
		return fedoraBundle
	}
	return debianBundle
}

// linkBundle gives a container without a bundle one that is a link to the fallback, for the programs that read no
// environment variables. update-ca-certificates and package managers replace the link. Without the mount, as in another
// container of an image that has been made from this one, it leads nowhere: there is no bundle then, as before.
func (r *run) linkBundle() {
	name := r.root.bundleToMake()
	action, err := r.root.makeLink(name, r.options.Fallback)
	r.note(Store{Path: name, Kind: Bundle, Action: action}, err)
}

// makeLink makes a link in the container's own layer.
func (r *root) makeLink(path, target string) (Action, error) {
	slash := strings.LastIndexByte(path, '/')
	folder, name := path[:slash], path[slash+1:]
	dir, err := r.makeFolder(folder)
	if err != nil {
		return Failed, err
	}
	defer func() { _ = dir.Close() }() // its link is made
	if current, linked := readLink(dir, name); linked && current == target {
		return Present, nil
	}
	info, err := statFD(dir)
	if err == nil {
		err = r.checkOwn(info, folder)
	}
	if err != nil {
		return Failed, err
	}
	if err := unix.Symlinkat(target, int(dir.Fd()), name); err != nil {
		return Failed, &fs.PathError{Op: "symlink", Path: path, Err: err}
	}
	return Linked, nil
}

// markFallback keeps the fallback, to which a bundle of the container may be a link, from being taken for a store.
func (r *run) markFallback(seen map[location]bool) {
	folder, name := path.Split(r.options.Fallback)
	dir, err := r.root.openMount(folder)
	if err != nil {
		return // addFallback reports it
	}
	p, err := r.root.newPlace(r.options.Fallback, dir, name)
	if err == nil {
		seen[p.location] = true
		p.close()
	}
}

// openMount opens a folder on another mount than the root.
func (r *root) openMount(folder string) (*os.File, error) {
	dir, err := r.openat2(folder, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	info, err := statFD(dir)
	if err == nil && info.Mnt_id == r.mount {
		err = fmt.Errorf("%s is not on a mount of its own", folder)
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// readLink returns the target of the link that an earlier run has made.
func readLink(dir *os.File, name string) (target string, ok bool) {
	buf := make([]byte, maxPath)
	n, err := unix.Readlinkat(int(dir.Fd()), name, buf)
	return string(buf[:max(n, 0)]), err == nil
}

// checkFallback checks that the fallback has the CA.
func (r *run) checkFallback(ctx context.Context) error {
	p, err := r.root.locate(r.options.Fallback)
	if err != nil {
		return err
	}
	defer p.close()
	f, err := r.root.openRegular(p)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read
	missing, err := r.changeOfBundle(ctx, f)
	if err == nil && missing != nil {
		err = errors.New("the fallback does not have the CA")
	}
	return err
}

// mountLink mounts a file system with nothing but a link over a folder.
func (r *root) mountLink(dir *os.File, name, target string) error {
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return &fs.PathError{Op: "fsopen", Path: "tmpfs", Err: err}
	}
	system := os.NewFile(uintptr(fsfd), "tmpfs")
	defer func() { _ = system.Close() }() // the mount keeps it
	for _, option := range [][2]string{{"mode", "0755"}, {"size", "4k"}, {"nr_inodes", "2"}} {
		if err := unix.FsconfigSetString(fsfd, option[0], option[1]); err != nil {
			return &fs.PathError{Op: "fsconfig", Path: "tmpfs", Err: err}
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return &fs.PathError{Op: "fsconfig", Path: "tmpfs", Err: err}
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, mountFlags&^unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return &fs.PathError{Op: "fsmount", Path: "tmpfs", Err: err}
	}
	mount := os.NewFile(uintptr(fd), "tmpfs")
	defer func() { _ = mount.Close() }() // attached or given up
	if err := unix.Symlinkat(target, fd, name); err != nil {
		return &fs.PathError{Op: "symlink", Path: name, Err: err}
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return &fs.PathError{Op: "mount_setattr", Path: name, Err: err}
	}
	return attach(mount, dir)
}
