package dockertls

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/registry"
	"github.com/sluice-cni/sluice/integration/runner"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// Servers in the world.
const (
	registryName = "registry.example.test"
	image        = registryName + "/tools"
	page         = "a page of the world"
)

// curl and busybox are the programs of the registry's image. The image trusts the world's CA alone.
const (
	curl    = "/usr/bin/curl"
	busybox = "/bin/busybox"
	store   = "/etc/ssl/certs/ca-certificates.crt"
)

// scene is that of a runner, with a registry and a page in the world.
type scene struct {
	*runner.Scene
	t *testing.T
}

func newScene(t *testing.T) *scene {
	t.Helper()
	images := registry.New()
	s := &scene{t: t, Scene: runner.New(t, http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if request.Host == registryName {
			images.ServeHTTP(w, request)
			return
		}
		_, _ = io.WriteString(w, page) // a client that has gone fails by itself
	}))}
	files, err := registry.Program(curl)
	must(t, err)
	files[busybox], err = os.ReadFile(busybox)
	must(t, err)
	files[store] = s.WorldRoot
	must(t, images.Add("tools", registry.Image{Layers: []registry.Layer{registry.Files(files)}}))
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// startDocker adds a pod whose container is dockerd, with annotations.
func (s *scene) startDocker(name string, annotations map[string]string) (*testbed.Pod, *testbed.Docker) {
	s.t.Helper()
	p := s.AddPod(name, annotations)
	return p, s.StartDocker(p)
}

// request is a command that asks for a page by HTTPS, and tells of the certificate.
func request(server string) []string {
	return []string{
		curl, "-sSv", "--max-time", "60", "--resolve", fmt.Sprintf("%s:443:%s", server, testbed.WorldIPv4),
		"https://" + server + "/",
	}
}

// wantPage fails the test unless the output of a request has the page, under a certificate of the world's CA.
func wantPage(t *testing.T, output string) {
	t.Helper()
	if !strings.Contains(output, page) || !strings.Contains(output, "issuer: CN="+runner.WorldCA) {
		t.Errorf("want a page under a certificate by %s, got\n%s", runner.WorldCA, output)
	}
}
