package nested

import (
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/registry"
	"github.com/sluice-cni/sluice/integration/runner"
	"github.com/sluice-cni/sluice/integration/testbed"
)

const (
	// server is the web server in the world.
	server = "world.example.test"
	// hosts is its line in /etc/hosts, as Docker's option has it.
	hosts = server + ":" + testbed.WorldIPv4
	url   = "https://" + server + ":443/"
	// registryAddress is that of a registry in the pods: a connection to it is not captured.
	registryAddress = "127.0.0.1:5000"
)

// lab is a node with a captured pod in which a dockerd runs.
type lab struct {
	*runner.Scene
	t      *testing.T
	images *registry.Registry
	pod    *testbed.Pod
	docker *testbed.Docker
	// remapped is the dockerd of another pod, which has user namespaces. buildkit is a buildkitd of the first pod. Both
	// are nil unless startMore has started them.
	remapped *testbed.Docker
	buildkit *runner.Buildkit
}

// newLab makes a node whose pod has annotations.
func newLab(t *testing.T, annotations map[string]string) *lab {
	t.Helper()
	l := &lab{t: t, Scene: runner.New(t, http.HandlerFunc(clients.Serve)), images: registry.New()}
	l.pod = l.AddPod("runner", annotations)
	l.docker = l.startDocker(l.pod)
	return l
}

// startMore starts what all ways need.
func (l *lab) startMore(annotations map[string]string) {
	l.t.Helper()
	// The root of a user namespace has to reach the roots of containers. Both folders are the test's own.
	for _, folder := range []string{filepath.Dir(l.Node.Dir), l.Node.Dir} {
		if err := os.Chmod(folder, 0o755); err != nil {
			l.t.Fatal(err)
		}
	}
	l.remapped = l.startDocker(l.AddPod("remapped", annotations), "--userns-remap", "default")
	l.buildkit = l.StartBuildkit(l.pod)
}

// startDocker starts a dockerd in a pod, with options, and the registry.
func (l *lab) startDocker(p *testbed.Pod, options ...string) *testbed.Docker {
	l.t.Helper()
	listener := p.Listen(registryAddress)
	serve := &http.Server{Handler: l.images, ReadHeaderTimeout: time.Minute}
	go func() { _ = serve.Serve(listener) }() // ends with the listener
	docker := l.StartDocker(p, options...)
	docker.CreateNetwork(userDefined, "172.18.0.0/16")
	return docker
}

// dockerd is the one for a way to start a container.
func (l *lab) dockerd(w way) *testbed.Docker {
	if w.remapped {
		return l.remapped
	}
	return l.docker
}

// inspect are the annotations of a pod all of whose TLS is inspected.
func inspect() map[string]string {
	return map[string]string{"sluice.dev/tls": "inspect", "sluice.dev/nested": "inspect"}
}

// publish makes an image known to the registry.
func (l *lab) publish(i image) {
	l.t.Helper()
	if err := l.images.Add(i.repository, i.content); err != nil {
		l.t.Fatal(err)
	}
}

// clear removes all images, of which a table has several gigabytes.
func (l *lab) clear() {
	l.t.Helper()
	for _, docker := range []*testbed.Docker{l.docker, l.remapped} {
		if docker != nil {
			l.mustRun(docker.Command("image", "prune", "--all", "--force"))
			l.mustRun(docker.Command("builder", "prune", "--all", "--force"))
		}
	}
	if l.buildkit != nil {
		l.mustRun(l.buildkit.Command("prune", "--all"))
	}
}

// run runs a command on the machine, and returns its output.
func run(cmd *exec.Cmd) (string, error) {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

func (l *lab) mustRun(cmd *exec.Cmd) string {
	l.t.Helper()
	out, err := run(cmd)
	if err != nil {
		l.t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	return out
}

// context is a folder with a Dockerfile, for a build.
func (l *lab) context(dockerfile string) string {
	l.t.Helper()
	dir := l.t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(dockerfile), 0o600); err != nil {
		l.t.Fatal(err)
	}
	return dir
}
