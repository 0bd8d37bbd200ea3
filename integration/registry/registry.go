// Package registry serves images of containers by version 2 of the API of registries:
//
//	r := registry.New()
//	err := r.Add("tools", registry.Image{Layers: []registry.Layer{registry.Folder("bin/images/debian13")}})
//	http.Serve(listener, r)
package registry

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path"
	"runtime"
	"strconv"
	"strings"
	"sync"
)

// Media types of Docker, which dockerd and BuildKit know.
const (
	manifestType = "application/vnd.docker.distribution.manifest.v2+json"
	configType   = "application/vnd.docker.container.image.v1+json"
	layerType    = "application/vnd.docker.image.rootfs.diff.tar"
)

// Image is an image to be served. Its lowest layer is the first.
type Image struct {
	Layers []Layer
	Env    []string
}

// Registry is an http.Handler.
type Registry struct {
	mu        sync.RWMutex
	manifests map[string][]byte // by repository
	blobs     map[string]blob   // by digest
	uploads   map[string]*bytes.Buffer
	// pushed are the layers that clients have pushed, by digest.
	pushed map[string][]byte
}

// blob is a layer, or a configuration.
type blob struct {
	size  int64
	write func(io.Writer) error
}

// New makes a registry without images.
func New() *Registry {
	return &Registry{
		manifests: map[string][]byte{}, blobs: map[string]blob{}, uploads: map[string]*bytes.Buffer{},
		pushed: map[string][]byte{},
	}
}

// descriptor describes a blob in a manifest.
type descriptor struct {
	MediaType string `json:"mediaType"`
	Size      int64  `json:"size"`
	Digest    string `json:"digest"`
}

// Add adds an image as a repository. Its tags are all the same.
func (r *Registry) Add(repository string, image Image) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	layers := []descriptor{}
	digests := []string{}
	for i, l := range image.Layers {
		added, err := r.add(layerType, l.write)
		if err != nil {
			return fmt.Errorf("layer %d of the image %s: %w", i, repository, err)
		}
		layers, digests = append(layers, added), append(digests, added.Digest)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Env": image.Env},
		"rootfs": map[string]any{"type": "layers", "diff_ids": digests},
	})
	if err != nil {
		return fmt.Errorf("the configuration of the image %s: %w", repository, err)
	}
	configured, err := r.add(configType, func(w io.Writer) error {
		_, err := w.Write(config)
		return err
	})
	if err != nil {
		return fmt.Errorf("the configuration of the image %s: %w", repository, err)
	}
	r.manifests[repository], err = json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "config": configured, "layers": layers,
	})
	if err != nil {
		return fmt.Errorf("the manifest of the image %s: %w", repository, err)
	}
	return nil
}

// add adds a blob. It writes the blob to learn its digest, and keeps none of it: a layer can be large.
func (r *Registry) add(mediaType string, write func(io.Writer) error) (descriptor, error) {
	hash := sha256.New()
	count := &counter{to: hash}
	if err := write(count); err != nil {
		return descriptor{}, err
	}
	d := descriptor{mediaType, count.written, fmt.Sprintf("sha256:%x", hash.Sum(nil))}
	r.blobs[d.Digest] = blob{count.written, write}
	return d, nil
}

// counter counts the bytes that are written.
type counter struct {
	to      io.Writer
	written int64
}

// Write implements io.Writer.
func (c *counter) Write(data []byte) (int, error) {
	n, err := c.to.Write(data)
	c.written += int64(n)
	return n, err
}

// ServeHTTP implements http.Handler.
func (r *Registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	if request.Method != http.MethodGet && request.Method != http.MethodHead {
		r.take(w, request)
		return
	}
	kind, name := path.Split(request.URL.Path)
	repository, isManifest := strings.CutSuffix(strings.TrimPrefix(kind, "/v2/"), "/manifests/")
	r.mu.RLock()
	manifest, isKnown := r.manifests[repository]
	blob, isBlob := r.blobs[name]
	r.mu.RUnlock()
	switch {
	case request.URL.Path == "/v2/":
	case isManifest && isKnown:
		w.Header().Set("Content-Type", manifestType)
		w.Header().Set("Docker-Content-Digest", digestOf(manifest))
		http.ServeContent(w, request, "", noTime, bytes.NewReader(manifest))
	case isBlob:
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.FormatInt(blob.size, 10))
		if request.Method != http.MethodHead {
			_ = blob.write(w) // a client that gets too little, or another layer, compares the digest
		}
	default:
		http.NotFound(w, request)
	}
}
