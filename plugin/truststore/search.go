package truststore

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxSearchCPU bounds the time of the search for folders of Python packages on the CPU, and maxSearch the time with
	// waits for a disk or for a busy CPU: a container starts that much later. maxSearched bounds the folders, and
	// maxSearchDepth their depth.
	// A pyenv's packages lie in /root/.pyenv/versions/3.13.1/lib/python3.13/site-packages, which is depth 7.
	maxSearchCPU   = 20 * time.Millisecond
	maxSearch      = 100 * time.Millisecond
	maxSearched    = 4000
	maxSearchDepth = 9
	// maxQueued bounds the folders that are still to be searched.
	maxQueued = 16_000
)

// notSearched are the folders in which no Python packages lie and that have many others.
var notSearched = map[string]bool{
	"/proc": true, "/sys": true, "/dev": true, "/run": true, "/boot": true, "/etc": true, "/bin": true, "/sbin": true,
	"/usr/share": true, "/usr/include": true, "/usr/src": true, "/usr/bin": true, "/usr/sbin": true,
	"/usr/libexec": true, "/usr/games": true, "/usr/lib/jvm": true, "/usr/lib/gcc": true, "/usr/lib/locale": true,
	"/usr/lib/modules": true, "/usr/lib/firmware": true, "/usr/lib/systemd": true, "/usr/lib/git-core": true,
	"/usr/lib/apt": true, "/usr/lib/dpkg": true, "/usr/lib/udev": true, "/usr/lib/ruby": true, "/usr/lib/php": true,
	"/usr/local/bin": true, "/usr/local/go": true, "/usr/local/include": true, "/usr/local/share": true,
	"/usr/local/lib/ruby": true, "/usr/local/rustup": true, "/var/cache": true, "/var/log": true,
	"/var/lib/dpkg": true, "/var/lib/apt": true, "/var/lib/rpm": true, "/var/spool": true, "/lib/modules": true,
	"/lib/firmware": true, "/lib/apk": true, "/.sluice-ca": true,
}

// namesNotSearched are the names of folders, anywhere, in which no Python packages lie.
var namesNotSearched = map[string]bool{
	"node_modules": true, ".git": true, "__pycache__": true, ".cache": true, ".npm": true, ".cargo": true,
	".rustup": true, ".gradle": true, ".m2": true,
}

// notInEnvironment are the names of folders at the top of a virtual environment, or of one of conda, in which no
// packages lie.
var notInEnvironment = map[string]bool{
	"bin": true, "include": true, "share": true, "etc": true, "ssl": true, "man": true, "conda-meta": true,
}

// search searches the root for folders of Python packages, those near the top first. Volumes are not searched.
// unsearched says why the search ended before it had seen all folders, if it did.
func (r *root) search(ctx context.Context, limit int) (packages []string, unsearched string) {
	s := searcher{root: r}
	deadline, cpu := time.Now().Add(maxSearch), threadTime()
	queue := []string{""}
	for searched := 0; len(queue) > 0; searched++ {
		switch {
		case ctx.Err() != nil || time.Now().After(deadline) || threadTime()-cpu > maxSearchCPU:
			return s.packages, fmt.Sprintf("%d folders searched for certifi, and no time for more", searched)
		case searched == maxSearched:
			return s.packages, fmt.Sprintf("%d folders searched for certifi, and no more", searched)
		case len(s.packages) >= limit:
			return s.packages, fmt.Sprintf("%d folders of Python packages found, and no more searched for", limit)
		}
		folder := queue[0]
		queue = queue[1:]
		for _, name := range s.subfolders(folder) {
			if len(queue) < maxQueued && s.isWorth(folder, name) {
				queue = append(queue, folder+"/"+name)
			}
		}
	}
	return s.packages, ""
}

// threadTime is the time that the calling thread has spent on the CPU.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0 // the other bounds hold
	}
	return time.Duration(t.Nano())
}

// searcher is one search.
type searcher struct {
	root     *root
	packages []string
}

// isWorth reports whether a subfolder is to be searched. It takes note of a folder of packages.
func (s *searcher) isWorth(folder, name string) bool {
	path := folder + "/" + name
	switch {
	case isPackages(name):
		s.packages = append(s.packages, path)
	case isPython(folder, name): // the standard library is large, and has packages in these two only
		s.packages = append(s.packages, path+"/site-packages", path+"/dist-packages")
	case namesNotSearched[name], notSearched[path], folder == "/usr/lib" && strings.Contains(name, "-linux-"):
	default:
		return strings.Count(path, "/") < maxSearchDepth
	}
	return false
}

// isPackages reports whether a name is that of a folder for Python packages.
func isPackages(name string) bool { return name == "site-packages" || name == "dist-packages" }

// isPython reports whether a folder is a Python's standard library, such as /usr/lib/python3.13.
func isPython(folder, name string) bool {
	if !strings.HasSuffix(folder, "/lib") && !strings.HasSuffix(folder, "/lib64") {
		return false
	}
	version, ok := strings.CutPrefix(name, "python")
	if !ok {
		version, ok = strings.CutPrefix(name, "pypy")
	}
	return ok && version != "" && strings.Trim(version, "0123456789.t") == ""
}

// subfolders are the names of the folders in a folder that may have packages below them. A folder that cannot be read
// has none.
func (s *searcher) subfolders(folder string) []string {
	fd, err := s.root.openFD(folder+"/", unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_NO_XDEV|unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return nil
	}
	defer func() { _ = unix.Close(fd) }() // only read
	var found []string
	environment := false
	_ = eachEntryFD(fd, func(e entry) bool { // a folder with too many entries has been read in part
		switch e.kind {
		case unix.DT_REG:
			environment = environment || string(e.name) == "pyvenv.cfg"
		case unix.DT_DIR:
			environment = environment || string(e.name) == "conda-meta"
			found = append(found, string(e.name))
		}
		return true
	})
	if environment {
		found = slices.DeleteFunc(found, func(name string) bool { return notInEnvironment[name] })
	}
	return found
}
