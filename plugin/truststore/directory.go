package truststore

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// maxSubjects bounds the certificates of one hash, HASH.0, HASH.1 and so on.
	maxSubjects = 1000
	// maxCopied bounds the bytes of a directory that is copied to be mounted over, and maxCopiedDepth its depth.
	maxCopied      = 16 << 20
	maxCopiedDepth = 3
	// pemExtension ends the names of certificates in a hashed directory: `openssl rehash` looks at no others.
	pemExtension = ".pem"
)

// addDirectory adds to a hashed directory, and reports whether it is one. A folder without hashed names is no store.
func (r *run) addDirectory(path string) bool {
	dir, err := r.root.openFolder(path)
	if isAbsent(err) {
		return false
	}
	var action Action
	if err == nil {
		defer func() { _ = dir.Close() }() // its files are closed
		files, hashed := hashedNames(dir)
		if !hashed {
			return false
		}
		action, err = r.updateDirectory(dir, files)
	}
	r.note(Store{Path: path, Kind: Directory, Action: action}, err)
	return true
}

// hashedNames returns the names of our files in a folder, and whether it has a name such as 5ad8a5d6.0.
func hashedNames(dir *os.File) (files []string, hashed bool) {
	_ = eachEntry(dir, func(e entry) bool { // a folder with too many entries has been read in part
		hashed = hashed || isHashName(string(e.name))
		if isOurs(e, pemExtension) {
			files = append(files, string(e.name))
		}
		return true
	})
	return files, hashed
}

func isHashName(name string) bool {
	hash, number, ok := strings.Cut(name, ".")
	if !ok || len(hash) != 8 {
		return false
	}
	_, hashErr := strconv.ParseUint(hash, 16, 32)
	_, numberErr := strconv.ParseUint(number, 10, 16)
	return hashErr == nil && numberErr == nil
}

// updateDirectory brings a directory up to date that has some files of ours.
func (r *run) updateDirectory(dir *os.File, files []string) (Action, error) {
	if r.isDirectoryCurrent(dir, files) {
		return Present, nil
	}
	info, err := statFD(dir)
	if err != nil {
		return Failed, err
	}
	if r.options.Bind != nil {
		return r.bindOverDirectory(dir, info.Mnt_id)
	}
	writeErr := r.root.checkOwn(info, dir.Name())
	if writeErr == nil {
		writeErr = r.writeDirectory(dir, files)
	}
	if writeErr == nil {
		return Appended, nil
	}
	if err := r.mountOverDirectory(dir); err != nil {
		return Failed, errors.Join(writeErr, fmt.Errorf("mounting over %s: %w", dir.Name(), err))
	}
	return Bound, nil
}

// bindOverDirectory mounts a copy over a directory that is not to be written.
func (r *run) bindOverDirectory(dir *os.File, mount uint64) (Action, error) {
	if err := r.root.refuseShared(mount, dir.Name()); err != nil {
		return Failed, err
	}
	if err := r.mountOverDirectory(dir); err != nil {
		return Failed, fmt.Errorf("mounting over %s: %w", dir.Name(), err)
	}
	return Bound, nil
}

// isDirectoryCurrent reports whether a directory has all wanted certificates and none of ours besides.
func (r *run) isDirectoryCurrent(dir *os.File, files []string) bool {
	for _, name := range files {
		if !r.isNameWanted(strings.TrimSuffix(name, pemExtension)) {
			return false
		}
	}
	for _, c := range r.wanted {
		if !r.isHashLinked(dir, c) {
			return false
		}
	}
	return true
}

// isHashLinked reports whether OpenSSL would find a certificate in a directory: it looks at HASH.0, HASH.1 and so on
// until a number is missing.
func (r *run) isHashLinked(dir *os.File, c certificate) bool {
	for number := range maxSubjects {
		data, err := r.readLinked(dir, hashName(c.hash, number))
		if err != nil {
			return false
		}
		found := false
		_, err = scanPEM(strings.NewReader(data), r.mayBeKnown, func(b pemBlock) {
			found = found || b.valid && b.fingerprint == c.fingerprint
		})
		if err == nil && found {
			return true
		}
	}
	return false
}

// readLinked reads a small file in a directory, of which the name may be a link to another place in the root.
func (r *run) readLinked(dir *os.File, name string) (string, error) {
	p, err := r.root.locate(dir.Name() + "/" + name)
	if err != nil {
		return "", err
	}
	defer p.close()
	f, err := r.root.openRegular(p)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	data, err := io.ReadAll(io.LimitReader(f, maxSmall))
	return string(data), err
}

func hashName(hash string, number int) string { return hash + "." + strconv.Itoa(number) }

// writeDirectory removes those of our files that are not wanted, and adds the others.
func (r *run) writeDirectory(dir *os.File, files []string) error {
	for _, name := range files {
		if r.isNameWanted(strings.TrimSuffix(name, pemExtension)) {
			continue
		}
		if err := removeHashed(dir, name); err != nil {
			return err
		}
	}
	for _, c := range r.wanted {
		if r.isHashLinked(dir, c) {
			continue
		}
		if err := addHashed(dir, c); err != nil {
			return err
		}
	}
	return nil
}

// addHashed adds a certificate under a name of its own, and under one of its hash.
func addHashed(dir *os.File, c certificate) error {
	if _, err := writeFile(dir, c.name+pemExtension, c.pem); err != nil {
		return err
	}
	return linkHashed(dir, c)
}

// linkHashed gives a certificate the first free name of its hash.
func linkHashed(dir *os.File, c certificate) error {
	for number := range maxSubjects {
		name := hashName(c.hash, number)
		err := unix.Symlinkat(c.name+pemExtension, int(dir.Fd()), name)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EEXIST) {
			return &fs.PathError{Op: "symlink", Path: dir.Name() + "/" + name, Err: err}
		}
	}
	return fmt.Errorf("linking %s: %d certificates have the hash %s", c.name, maxSubjects, c.hash)
}

// removeHashed removes a file of ours and the link that its hash has. The last link of the hash moves into the gap:
// OpenSSL stops looking at the first number that is missing.
func removeHashed(dir *os.File, name string) error {
	data, err := readSmall(dir, name)
	if err == nil {
		if old, err := certificateIn(data); err == nil {
			if err := unlinkHashed(dir, old.hash, name); err != nil {
				return err
			}
		}
	}
	return remove(dir, name)
}

func unlinkHashed(dir *os.File, hash, target string) error {
	gap, last := -1, -1
	buf := make([]byte, maxPath)
	for number := range maxSubjects {
		if _, err := statAt(dir, hashName(hash, number), 0); err != nil {
			break
		}
		last = number
		n, err := unix.Readlinkat(int(dir.Fd()), hashName(hash, number), buf)
		if err == nil && string(buf[:n]) == target {
			gap = number
		}
	}
	if gap < 0 {
		return nil
	}
	if gap == last {
		return remove(dir, hashName(hash, gap))
	}
	err := unix.Renameat(int(dir.Fd()), hashName(hash, last), int(dir.Fd()), hashName(hash, gap))
	if err != nil {
		return fmt.Errorf("closing the gap at %s/%s: %w", dir.Name(), hashName(hash, gap), err)
	}
	return nil
}

// mountOverDirectory mounts a copy of a directory, with the certificates, over it. Symbolic links are copied as links:
// the copy has the same place.
func (r *run) mountOverDirectory(dir *os.File) error {
	mount, err := newTmpfs()
	if err != nil {
		return err
	}
	defer func() { _ = mount.Close() }() // attached or given up
	copied, err := openNoFollow(mount, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer func() { _ = copied.Close() }() // its files are closed
	left := int64(maxCopied)
	if err := r.copyFolder(copied, dir, &left, maxCopiedDepth); err != nil {
		return err
	}
	if err := r.writeCopy(copied); err != nil {
		return err
	}
	attr := unix.MountAttr{Attr_set: mountFlags}
	if err := unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return &fs.PathError{Op: "mount_setattr", Path: dir.Name(), Err: err}
	}
	return attach(mount, dir)
}

// writeCopy is writeDirectory for a copy, which has no path in the root yet.
func (r *run) writeCopy(copied *os.File) error {
	for _, name := range ours(copied, pemExtension) {
		if err := removeHashed(copied, name); err != nil {
			return err
		}
	}
	for _, c := range r.wanted {
		if err := addHashed(copied, c); err != nil {
			return err
		}
	}
	return nil
}

// newTmpfs makes a tmpfs that is not yet mounted anywhere. It goes away with its descriptor.
func newTmpfs() (*os.File, error) {
	config, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("opening a tmpfs: %w", err)
	}
	defer func() { _ = unix.Close(config) }() // the mount keeps the file system
	for key, value := range map[string]string{
		"source": MountSource, "size": strconv.Itoa(2 * maxCopied), "mode": "0755",
	} {
		if err := unix.FsconfigSetString(config, key, value); err != nil {
			return nil, fmt.Errorf("setting %s of a tmpfs: %w", key, err)
		}
	}
	if err := unix.FsconfigCreate(config); err != nil {
		return nil, fmt.Errorf("creating a tmpfs: %w", err)
	}
	mount, err := unix.Fsmount(config, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("mounting a tmpfs: %w", err)
	}
	return os.NewFile(uintptr(mount), "tmpfs"), nil
}

// copyFolder copies the links, the regular files and the folders in a folder, as long as bytes are left.
func (r *run) copyFolder(to, from *os.File, left *int64, depth int) error {
	if depth == 0 {
		return nil
	}
	var failed error
	err := eachEntry(from, func(e entry) bool {
		name := string(e.name)
		switch e.kind {
		case unix.DT_LNK:
			failed = copyLink(to, from, name)
		case unix.DT_DIR:
			failed = r.copySubfolder(to, from, name, left, depth)
		case unix.DT_REG:
			failed = r.copyFile(to, from, name, left)
		}
		return failed == nil
	})
	return errors.Join(err, failed)
}

func copyLink(to, from *os.File, name string) error {
	buf := make([]byte, maxPath)
	n, err := unix.Readlinkat(int(from.Fd()), name, buf)
	if err == nil {
		err = unix.Symlinkat(string(buf[:n]), int(to.Fd()), name)
	}
	if err != nil {
		return &fs.PathError{Op: "copying the link", Path: from.Name() + "/" + name, Err: err}
	}
	return nil
}

func (r *run) copySubfolder(to, from *os.File, name string, left *int64, depth int) error {
	source, err := openNoFollow(from, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer func() { _ = source.Close() }() // only read
	if err := unix.Mkdirat(int(to.Fd()), name, 0o755); err != nil {
		return &fs.PathError{Op: "mkdir", Path: name, Err: err}
	}
	target, err := openNoFollow(to, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer func() { _ = target.Close() }() // its files are closed
	return r.copyFolder(target, source, left, depth-1)
}

func (r *run) copyFile(to, from *os.File, name string, left *int64) error {
	source, err := r.root.openRegular(&place{path: from.Name() + "/" + name, dir: from, location: location{name: name}})
	if err != nil {
		return err
	}
	defer func() { _ = source.Close() }() // only read
	info, err := statFD(source)
	if err != nil {
		return err
	}
	if *left -= int64(info.Size); *left < 0 {
		return fmt.Errorf("the folder has more than %d bytes", maxCopied)
	}
	target, err := openNew(to, name)
	if err != nil {
		return err
	}
	_, err = io.Copy(target, io.LimitReader(source, int64(info.Size)))
	if err == nil {
		err = inherit(target, source, info, "")
	}
	if err = errors.Join(err, target.Close()); err != nil {
		return fmt.Errorf("copying %s/%s: %w", from.Name(), name, err)
	}
	return nil
}
