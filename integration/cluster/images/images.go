// Package images builds container images from files of this machine, without a registry and without Docker.
package images

import (
	"bytes"
	"fmt"
	"io"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Image is a container image with its name.
type Image struct {
	tag   name.Tag
	image v1.Image
}

// newImage builds an image of one layer. The layer is not compressed, because the image stays on this machine.
func newImage(reference string, files *tree, config v1.Config) (Image, error) {
	tag, err := name.NewTag(reference)
	if err != nil {
		return Image{}, err
	}
	layer, err := files.tar()
	if err != nil {
		return Image{}, fmt.Errorf("packing the files of image %s: %w", reference, err)
	}
	base, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		Architecture: architecture, OS: "linux", Config: config,
		RootFS: v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return Image{}, err
	}
	image, err := mutate.AppendLayers(base, static.NewLayer(layer, types.DockerUncompressedLayer))
	return Image{tag, image}, err
}

// Write writes the image as an archive that `ctr images import` and `docker load` can read.
func (i Image) Write(w io.Writer) error {
	if err := tarball.Write(i.tag, i.image, w); err != nil {
		return fmt.Errorf("writing image %s: %w", i.tag, err)
	}
	return nil
}

// Bytes returns the archive that Write writes.
func (i Image) Bytes() ([]byte, error) {
	var b bytes.Buffer
	err := i.Write(&b)
	return b.Bytes(), err
}
