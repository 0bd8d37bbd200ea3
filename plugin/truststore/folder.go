package truststore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// maxEntries bounds the entries of one folder that are read.
const maxEntries = 20_000

// entry is an entry of a folder. The name is valid during the visit only: most names are of no interest, and are not
// copied.
type entry struct {
	name []byte
	kind byte // unix.DT_REG and others
}

// entryBuffers are buffers for the entries of folders.
var entryBuffers = sync.Pool{New: func() any { return new([16 << 10]byte) }}

// eachEntry calls visit for the entries of a folder, at most maxEntries, until it returns false.
func eachEntry(dir *os.File, visit func(entry) bool) error {
	fd := int(dir.Fd())
	if _, err := unix.Seek(fd, 0, io.SeekStart); err != nil {
		return fmt.Errorf("reading the folder %s: %w", dir.Name(), err)
	}
	if err := eachEntryFD(fd, visit); err != nil {
		return fmt.Errorf("reading the folder %s: %w", dir.Name(), err)
	}
	return nil
}

// eachEntryFD is eachEntry for a folder that has been opened just now.
func eachEntryFD(fd int, visit func(entry) bool) error {
	buf, _ := entryBuffers.Get().(*[16 << 10]byte)
	defer entryBuffers.Put(buf)
	for count := 0; ; {
		n, err := unix.Getdents(fd, buf[:])
		if err != nil {
			return err
		}
		if n == 0 {
			return nil
		}
		for entries := buf[:n]; len(entries) > 0; {
			var e entry
			e, entries = nextEntry(entries)
			if string(e.name) == "." || string(e.name) == ".." {
				continue
			}
			count++
			if count > maxEntries {
				return fmt.Errorf("it has more than %d entries", maxEntries)
			}
			if e.kind == unix.DT_UNKNOWN {
				e.kind = kindOf(fd, string(e.name))
			}
			if !visit(e) {
				return nil
			}
		}
	}
}

// nextEntry returns the first entry that getdents64(2) has written, and the others. Each is the inode (8 bytes), the
// offset (8), the length (2), the type (1) and the name with a zero.
func nextEntry(entries []byte) (e entry, rest []byte) {
	const header = 19
	length := int(binary.NativeEndian.Uint16(entries[16:]))
	name := entries[header:length]
	return entry{name: name[:bytes.IndexByte(name, 0)], kind: entries[header-1]}, entries[length:]
}

// kindOf is the type of an entry of a file system that does not say it with the name.
func kindOf(dir int, name string) byte {
	var info unix.Stat_t
	if err := unix.Fstatat(dir, name, &info, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return unix.DT_UNKNOWN
	}
	return byte(info.Mode & unix.S_IFMT >> 12) // as the kernel's S_DT does it
}

// ours returns the names of our files in a folder.
func ours(dir *os.File, extension string) []string {
	var names []string
	_ = eachEntry(dir, func(e entry) bool { // a folder with too many entries has been read in part
		if isOurs(e, extension) {
			names = append(names, string(e.name))
		}
		return true
	})
	return names
}

func isOurs(e entry, extension string) bool {
	return strings.HasPrefix(string(e.name), namePrefix) && strings.HasSuffix(string(e.name), extension)
}
