package registry

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path"
	"strings"
)

// take serves a push. Each upload is kept in memory.
func (r *Registry) take(w http.ResponseWriter, request *http.Request) {
	data, err := io.ReadAll(request.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	const uploads = "/blobs/uploads/"
	repository, id, isUpload := strings.Cut(strings.TrimPrefix(request.URL.Path, "/v2/"), uploads)
	manifestOf, _, isManifest := strings.Cut(repository, "/manifests/")
	upload := r.uploads[id]
	switch {
	case isUpload && request.Method == http.MethodPost:
		id = fmt.Sprint(len(r.uploads) + 1)
		r.uploads[id] = &bytes.Buffer{}
		w.Header().Set("Location", path.Join("/v2", repository, uploads, id))
		w.WriteHeader(http.StatusAccepted)
	case isUpload && upload != nil && request.Method == http.MethodPatch:
		upload.Write(data)
		w.Header().Set("Location", request.URL.Path)
		w.Header().Set("Range", fmt.Sprintf("0-%d", upload.Len()-1))
		w.WriteHeader(http.StatusAccepted)
	case isUpload && upload != nil && request.Method == http.MethodPut:
		upload.Write(data)
		w.WriteHeader(r.keep(upload.Bytes(), request.URL.Query().Get("digest")))
	case isManifest && request.Method == http.MethodPut:
		r.manifests[manifestOf] = data
		w.Header().Set("Docker-Content-Digest", digestOf(data))
		w.WriteHeader(http.StatusCreated)
	default:
		http.NotFound(w, request)
	}
}

// keep keeps a blob, and returns the status of the answer.
func (r *Registry) keep(data []byte, digest string) int {
	if digestOf(data) != digest {
		return http.StatusBadRequest
	}
	r.pushed[digest] = data
	r.blobs[digest] = blob{int64(len(data)), func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	}}
	return http.StatusCreated
}

func digestOf(data []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(data)) }

// Pushed returns the configuration and the layers of an image that were pushed. Layers that came from the registry are
// not among them.
func (r *Registry) Pushed(repository string) (config []byte, layers [][]byte, err error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	if err := json.Unmarshal(r.manifests[repository], &manifest); err != nil {
		return nil, nil, fmt.Errorf("the manifest of %s: %w", repository, err)
	}
	config, ok := r.pushed[manifest.Config.Digest]
	if !ok {
		return nil, nil, fmt.Errorf("the configuration of %s was not pushed", repository)
	}
	for _, l := range manifest.Layers {
		if data, ok := r.pushed[l.Digest]; ok {
			layers = append(layers, data)
		}
	}
	return config, layers, nil
}
