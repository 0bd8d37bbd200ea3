package mitmproxy

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// scene is a node with mitmproxy in one version, asked by one protocol of sluice, and a captured pod.
type scene struct {
	node      *testbed.Node
	daemon    *testbed.Daemon
	pod       *testbed.Pod
	proxy     *testbed.Program
	addon     string   // the addon's file
	args      []string // of mitmdump
	socket    string   // from which mitmdump takes the sockets of pods
	streamed  string   // the size from which mitmdump streams bodies
	mode      string   // sockets or connect
	worldCA   string
	serverTLS *tls.Config
	clientTLS *tls.Config
}

// newScene makes a scene without a proxy.
func newScene(t *testing.T, version, mode string) *scene {
	t.Helper()
	n := testbed.NewWith(t, mode)
	n.MitmproxyVersion = version
	s := &scene{node: n, addon: testbed.Addon(t), socket: n.ProxySocket(), streamed: "1", mode: mode}
	s.worldCA = filepath.Join(n.Dir, "world-ca.pem")
	s.serverTLS = &tls.Config{Certificates: []tls.Certificate{certify(t, s.worldCA)}}
	s.args = []string{
		"--showhost", "--set", "ssl_verify_upstream_trusted_ca=" + s.worldCA, "-s", testbed.FlowPrinter(n),
	}
	n.IP("route", "add", "unreachable", unreachable+"/32")
	n.World.IP("addr", "add", dropping+"/24", "dev", "eth0")
	n.World.Exec("iptables-nft", "-A", "INPUT", "-d", dropping, "-j", "DROP")
	// The proxy's connect() to an address that drops packets fails within seconds, not after two minutes.
	n.Exec("sysctl", "-qw", "net.ipv4.tcp_syn_retries=1", "net.ipv4.tcp_syn_linear_timeouts=0")
	s.daemon = n.StartDaemon()
	return s
}

// start starts mitmdump with the addon, and waits for it.
func (s *scene) start(t *testing.T) {
	t.Helper()
	s.launch()
	if s.mode == "connect" {
		s.node.WaitListening(s.proxy, testbed.ProxyAddress)
		return
	}
	pods := 0
	if s.pod != nil {
		pods = 1
	}
	s.daemon.WaitForProxies(1, pods)
}

// launch is start that does not wait.
func (s *scene) launch() {
	args := []string{
		"-s", s.addon, "--set", "stream_large_bodies=" + s.streamed, "--set", "sluice_socket=" + s.socket,
	}
	if s.mode == "sockets" {
		args = append(args, "--set", "server=false")
	}
	s.proxy = testbed.LaunchMitmdump(s.node, append(args, s.args...)...)
}

// complete adds the pod and starts the proxy. The pod trusts mitmproxy and the world.
func (s *scene) complete(t *testing.T) *scene {
	t.Helper()
	s.pod = s.node.AddPod("web")
	s.start(t)
	trusted := x509.NewCertPool()
	for _, file := range []string{s.worldCA, filepath.Join(testbed.Confdir(s.node), "mitmproxy-ca-cert.pem")} {
		pem, err := os.ReadFile(file)
		if err != nil || !trusted.AppendCertsFromPEM(pem) {
			t.Fatalf("the CA in %s: %v", file, err)
		}
	}
	s.clientTLS = &tls.Config{RootCAs: trusted, ServerName: site}
	return s
}

// serveWeb serves pages at the port of HTTP in the world.
func (s *scene) serveWeb(t *testing.T) {
	t.Helper()
	web{tellRequest, false}.serve(t.Context(), s.node.World, net.JoinHostPort(testbed.WorldIPv4, portHTTP), s.serverTLS)
}

// webClient makes HTTP requests from the pod to that port.
func (s *scene) webClient() *http.Client {
	m := mitmCase{from: s.pod.Host}
	client := m.client(net.JoinHostPort(testbed.WorldIPv4, portHTTP), nil)
	client.Timeout = time.Minute
	return client
}

// page asks for a page on a connection of its own.
func (s *scene) page(client *http.Client) error { return getPage(client, 1, "http://"+site+"/plain") }

// soon waits until cond holds. The error names the event that never happens.
func soon(event string, cond func() bool) error {
	for deadline := time.Now().Add(protocolTimeout); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("it never happened: %s", event)
		}
	}
	return nil
}

// named returns the number of HTTP flows that show the pod, and of all HTTP flows.
func (s *scene) named() (named, all int) {
	for line := range strings.Lines(s.proxy.Log()) {
		if strings.HasPrefix(line, "http from ") {
			all++
			if strings.Contains(line, " of default/web uid-web ") {
				named++
			}
		}
	}
	return named, all
}
