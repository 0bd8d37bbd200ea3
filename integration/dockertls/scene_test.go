package dockertls

import (
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/oci"
	"github.com/sluice-cni/sluice/integration/pki"
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

// worldCA is the CA of the servers in the world: no store of this machine has it.
const worldCA = "the world's CA"

// scene is a node with mitmproxy, and a registry and a page in the world.
type scene struct {
	t       *testing.T
	node    *testbed.Node
	runtime *oci.Runtime
	daemon  *testbed.Daemon
	proxy   *testbed.Program
}

func newScene(t *testing.T) *scene {
	t.Helper()
	n := testbed.NewWith(t, "sockets")
	n.Install()
	socket := filepath.Join(n.Dir, "nri.sock")
	n.Config["trust"] = map[string]any{
		"caFile": filepath.Join(testbed.Confdir(n), "mitmproxy-ca-cert.pem"), "nriSocket": socket,
	}
	s := &scene{t: t, node: n, runtime: oci.NewRuntime(t, socket)}
	roots := filepath.Join(n.Dir, "world-ca.pem")
	s.serve(roots)
	s.proxy = testbed.LaunchAddon(n, "--set", "ssl_verify_upstream_trusted_ca="+roots, "-s", testbed.FlowPrinter(n))
	s.daemon = n.StartDaemon()
	testbed.Eventually(t, "the plugin is installed, and the proxy is there", func() bool {
		status := s.daemon.Status()
		return status.NotReady == "" && status.Upstream.Ready
	})
	s.runtime.WaitForSluiced()
	return s
}

// serve serves the registry, and a page by any other name, and writes the world's CA to a file.
func (s *scene) serve(roots string) {
	s.t.Helper()
	ca := pki.NewCA(worldCA)
	certificate := ca.Server("example.test", []string{"*.example.test"}, nil).TLS()
	must(s.t, os.WriteFile(roots, ca.Cert, 0o600))
	files := program(s.t, curl)
	var err error
	files[busybox], err = os.ReadFile(busybox)
	must(s.t, err)
	files[store] = ca.Cert
	r := newRegistry(s.t, files)
	handler := func(w http.ResponseWriter, request *http.Request) {
		if request.Host == registryName {
			r.ServeHTTP(w, request)
			return
		}
		_, _ = io.WriteString(w, page) // a client that has gone fails by itself
	}
	server := &http.Server{
		Handler: http.HandlerFunc(handler), ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0),
	}
	listener := s.node.World.Listen(net.JoinHostPort(testbed.WorldIPv4, "443"))
	config := &tls.Config{Certificates: []tls.Certificate{certificate}}
	go func() { _ = server.Serve(tls.NewListener(listener, config)) }() // ends with the listener
}

// startDocker adds a pod whose container is dockerd, with annotations.
func (s *scene) startDocker(name string, annotations map[string]string) (*testbed.Pod, *testbed.Docker) {
	s.t.Helper()
	p := s.node.NewPod(name)
	s.node.Annotated(annotations)(p)
	must(s.t, p.Add())
	s.t.Cleanup(func() { _ = p.Del() }) // the test may have failed before
	must(s.t, os.MkdirAll(p.DockerDir(), 0o755))
	log := filepath.Join(p.DockerDir(), "log")
	script := `exec "$@" >` + log + ` 2>&1`
	c := oci.New(s.t, oci.Machine(s.t), append([]string{"sh", "-c", script, "sh", "dockerd"}, p.PrepareDocker()...)...)
	c.SetPrivileged()
	c.JoinNetwork(p.Path())
	c.Share(p.DockerDir())
	c.Write("/etc/hosts", "127.0.0.1 localhost\n"+testbed.WorldIPv4+" "+registryName+"\n")
	c.Write("/etc/resolv.conf", "nameserver 127.0.0.1\n") // refuses at once; iptables asks for names
	s.t.Cleanup(func() {
		if text, err := os.ReadFile(log); s.t.Failed() {
			s.t.Logf("dockerd: %s, %v", text, err)
		}
	})
	s.runtime.Start(c, p.UID())
	docker := p.ConnectDocker(func() {})
	return p, docker
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
	if !strings.Contains(output, page) || !strings.Contains(output, "issuer: CN="+worldCA) {
		t.Errorf("want a page under a certificate by %s, got\n%s", worldCA, output)
	}
}

// wantLogged waits until the proxy has logged a line with all of the words.
func (s *scene) wantLogged(words ...string) {
	s.t.Helper()
	testbed.Eventually(s.t, fmt.Sprintf("the proxy logs %q", words), func() bool {
		return slices.ContainsFunc(strings.Split(s.proxy.Log(), "\n"), func(line string) bool {
			return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) })
		})
	})
}
