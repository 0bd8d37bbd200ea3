package truststore

import (
	"context"
	"slices"
	"strings"
)

// maxPackages bounds the folders of packages that are found.
const maxPackages = 64

// inPackages are the bundles that Python packages bring along, in their folder. Those of requests, httpx, aiohttp and
// of most others is certifi's.
var inPackages = []string{
	"certifi/cacert.pem",
	"pip/_vendor/certifi/cacert.pem",
	"botocore/cacert.pem",
	"httplib2/cacerts.txt",
	"grpc/_cython/_credentials/roots.pem",
}

// isInPackage reports whether a path is that of a bundle in a Python package.
func isInPackage(path string) bool {
	return slices.ContainsFunc(inPackages, func(bundle string) bool { return strings.HasSuffix(path, "/"+bundle) })
}

// fixedCertifi are patterns of certifi's places outside of folders for packages.
var fixedCertifi = []string{
	"/usr/local/aws-cli/v2/*/dist/awscli/botocore/cacert.pem",
	"/usr/local/aws-cli/v2/*/dist/certifi/cacert.pem",
	"/usr/lib/google-cloud-sdk/lib/third_party/certifi/cacert.pem",
	"/google-cloud-sdk/lib/third_party/certifi/cacert.pem",
}

// commonPackages are patterns of the folders of packages that are looked at before the search, however long it takes.
// Some of them are links, or lie in folders that are not searched.
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
	"/root/.local/share/uv/*/*/lib/python*/site-packages", // its Pythons and its tools
	"/root/.local/share/pipx/venvs/*/lib/python*/site-packages",
	"/root/.pyenv/versions/*/lib/python*/site-packages",
	"/root/.cache/pypoetry/virtualenvs/*/lib/python*/site-packages",
	"/home/*/.local/lib/python*/site-packages",
	"/home/*/.local/share/uv/*/*/lib/python*/site-packages",
	"/home/*/.local/share/pipx/venvs/*/lib/python*/site-packages",
	"/home/*/.pyenv/versions/*/lib/python*/site-packages",
	"/home/*/.cache/pypoetry/virtualenvs/*/lib/python*/site-packages",
}

// findCertifi returns the paths that bundles have in Python packages, of the usual places and of those that a search
// finds. There need not be a file at each. unsearched says why the search ended early, if it did.
func (r *root) findCertifi(ctx context.Context) (found []string, unsearched string) {
	found = r.expand(fixedCertifi)
	seen := make(map[string]bool)
	add := func(packages string) {
		if !seen[packages] {
			seen[packages] = true
			found = append(found, r.bundlesIn(packages)...)
		}
	}
	for _, packages := range r.expand(commonPackages) {
		add(packages)
	}
	searched, unsearched := r.search(ctx, maxPackages)
	for _, packages := range searched {
		add(packages)
	}
	return found, unsearched
}

// bundlesIn are the paths that bundles have in a folder of packages, if there is one.
func (r *root) bundlesIn(packages string) []string {
	if !r.hasOne([]string{packages}) {
		return nil
	}
	var paths []string
	for _, file := range inPackages {
		paths = append(paths, packages+"/"+file)
	}
	return paths
}
