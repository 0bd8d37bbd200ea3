package registry

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Layer is a layer of an image.
type Layer struct{ write func(io.Writer) error }

// noTime is the time of all files in layers: a layer has the same digest each time.
var noTime = time.Unix(0, 0)

// Files returns a layer of programs and texts, by their paths. Everyone may read and execute them.
func Files(files map[string][]byte) Layer {
	return Layer{func(w io.Writer) error {
		archive := tar.NewWriter(w)
		for _, name := range slices.Sorted(maps.Keys(files)) {
			header := tar.Header{
				Typeflag: tar.TypeReg, Name: strings.TrimPrefix(name, "/"), Size: int64(len(files[name])), Mode: 0o755,
				ModTime: noTime,
			}
			if err := archive.WriteHeader(&header); err != nil {
				return err
			}
			if _, err := archive.Write(files[name]); err != nil {
				return err
			}
		}
		return archive.Close()
	}}
}

// Folder returns a layer of the files in a folder, which must not change. The layer hides the same files as the folder
// hides as a layer of overlayfs.
func Folder(folder string) Layer {
	return Layer{func(w io.Writer) error {
		f := folderWriter{folder: folder, archive: tar.NewWriter(w), names: map[uint64]string{}}
		if err := filepath.WalkDir(folder, f.add); err != nil {
			return fmt.Errorf("the layer %s: %w", folder, err)
		}
		return f.archive.Close()
	}}
}

type folderWriter struct {
	folder  string
	archive *tar.Writer
	names   map[uint64]string // of files with several names, by inode
}

// Layers of Docker's mark what they hide by names.
const (
	hiddenPrefix = ".wh."
	opaque       = ".wh..wh..opq"
)

// add is called for each file.
func (f *folderWriter) add(path string, entry fs.DirEntry, err error) error {
	if err != nil || path == f.folder {
		return err
	}
	info, err := entry.Info()
	if err != nil {
		return err
	}
	name, err := filepath.Rel(f.folder, path)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s has no inode", path)
	}
	switch {
	case info.Mode()&fs.ModeCharDevice != 0 && stat.Rdev == 0:
		return f.mark(filepath.Join(filepath.Dir(name), hiddenPrefix+filepath.Base(name)))
	case info.Mode()&(fs.ModeDevice|fs.ModeSocket|fs.ModeNamedPipe) != 0:
		return nil // debootstrap makes some devices; containers have their own
	}
	if err := f.addFile(path, name, info, stat); err != nil {
		return err
	}
	value := make([]byte, 1)
	_, err = unix.Lgetxattr(path, "trusted.overlay.opaque", value)
	if err == nil && bytes.Equal(value, []byte("y")) {
		return f.mark(filepath.Join(name, opaque))
	}
	return nil // errors say that there is none
}

// mark adds an empty file whose name hides something in the layers beneath.
func (f *folderWriter) mark(name string) error {
	return f.archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, ModTime: noTime})
}

func (f *folderWriter) addFile(path, name string, info fs.FileInfo, stat *syscall.Stat_t) error {
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		var err error
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	header, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	header.Name, header.ModTime, header.Uname, header.Gname = name, noTime, "", ""
	header.AccessTime, header.ChangeTime = time.Time{}, time.Time{}
	if info.IsDir() {
		header.Name += "/"
	}
	first, isLink := f.names[stat.Ino]
	if info.Mode().IsRegular() && isLink {
		header.Typeflag, header.Linkname, header.Size = tar.TypeLink, first, 0
	}
	if err := f.archive.WriteHeader(header); err != nil || !info.Mode().IsRegular() || isLink {
		return err
	}
	if stat.Nlink > 1 {
		f.names[stat.Ino] = name
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(f.archive, file)
	return errors.Join(err, file.Close())
}

var library = regexp.MustCompile(`(/\S+) \(0x`)

// Program returns a program of this machine with its libraries, by their paths, for Files.
func Program(name string) (map[string][]byte, error) {
	paths := []string{name}
	// ldd fails for a static program, and tells of no library.
	out, err := exec.Command("ldd", name).Output()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return nil, fmt.Errorf("the libraries of %s: %w", name, err)
	}
	for _, match := range library.FindAllStringSubmatch(string(out), -1) {
		paths = append(paths, match[1])
	}
	files := map[string][]byte{}
	for _, p := range paths {
		if files[p], err = os.ReadFile(p); err != nil {
			return nil, fmt.Errorf("a program for an image: %w", err)
		}
	}
	return files, nil
}
