package dockertls

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// inspectNested is the annotation of a pod whose nested containers are given the CA.
var inspectNested = map[string]string{"sluice.dev/nested": "inspect"}

// wantInspected fails the test unless the output of a request has the page, under a certificate of the proxy.
func wantInspected(t *testing.T, output string) {
	t.Helper()
	if !strings.Contains(output, page) || !strings.Contains(output, "issuer: CN=mitmproxy") {
		t.Errorf("want a page under a certificate by mitmproxy, got\n%s", output)
	}
}

// TestNestedContainers: containers of Docker trust the CA from their first connection on, and an image that is built
// has no trace of it.
func TestNestedContainers(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	pod, docker := s.startDocker("runner", inspectNested)
	docker.Pull(image, "latest")

	t.Run("containers", func(t *testing.T) {
		for range 3 {
			out, _ := docker.RunToEnd(image, "bridge", request("strict.example.test")...)
			wantInspected(t, out)
		}
		s.WaitLogged(" default/runner: GET https://strict.example.test/")
	})
	t.Run("a container in the pod's own network", func(t *testing.T) {
		out, _ := docker.RunToEnd(image, "host", request("host.example.test")...)
		wantInspected(t, out)
	})
	t.Run("an image", func(t *testing.T) {
		out := docker.BuildFrom(image, "bridge", request("build.example.test")...)
		wantInspected(t, out)
		_, id, _ := strings.Cut(out, "Successfully built ")
		wantNoTrace(t, docker.Save(strings.TrimSpace(id)))
	})
	t.Run("status", func(t *testing.T) {
		c := docker.RunImage(image, "bridge", busybox, "sleep", "1000")
		testbed.Eventually(t, "the status has the container", func() bool {
			nested := s.Daemon.Of(pod).Nested
			return len(nested) == 1 && nested[0].Trust == "trusted" && strings.HasPrefix(c.ID, nested[0].Name)
		})
	})
}

// wantNoTrace fails the test if a file of an image, or a file in a layer of it, has the proxy's CA.
func wantNoTrace(t *testing.T, archive []byte) {
	t.Helper()
	layers := 0
	eachFile(t, archive, func(name string, data []byte) {
		if strings.HasSuffix(name, ".tar") {
			layers++
			eachFile(t, data, func(name string, data []byte) { wantNoCA(t, name, data) })
		}
		wantNoCA(t, name, data)
	})
	if layers == 0 {
		t.Error("the image has no layer")
	}
}

func wantNoCA(t *testing.T, name string, data []byte) {
	t.Helper()
	if bytes.Contains(data, []byte("sluice.dev")) || bytes.Contains(data, []byte("sluice-ca")) ||
		strings.Contains(name, "sluice") {
		t.Errorf("%s has a trace of the CA", name)
	}
}

func eachFile(t *testing.T, archive []byte, visit func(name string, data []byte)) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		must(t, err)
		data, err := io.ReadAll(r)
		must(t, err)
		visit(header.Name, data)
	}
}
