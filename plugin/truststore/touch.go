package truststore

import (
	"strings"

	"golang.org/x/sys/unix"
)

// file identifies a file or a folder.
type file struct {
	major, minor uint32
	inode        uint64
}

// touched are the files and folders at which a mount over a store can be in the way of a program.
type touched struct {
	root    *root
	all     map[file]bool // the stores, and the folders above them
	folders map[file]bool // the stores, which may be folders, and those that have one
	looked  map[string]file
}

// Mounted returns the paths of the mounts that Add has made with Options.Bind.
func (b *Bind) Mounted() ([]string, error) {
	mounts, err := b.mounts()
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, m := range mounts {
		if m.ours {
			paths = append(paths, m.path)
		}
	}
	return paths, nil
}

// Touches reports whether one of some paths is one of the stores, as Mounted returns them, lies in the folder of one,
// or is a folder above one. Links are followed within the root, where all paths begin.
func Touches(rootPath string, stores, paths []string) (bool, error) {
	r, err := openRoot(rootPath)
	if err != nil {
		return false, err
	}
	defer r.close()
	t := touched{r, map[file]bool{}, map[file]bool{}, map[string]file{}}
	for _, s := range stores {
		t.add(s)
	}
	for _, p := range paths {
		if t.all[t.at(p)] || t.folders[t.at(folderOf(p))] {
			return true, nil
		}
	}
	return false, nil
}

// add adds a store, and the folders above it.
func (t *touched) add(store string) {
	t.all[t.at(store)] = true
	t.folders[t.at(store)] = true
	t.folders[t.at(folderOf(store))] = true
	for folder := folderOf(store); folder != ""; folder = folderOf(folder) {
		t.all[t.at(folder)] = true
	}
	delete(t.all, file{})
	delete(t.folders, file{})
}

// at is the file at a path, at the end of links; the zero value if there is none, or if the root forbids the way.
func (t *touched) at(path string) file {
	if f, ok := t.looked[path]; ok {
		return f
	}
	f := t.look(path)
	t.looked[path] = f
	return f
}

func (t *touched) look(path string) file {
	opened, err := t.root.openat2(path, unix.O_PATH, 0)
	if err != nil {
		return file{}
	}
	defer func() { _ = opened.Close() }() // only looked at
	info, err := statFD(opened)
	if err != nil {
		return file{}
	}
	return file{info.Dev_major, info.Dev_minor, info.Ino}
}

// folderOf is the path up to its last name; empty for the root. The names before stay as they are: after a link, ".."
// is elsewhere.
func folderOf(path string) string {
	path = strings.TrimRight(path, "/")
	return path[:strings.LastIndexByte(path, '/')+1]
}
