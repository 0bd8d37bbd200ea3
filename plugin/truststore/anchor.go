package truststore

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// formerAnchors returns the fingerprints of the anchors that an earlier run has left and that are not wanted any more,
// with the lengths of their certificates. A damaged anchor is replaced.
func (r *run) formerAnchors() map[fingerprint]int {
	former := make(map[fingerprint]int)
	for _, a := range anchors {
		dir, err := r.root.openFolder(a.folder)
		if err != nil {
			continue // addAnchors reports it
		}
		for _, name := range ours(dir, a.extension) {
			data, err := readSmall(dir, name)
			if err != nil {
				continue
			}
			c, err := certificateIn(data)
			if err == nil && bytes.HasPrefix(data, []byte(marker)) && !r.isWanted(c.fingerprint) {
				former[c.fingerprint] = len(c.der)
			}
		}
		_ = dir.Close() // only read
	}
	return former
}

// addAnchors writes the anchors of those distributions of which the container has the tools.
func (r *run) addAnchors() {
	for _, a := range anchors {
		action, err := r.addAnchor(a)
		if action != "" || err != nil {
			r.note(Store{Path: a.folder, Kind: Anchor, Action: action}, err)
		}
	}
}

// addAnchor returns no action where the distribution's tools cannot be expected.
func (r *run) addAnchor(a anchor) (Action, error) {
	if !r.root.hasOne(append(a.needs, a.folder)) {
		return "", nil
	}
	dir, err := r.root.makeFolder(a.folder)
	if err != nil {
		return Failed, err
	}
	defer func() { _ = dir.Close() }() // its files are closed
	info, err := statFD(dir)
	if err == nil {
		err = r.root.checkOwn(info, a.folder)
	}
	if err != nil {
		return Failed, err
	}
	action := Present
	for _, name := range ours(dir, a.extension) {
		if !r.isNameWanted(strings.TrimSuffix(name, a.extension)) {
			if err := remove(dir, name); err != nil {
				return Failed, err
			}
			action = Appended
		}
	}
	for _, c := range r.wanted {
		present, err := writeFile(dir, c.name+a.extension, c.pem)
		if err != nil {
			return Failed, err
		}
		if !present {
			action = Appended
		}
	}
	return action, nil
}

func (r *run) isNameWanted(name string) bool {
	return slices.ContainsFunc(r.wanted, func(c certificate) bool { return c.name == name })
}

func remove(dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "remove", Path: dir.Name() + "/" + name, Err: err}
	}
	return nil
}

// hasOne reports whether one of the paths exists.
func (r *root) hasOne(paths []string) bool {
	for _, p := range paths {
		fd, err := r.openFD(p, unix.O_PATH, 0)
		if err == nil {
			_ = unix.Close(fd) // a descriptor that was only looked through
			return true
		}
	}
	return false
}

// makeFolder opens a folder, and makes it and the folders above it where they are missing.
func (r *root) makeFolder(name string) (*os.File, error) {
	for i := 1; i <= len(name); i++ {
		if i < len(name) && name[i] != '/' {
			continue
		}
		if r.hasOne([]string{name[:i]}) {
			continue
		}
		slash := strings.LastIndexByte(name[:i], '/')
		above, err := r.openat2(name[:slash+1], unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return nil, err
		}
		err = makeOne(r, above, name[slash+1:i])
		_ = above.Close() // a descriptor that was only looked through
		if err != nil {
			return nil, err
		}
	}
	return r.openFolder(name)
}

// makeOne makes a folder, but not on a volume.
func makeOne(r *root, above *os.File, name string) error {
	info, err := statFD(above)
	if err == nil {
		err = r.checkOwn(info, above.Name())
	}
	if err != nil {
		return err
	}
	if err := unix.Mkdirat(int(above.Fd()), name, 0o755); err != nil {
		return &fs.PathError{Op: "mkdir", Path: above.Name() + name, Err: err}
	}
	made, err := openNoFollow(above, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer func() { _ = made.Close() }()       // nothing is written
	if err := made.Chmod(0o755); err != nil { // the umask is that of the runtime
		return fmt.Errorf("giving the new folder its mode: %w", err)
	}
	giveToOwner(made, above)
	return nil
}
