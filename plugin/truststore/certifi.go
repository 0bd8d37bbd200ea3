package truststore

import (
	"context"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxSearch bounds the time of the search for certifi: a container starts that much later. maxSearched bounds its
	// folders, and maxSearchDepth their depth.
	// A pyenv's packages lie in /root/.pyenv/versions/3.13.1/lib/python3.13/site-packages, which is depth 7.
	maxSearch      = 25 * time.Millisecond
	maxSearched    = 4000
	maxSearchDepth = 9
	// maxQueued bounds the folders that are still to be searched.
	maxQueued = 16_000
	// maxPackages bounds the folders of packages that are found.
	maxPackages = 64
)

// inPackages are the bundles that Python packages bring along, in their folder. Those of requests, httpx, aiohttp and
// of most others is certifi's.
var inPackages = []string{
	"certifi/cacert.pem",
	"pip/_vendor/certifi/cacert.pem",
	"botocore/cacert.pem",
	"httplib2/cacerts.txt",
	"grpc/_cython/_credentials/roots.pem",
}

// fixedCertifi are patterns of certifi's places outside of folders for packages.
var fixedCertifi = []string{
	"/usr/local/aws-cli/v2/*/dist/awscli/botocore/cacert.pem",
	"/usr/local/aws-cli/v2/*/dist/certifi/cacert.pem",
	"/usr/lib/google-cloud-sdk/lib/third_party/certifi/cacert.pem",
	"/google-cloud-sdk/lib/third_party/certifi/cacert.pem",
}

// commonPackages are patterns of the folders of packages that are looked at before the search, however long it takes.
var commonPackages = []string{
	"/usr/lib/python3/dist-packages",
	"/usr/lib/python*/site-packages",
	"/usr/lib64/python*/site-packages",
	"/usr/local/lib/python*/site-packages",
	"/usr/local/lib/python*/dist-packages",
	"/usr/local/lib64/python*/site-packages",
	"/opt/*/lib/python*/site-packages",
	"/opt/*/*/lib/python*/site-packages",
	"/venv/lib/python*/site-packages",
	"/.venv/lib/python*/site-packages",
	"/env/lib/python*/site-packages",
	"/*/.venv/lib/python*/site-packages",
	"/*/venv/lib/python*/site-packages",
	"/root/.local/lib/python*/site-packages",
	"/root/.pyenv/versions/*/lib/python*/site-packages",
	"/home/*/.local/lib/python*/site-packages",
	"/home/*/.pyenv/versions/*/lib/python*/site-packages",
}

// notSearched are the folders in which no Python packages lie and that have many others.
var notSearched = map[string]bool{
	"/proc": true, "/sys": true, "/dev": true, "/run": true, "/boot": true, "/etc": true, "/usr/share": true,
	"/usr/include": true, "/usr/src": true, "/usr/bin": true, "/usr/sbin": true, "/usr/libexec": true,
	"/usr/lib/jvm": true, "/usr/lib/gcc": true, "/usr/lib/locale": true, "/usr/lib/modules": true,
	"/usr/lib/firmware": true, "/usr/lib/systemd": true, "/usr/lib/x86_64-linux-gnu": true,
	"/usr/lib/aarch64-linux-gnu": true, "/usr/local/go": true, "/usr/local/share": true, "/var/cache": true,
	"/var/log": true, "/var/lib/dpkg": true, "/var/lib/apt": true, "/var/lib/rpm": true, "/var/spool": true,
}

// namesNotSearched are the names of folders, anywhere, in which no Python packages lie.
var namesNotSearched = map[string]bool{
	"node_modules": true, ".git": true, "__pycache__": true, ".cache": true, ".npm": true, ".cargo": true,
}

// findCertifi searches the root for folders of Python packages, those near the top first, and returns the paths of
// the bundles in them. Volumes are not searched. unsearched says why the search ended early, if it did.
func (r *root) findCertifi(ctx context.Context) (found []string, unsearched string) {
	found = r.expand(fixedCertifi)
	for _, packages := range r.expand(commonPackages) {
		found = append(found, bundlesIn(packages)...)
	}
	deadline, packages := time.Now().Add(maxSearch), 0
	queue := []string{""}
	for searched := 0; len(queue) > 0; searched++ {
		switch {
		case ctx.Err() != nil || time.Now().After(deadline):
			return found, fmt.Sprintf("%d folders searched for certifi in %s", searched, maxSearch)
		case searched == maxSearched:
			return found, fmt.Sprintf("%d folders searched for certifi, and no more", searched)
		case packages >= maxPackages:
			return found, fmt.Sprintf("%d folders of Python packages found, and no more searched for", packages)
		}
		folder := queue[0]
		queue = queue[1:]
		for _, sub := range r.subfolders(folder) {
			if isPackages(sub) {
				packages++
				found = append(found, bundlesIn(sub)...)
			} else if strings.Count(sub, "/") < maxSearchDepth && len(queue) < maxQueued {
				queue = append(queue, sub)
			}
		}
	}
	return found, ""
}

// subfolders are the folders in a folder that may have packages below them. A folder that cannot be read has none.
func (r *root) subfolders(folder string) []string {
	dir, err := r.openFolder(folder+"/", unix.RESOLVE_NO_XDEV|unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return nil
	}
	defer func() { _ = dir.Close() }() // only read
	var found []string
	_ = eachEntry(dir, func(e fs.DirEntry) bool { // a folder with too many entries has been read in part
		path := folder + "/" + e.Name()
		if e.IsDir() && !notSearched[path] && !namesNotSearched[e.Name()] {
			found = append(found, path)
		}
		return len(found) < maxQueued
	})
	return found
}

// isPackages reports whether a folder is one for Python packages.
func isPackages(path string) bool {
	return strings.HasSuffix(path, "/site-packages") || strings.HasSuffix(path, "/dist-packages")
}

// bundlesIn are the paths that bundles have in a folder of packages.
func bundlesIn(packages string) []string {
	var paths []string
	for _, file := range inPackages {
		paths = append(paths, packages+"/"+file)
	}
	return paths
}
