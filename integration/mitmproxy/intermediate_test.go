package mitmproxy

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestCA: mitmproxy signs with an intermediate that sluiced has made. Clients that trust the root accept it, and the
// next intermediate too, and no name outside of the zones of the root.
func TestCA(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"8.1.1", ""} {
		t.Run(cmp.Or(version, "default"), func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, "sockets")
			n.MitmproxyVersion = version
			worldCA := serveWorld(t, n)
			root := filepath.Join(n.Dir, "root")
			testbed.MustSluiced(t, n, "ca", "root", "--dir", root, "--permit-dns", "example.test")
			if out, err := n.Sluiced("ca", "root", "--dir", root); err == nil {
				t.Errorf("a second root is made: %s", out)
			}
			if err := os.Mkdir(testbed.Confdir(n), 0o700); err != nil {
				t.Fatal(err)
			}
			s := caScene{n, n.AddPod("web"), filepath.Join(root, "ca.crt")}
			d := n.StartDaemon()
			var before *x509.Certificate
			for range 2 {
				testbed.MustSluiced(t, n,
					"ca", "issue", "--root", root, "--dir", testbed.Confdir(n), "--node", "node-1")
				proxy := testbed.LaunchAddon(n, "--set", "ssl_verify_upstream_trusted_ca="+worldCA)
				d.WaitForProxies(1, 1)
				m := mitmCase{
					node: n, proxy: proxy, from: s.pod.Host, world: testbed.WorldIPv4, seenAs: testbed.NodeIPv4,
				}
				m.https(t)
				chain, err := s.handshake(t, site)
				if err != nil || len(chain) < 2 || chain[1].Subject.CommonName != "sluice proxy of node-1" {
					t.Fatalf("mitmproxy presents %d certificates, %v; want the intermediate of node-1", len(chain), err)
				}
				if before != nil && before.Equal(chain[1]) {
					t.Error("mitmproxy has the same intermediate again")
				}
				before = chain[1]
				s.curl(t)
				var invalid x509.CertificateInvalidError
				if _, err := s.handshake(t, "www.example.org"); !errors.As(err, &invalid) ||
					invalid.Reason != x509.CANotAuthorizedForThisName {
					t.Errorf("a name outside of the zones: got %v", err)
				}
				proxy.Stop()
			}
		})
	}
}

// TestZones: TLS to names outside of the zones of the root is passed through from the first connection on, unless the
// policy is to inspect it.
func TestZones(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"8.1.1", ""} {
		for _, mode := range modes {
			t.Run(cmp.Or(version, "default")+" "+mode, func(t *testing.T) {
				t.Parallel()
				s := newScene(t, version, mode)
				root, confdir := filepath.Join(s.node.Dir, "root"), testbed.Confdir(s.node)
				if err := os.Mkdir(confdir, 0o700); err != nil {
					t.Fatal(err)
				}
				testbed.MustSluiced(t, s.node, "ca", "root", "--dir", root, "--permit-dns", "example.test")
				testbed.MustSluiced(t, s.node, "ca", "issue", "--root", root, "--dir", confdir, "--node", "node-1")
				c := s.trusting(t, trust{"trust": "trusted", "tls": "pass", "nested": "pass"})
				for name, shown := range map[string]string{"www.example.org": "www.example.org", "": "no SNI"} {
					config := pinned(name, s.serverTLS.Certificates[0].Certificate[0])
					if _, err := c.request(false, config); err != nil {
						t.Errorf("the first connection to %s: %v", shown, err)
					}
					line := "sluice: TLS passed through: default/web to " + shown + " (" + secureAddress +
						"), not in the zones of the CA, "
					if err := soon(line, func() bool { return strings.Contains(s.proxy.Log(), line) }); err != nil {
						t.Error(err)
					}
				}
				if err := c.wantPassed(false, false, site); err != nil {
					t.Error(err)
				}
				if err := c.change(trust{"trust": "trusted", "tls": "inspect", "nested": "inspect"}); err != nil {
					t.Fatal(err)
				}
				_, err := c.request(false, c.named("www.example.org"))
				var invalid x509.CertificateInvalidError
				if !errors.As(err, &invalid) || invalid.Reason != x509.CANotAuthorizedForThisName {
					t.Errorf("a name outside of the zones, inspected: got %v", err)
				}
			})
		}
	}
}

// caScene is a captured pod whose clients trust a root.
type caScene struct {
	node *testbed.Node
	pod  *testbed.Pod
	root string // the file
}

// handshake connects from the pod to a name, and returns the certificates that mitmproxy presents.
func (s caScene) handshake(t *testing.T, name string) ([]*x509.Certificate, error) {
	t.Helper()
	text, err := os.ReadFile(s.root)
	trusted := x509.NewCertPool()
	if err != nil || !trusted.AppendCertsFromPEM(text) {
		t.Fatalf("the root in %s: %v", s.root, err)
	}
	ctx := testbed.Context(t)
	c, err := s.pod.Dial(ctx, "tcp", net.JoinHostPort(testbed.WorldIPv4, portHTTPS))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // the handshake is all that matters
	client := tls.Client(c, &tls.Config{RootCAs: trusted, ServerName: name})
	if err := client.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return client.ConnectionState().PeerCertificates, nil
}

// curl requests a page with a client that uses OpenSSL.
func (s caScene) curl(t *testing.T) {
	t.Helper()
	out, err := s.pod.TryExec("curl", "--silent", "--show-error", "--max-time", "60", "--cacert", s.root,
		"--connect-to", site+":443:"+testbed.WorldIPv4+":443", "https://"+site+"/curl")
	if err != nil || !strings.Contains(out, "with SNI "+site) {
		t.Errorf("curl: %v, %s", err, out)
	}
}
