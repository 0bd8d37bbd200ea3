package nested

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/integration/registry"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// image is an image that containers are made of. clients.GoFile is in it.
type image struct {
	name       string
	repository string
	content    registry.Image
	clients    []clients.Client // in the order of the table
}

// withoutStore is the image without a trust store.
const withoutStore = "BusyBox"

// made are the images of the table, made by integration/images.sh. The layers are folders in bin/images, the lowest one
// first.
var made = []struct {
	name   string
	layers []string
	env    []string
}{
	{name: "Debian 13", layers: []string{"debian13"}},
	{name: "like Alpine", layers: []string{"debian13", "alpine"}},
	{name: "like RHEL", layers: []string{"debian12", "rhel"}},
	{name: "distroless", layers: []string{"distroless"},
		env: []string{"SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"}}, // as in the real images
	{name: withoutStore, layers: []string{"busybox"}},
}

// environment is that of all images, which works for a user without a home, too.
var environment = []string{
	"PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", "LC_ALL=C.UTF-8",
}

// madeImages returns the images of the table.
func madeImages(t *testing.T) (images []image) {
	t.Helper()
	for _, m := range made {
		i := image{name: m.name, repository: strings.ToLower(strings.ReplaceAll(m.name, " ", "-"))}
		i.content.Env = append(slices.Clone(environment), m.env...)
		has := map[string]bool{clients.Go.Name: true}
		for _, layer := range m.layers {
			folder := filepath.Join(page.Root(t), "bin", "images", layer)
			if _, err := os.Stat(folder); err != nil {
				t.Fatalf("integration/images.sh install makes the images: %v", err)
			}
			for _, c := range clients.In(folder) {
				has[c.Name] = true
			}
			i.content.Layers = append(i.content.Layers, registry.Folder(folder))
		}
		i.content.Layers = append(i.content.Layers, goLayer(t))
		if m.name == withoutStore {
			i.content.Layers = append(i.content.Layers, registry.Files(map[string][]byte{passwd: users}))
		}
		for _, c := range clients.All {
			if has[c.Name] {
				i.clients = append(i.clients, c)
			}
		}
		images = append(images, i)
	}
	return images
}

// named returns clients by their names.
func named(names ...string) (some []clients.Client) {
	for _, c := range clients.All {
		if slices.Contains(names, c.Name) {
			some = append(some, c)
		}
	}
	return some
}

const passwd = "/etc/passwd"

// users are those of images that have no others: BuildKit refuses a user in an image without the file.
var users = []byte("root:x:0:0:root:/root:/sbin/nologin\n")

// goLayer is a layer with the program for clients.GoFile.
func goLayer(t *testing.T) registry.Layer {
	t.Helper()
	program, err := os.ReadFile(testbed.Static(t, "./integration/clients/try"))
	if err != nil {
		t.Fatal(err)
	}
	return registry.Files(map[string][]byte{clients.GoFile: program})
}

// smallImages returns an image with some clients of this machine, its store and no shell, and one with a program in Go
// and the store alone.
func smallImages(t *testing.T) []image {
	t.Helper()
	const store = "/etc/ssl/certs/ca-certificates.crt"
	bundle, err := os.ReadFile(store)
	if err != nil {
		t.Fatal(err)
	}
	programs := map[string][]byte{
		passwd: users, store: bundle, "/usr/lib/ssl/cert.pem": bundle, // openssl looks for the second
	}
	for _, name := range []string{"/usr/bin/curl", "/usr/bin/openssl"} {
		files, err := registry.Program(name)
		if err != nil {
			t.Fatal(err)
		}
		maps.Copy(programs, files)
	}
	return []image{
		{
			name: "small", repository: "small", clients: named("curl", "openssl s_client", clients.Go.Name),
			content: registry.Image{Env: environment, Layers: []registry.Layer{registry.Files(programs), goLayer(t)}},
		},
		{
			name: "Go alone", repository: "go", clients: named(clients.Go.Name),
			content: registry.Image{Env: environment, Layers: []registry.Layer{
				registry.Files(map[string][]byte{passwd: users, store: bundle}), goLayer(t),
			}},
		},
	}
}
