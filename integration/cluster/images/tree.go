package images

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// tree contains the files of an image, by path.
type tree struct {
	entries map[string]entry
	err     error // the first failure
}

// entry is a file, folder or link in a tree.
type entry struct {
	header tar.Header
	source string // the path of the content on this machine, or
	data   []byte // the content
}

// newTree creates a root folder in which /bin, /lib, /lib64 and /sbin are links into /usr, with the folders that
// programs expect.
func newTree() *tree {
	t := &tree{entries: map[string]entry{}}
	for _, name := range []string{"bin", "lib", "lib64", "sbin"} {
		t.dir("/usr/"+name, 0o755)
		t.symlink("/"+name, "usr/"+name)
	}
	t.dir("/tmp", 0o1777)
	t.dir("/var/tmp", 0o1777)
	for _, name := range []string{"/dev", "/etc", "/proc", "/root", "/run", "/sys"} {
		t.dir(name, 0o755)
	}
	t.symlink("/var/run", "/run")
	t.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n")
	t.text("/etc/group", "root:x:0:\nnogroup:x:65534:\n")
	return t
}

func (t *tree) add(name string, e entry) {
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		if _, ok := t.entries[dir]; !ok {
			t.entries[dir] = entry{header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755}}
		}
	}
	t.entries[name] = e
}

func (t *tree) dir(name string, mode int64) {
	t.add(name, entry{header: tar.Header{Typeflag: tar.TypeDir, Mode: mode}})
}

func (t *tree) symlink(name, target string) {
	t.add(name, entry{header: tar.Header{Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}})
}

func (t *tree) text(name, text string) { t.textMode(name, text, 0o644) }

func (t *tree) script(name, text string) { t.textMode(name, text, 0o755) }

func (t *tree) textMode(name, text string, mode int64) {
	header := tar.Header{Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(text))}
	t.add(name, entry{header: header, data: []byte(text)})
}

// user adds a user with a group of the same name and a home.
func (t *tree) user(name string, id int) {
	home := "/home/" + name
	t.text("/etc/passwd", fmt.Sprintf("%s%s:x:%d:%d::%s:/bin/sh\n", t.entries["/etc/passwd"].data, name, id, id, home))
	t.text("/etc/group", fmt.Sprintf("%s%s:x:%d:\n", t.entries["/etc/group"].data, name, id))
	t.add(home, entry{header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755, Uid: id, Gid: id}})
}

// program adds a file of this machine under another name.
func (t *tree) program(name, source string) {
	info, err := os.Stat(source)
	if err != nil {
		t.fail(err)
		return
	}
	header := tar.Header{Typeflag: tar.TypeReg, Mode: 0o755, Size: info.Size(), ModTime: info.ModTime()}
	t.add(name, entry{header: header, source: source})
}

// file adds a file, link or folder of this machine under its own path, with the links in the path resolved.
func (t *tree) file(source string) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(source))
	if err != nil {
		t.fail(err)
		return
	}
	name := filepath.Join(dir, filepath.Base(source))
	t.fileAs(name, name)
}

// below adds a file or link of this machine, or a folder with all that is in it, under another name.
func (t *tree) below(source, name string) {
	t.fail(filepath.WalkDir(source, func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			t.fileAs(path, name+strings.TrimPrefix(path, source))
		}
		return err
	}))
}

// matching adds the files and folders of a root that match patterns, under their paths in it.
func (t *tree) matching(root string, patterns ...string) error {
	for _, pattern := range patterns {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return err
		}
		if found == nil {
			return fmt.Errorf("%s/%s is missing (integration/setup.sh installs it)", root, pattern)
		}
		for _, source := range found {
			t.below(source, strings.TrimPrefix(source, root))
		}
	}
	return nil
}

// fileAs adds a file, link or folder under another name. A folder or link that newTree has created stays.
func (t *tree) fileAs(source, name string) {
	info, err := os.Lstat(source)
	if err != nil {
		t.fail(err)
		return
	}
	_, exists := t.entries[name]
	switch {
	case info.IsDir():
		if !exists {
			t.dir(name, int64(info.Mode().Perm()))
		}
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(source)
		t.fail(err)
		if !exists { // newTree has created /bin, /lib and so on
			t.symlink(name, target)
		}
	case info.Mode().IsRegular():
		t.add(name, entry{header: tar.Header{
			Typeflag: tar.TypeReg, Mode: int64(info.Mode().Perm()), Size: info.Size(),
			// Python uses compiled bytecode only if it records the modification time of the source.
			ModTime: info.ModTime(),
		}, source: source})
	}
}

func (t *tree) fail(err error) {
	if t.err == nil {
		t.err = err
	}
}

// tar returns the tree as an archive. The same files result in the same bytes.
func (t *tree) tar() ([]byte, error) {
	if t.err != nil {
		return nil, t.err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(t.entries)) {
		e := t.entries[name]
		h := e.header
		h.Name = strings.TrimPrefix(name, "/")
		if h.Typeflag == tar.TypeDir {
			h.Name += "/"
		}
		h.Format = tar.FormatGNU
		h.ModTime = h.ModTime.Truncate(time.Second)
		if err := w.WriteHeader(&h); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if err := e.content(w); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func (e entry) content(w io.Writer) error {
	if e.source == "" {
		_, err := w.Write(e.data)
		return err
	}
	f, err := os.Open(e.source)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	_, err = io.Copy(w, f)
	return err
}
