package dockertls

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path"
	"regexp"
	"runtime"
	"strings"
	"testing"
)

const manifestType = "application/vnd.docker.distribution.manifest.v2+json"

// registry serves one image, by version 2 of the API of registries.
type registry struct {
	manifest []byte
	blobs    map[string][]byte // by digest
}

// newRegistry makes a registry with an image of these files, by their paths in it.
func newRegistry(t *testing.T, files map[string][]byte) *registry {
	t.Helper()
	var layer bytes.Buffer
	archive := tar.NewWriter(&layer)
	for name, data := range files {
		header := tar.Header{
			Typeflag: tar.TypeReg, Name: strings.TrimPrefix(name, "/"), Size: int64(len(data)), Mode: 0o755,
		}
		must(t, archive.WriteHeader(&header))
		_, err := archive.Write(data)
		must(t, err)
	}
	must(t, archive.Close())
	var compressed bytes.Buffer
	compressor := gzip.NewWriter(&compressed)
	_, err := compressor.Write(layer.Bytes())
	must(t, err)
	must(t, compressor.Close())
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer.Bytes())}},
	})
	must(t, err)
	r := &registry{blobs: map[string][]byte{}}
	add := func(kind string, data []byte) map[string]any {
		r.blobs[digest(data)] = data
		return map[string]any{
			"mediaType": "application/vnd.docker." + kind, "size": len(data), "digest": digest(data),
		}
	}
	r.manifest, err = json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "config": add("container.image.v1+json", config),
		"layers": []any{add("image.rootfs.diff.tar.gzip", compressed.Bytes())},
	})
	must(t, err)
	return r
}

func digest(data []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(data)) }

// ServeHTTP implements http.Handler.
func (r *registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	switch kind, name := path.Split(request.URL.Path); {
	case request.URL.Path == "/v2/":
	case strings.HasSuffix(kind, "/manifests/"):
		w.Header().Set("Content-Type", manifestType)
		w.Header().Set("Docker-Content-Digest", digest(r.manifest))
		_, _ = w.Write(r.manifest) // a client that has gone fails by itself
	case r.blobs[name] != nil:
		w.Header().Set("Content-Type", "application/octet-stream")
		_, _ = w.Write(r.blobs[name]) // as above
	default:
		http.NotFound(w, request)
	}
}

var library = regexp.MustCompile(`(/\S+) \(0x`)

// program returns a program of this machine with its libraries, by their paths.
func program(t *testing.T, name string) map[string][]byte {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ldd", name).Output()
	must(t, err)
	paths := []string{name}
	for _, match := range library.FindAllStringSubmatch(string(out), -1) {
		paths = append(paths, match[1])
	}
	files := map[string][]byte{}
	for _, p := range paths {
		files[p], err = os.ReadFile(p)
		must(t, err)
	}
	return files
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
