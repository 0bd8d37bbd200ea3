// Package runner has the scene of a CI runner: a captured pod in which a Docker or a BuildKit runs, on a node whose
// proxy is mitmproxy:
//
//	s := runner.New(tb, handler)              // a node, and a web server in the world
//	pod := s.AddPod("runner", nil)
//	docker := s.StartDocker(pod)
//	output, code := docker.RunToEnd(image, "bridge", "curl", "https://world.example.test/")
//
// dockerd and buildkitd are real, and so are sluiced, its hook, runc and mitmproxy. The container runtime is but a
// server of NRI. The caller is root, in a mount namespace of its own.
package runner

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sluice-cni/sluice/integration/oci"
	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// WorldCA is the name of the CA of the servers in the world: no store of this machine has it.
const WorldCA = "the world's CA"

// SharedMount is a folder in the container of a dockerd. A mount in a container that has it as a volume, with the
// option rshared, is also one in the mount namespace of dockerd.
const SharedMount = "/shared"

// Scene is a node with mitmproxy, and a web server in the world.
type Scene struct {
	Node   *testbed.Node
	Daemon *testbed.Daemon
	Proxy  *testbed.Program
	// WorldRoot is the world's CA in PEM.
	WorldRoot []byte

	tb      testbed.TB
	runtime *oci.Runtime
}

// New makes the scene. The server in the world has all names below example.test, and handles requests by HTTPS.
func New(tb testbed.TB, handler http.Handler) *Scene {
	tb.Helper()
	n := testbed.NewWith(tb, "sockets")
	n.Install()
	socket := filepath.Join(n.Dir, "nri.sock")
	s := &Scene{Node: n, tb: tb, runtime: oci.NewRuntime(tb, socket)}
	n.Config["trust"] = map[string]any{"caFile": s.ProxyCA(), "nriSocket": socket}
	roots := filepath.Join(n.Dir, "world-ca.pem")
	ca := pki.NewCA(WorldCA)
	s.WorldRoot = ca.Cert
	s.must(os.WriteFile(roots, ca.Cert, 0o600))
	s.serve(handler, ca.Server("example.test", []string{"*.example.test"}, nil).TLS())
	s.Proxy = testbed.LaunchAddon(n, "--set", "ssl_verify_upstream_trusted_ca="+roots, "-s", testbed.FlowPrinter(n))
	s.Daemon = n.StartDaemon()
	testbed.Eventually(tb, "the plugin is installed, and the proxy is there", func() bool {
		status := s.Daemon.Status()
		return status.NotReady == "" && status.Upstream.Ready
	})
	s.runtime.WaitForSluiced()
	return s
}

// ProxyCA is the file with the proxy's CA.
func (s *Scene) ProxyCA() string {
	return filepath.Join(testbed.Confdir(s.Node), "mitmproxy-ca-cert.pem")
}

func (s *Scene) serve(handler http.Handler, certificate tls.Certificate) {
	s.tb.Helper()
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	listener := s.Node.World.Listen(net.JoinHostPort(testbed.WorldIPv4, "443"))
	config := &tls.Config{Certificates: []tls.Certificate{certificate}}
	go func() { _ = server.Serve(tls.NewListener(listener, config)) }() // ends with the listener
}

// AddPod adds a captured pod with annotations.
func (s *Scene) AddPod(name string, annotations map[string]string) *testbed.Pod {
	s.tb.Helper()
	p := s.Node.NewPod(name)
	s.Node.Annotated(annotations)(p)
	s.must(p.Add())
	s.tb.Cleanup(func() { _ = p.Del() }) // the test may have failed before
	return p
}

// StartDocker starts a dockerd as a container of the pod, with more options.
func (s *Scene) StartDocker(p *testbed.Pod, options ...string) *testbed.Docker {
	s.tb.Helper()
	args := append(p.PrepareDocker(), options...)
	c := s.newContainer(p, "dockerd")
	c.Spec.Process.Args = append(c.Spec.Process.Args, append(args, "--cgroup-parent", c.Spec.Linux.CgroupsPath)...)
	// For --userns-remap.
	c.Write("/etc/subuid", subIDs)
	c.Write("/etc/subgid", subIDs)
	s.runtime.Start(c, p.UID())
	return p.ConnectDocker(func() {})
}

// subIDs are the IDs of a user namespace. dockerd makes the user.
const subIDs = "dockremap:100000:65536\n"

// newContainer prepares a privileged container of the pod with the programs of this machine. Its output is in a file
// that the log of a failed test has.
func (s *Scene) newContainer(p *testbed.Pod, args ...string) *oci.Container {
	s.tb.Helper()
	s.must(os.MkdirAll(p.DockerDir(), 0o755))
	log := filepath.Join(p.DockerDir(), filepath.Base(args[0])+".log")
	script := `exec "$@" >` + log + ` 2>&1`
	c := oci.New(s.tb, oci.Machine(s.tb), append([]string{"sh", "-c", script, "sh"}, args...)...)
	c.SetPrivileged()
	c.Spec.Linux.CgroupsPath = filepath.Join(p.Cgroup(), c.ID)
	c.JoinNetwork(p.Path())
	c.Share(p.DockerDir())
	c.Spec.Mounts = append(c.Spec.Mounts, specs.Mount{
		Destination: SharedMount, Type: "tmpfs", Source: "tmpfs", Options: []string{"rshared"},
	})
	c.Write("/etc/hosts", "127.0.0.1 localhost\n"+testbed.WorldIPv4+" registry.example.test\n")
	c.Write("/etc/resolv.conf", "nameserver 127.0.0.1\n") // refuses at once; iptables asks for names
	s.tb.Cleanup(func() {
		if text, err := os.ReadFile(log); s.tb.Failed() {
			s.tb.Logf("%s: %s, %v", args[0], text, err)
		}
	})
	return c
}

// WaitLogged waits until the proxy has logged a line with all of the words.
func (s *Scene) WaitLogged(words ...string) {
	s.tb.Helper()
	testbed.Eventually(s.tb, fmt.Sprintf("the proxy logs %q", words), func() bool {
		return slices.ContainsFunc(strings.Split(s.Proxy.Log(), "\n"), func(line string) bool {
			return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) })
		})
	})
}

func (s *Scene) must(err error) {
	s.tb.Helper()
	if err != nil {
		s.tb.Fatalf("the scene of a runner: %v", err)
	}
}
