package mitmproxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestThroughMitmproxy is the main job of sluice: every kind of traffic, over IPv4 and IPv6, by every flavour of the
// rules and every protocol of mitmproxy.
func TestThroughMitmproxy(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		for _, protocol := range []struct{ name, mode string }{{"connect", "regular"}, {"socks5", "socks5"}} {
			t.Run(f.Name+" "+protocol.name, func(t *testing.T) {
				t.Parallel()
				n := testbed.New(t)
				ca := serveWorld(t, n)
				n.SetProtocol(protocol.name)
				proxy := testbed.StartMitmdump(n, "--mode", protocol.mode, "--showhost",
					"--set", "ssl_verify_upstream_trusted_ca="+ca)
				n.StartDaemon()
				pod := f.AddPod(t, n, "web", nil)
				for _, family := range []struct{ name, world, node string }{
					{"IPv4", testbed.WorldIPv4, testbed.NodeIPv4},
					{"IPv6", testbed.WorldIPv6, testbed.NodeIPv6},
				} {
					m := mitmCase{node: n, proxy: proxy, from: pod.Host, world: family.world, seenAs: family.node}
					t.Run("HTTP over "+family.name, m.http)
					t.Run("HTTPS over "+family.name, m.https)
					t.Run("client speaks first over "+family.name, m.clientFirst)
					t.Run("server speaks first over "+family.name, m.serverFirst)
				}
			})
		}
	}
}

type mitmCase struct {
	node   *testbed.Node
	proxy  *testbed.Program
	from   *testbed.Host
	world  string // the server's address
	seenAs string // the address that the server sees
}

func (m mitmCase) http(t *testing.T) {
	destination := net.JoinHostPort(m.world, portHTTP)
	body, err := testbed.Get(testbed.Context(t), m.client(destination, nil), "http://"+site+"/plain")
	m.want(t, err, body, fmt.Sprintf("%s asked for %s as %s", m.seenAs, site, destination))
	m.wantLogged(t, "GET http://"+site+"/plain")
}

func (m mitmCase) https(t *testing.T) {
	trusted := x509.NewCertPool()
	mitmCA, err := os.ReadFile(filepath.Join(testbed.Confdir(m.node), "mitmproxy-ca-cert.pem"))
	if err != nil || !trusted.AppendCertsFromPEM(mitmCA) {
		t.Fatalf("mitmproxy's CA: %v", err)
	}
	destination := net.JoinHostPort(m.world, portHTTPS)
	body, err := testbed.Get(testbed.Context(t), m.client(destination, trusted), "https://"+site+"/secret")
	m.want(t, err, body, fmt.Sprintf("%s asked for %s as %s with SNI %s", m.seenAs, site, destination, site))
	m.wantLogged(t, "GET https://"+site+"/secret")
}

func (m mitmCase) clientFirst(t *testing.T) {
	said, err := m.converse(t, portClientFirst, "\x01\x02 no known protocol")
	m.want(t, err, said, m.seenAs+" said \x01\x02 no known protocol")
	m.wantLogged(t, "tcp -> "+net.JoinHostPort(m.world, portClientFirst))
}

func (m mitmCase) serverFirst(t *testing.T) {
	said, err := m.converse(t, portServerFirst, "SSH-2.0-pod\r\n")
	m.want(t, err, said, banner+m.seenAs+" said SSH-2.0-pod\r\n")
	m.wantLogged(t, "tcp -> "+net.JoinHostPort(m.world, portServerFirst))
}

// converse reads the banner if there is one, sends a message, and reads all of the response.
func (m mitmCase) converse(t *testing.T, port, say string) (string, error) {
	t.Helper()
	ctx := testbed.Context(t)
	c, err := m.from.Dial(ctx, "tcp", net.JoinHostPort(m.world, port))
	if err != nil {
		return "", err
	}
	defer c.Close() //nolint:errcheck // read to its end
	var first []byte
	if port == portServerFirst {
		deadline, _ := ctx.Deadline()
		if err := c.SetDeadline(deadline); err != nil {
			return "", err
		}
		first = make([]byte, len(banner))
		if _, err := io.ReadFull(c, first); err != nil {
			return "", fmt.Errorf("waiting for the banner: %w", err)
		}
	}
	if _, err := io.WriteString(c, say); err != nil {
		return "", err
	}
	rest, err := testbed.ReadAll(ctx, c)
	return string(first) + rest, err
}

func (m mitmCase) want(t *testing.T, err error, got, want string) {
	t.Helper()
	if err != nil || got != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

func (m mitmCase) wantLogged(t *testing.T, line string) {
	t.Helper()
	testbed.Eventually(t, fmt.Sprintf("mitmproxy logs %q", line), func() bool {
		return strings.Contains(m.proxy.Log(), line)
	})
}

// client connects to destination for any URL.
func (m mitmCase) client(destination string, trusted *x509.CertPool) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{RootCAs: trusted},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return m.from.Dial(ctx, network, destination)
		},
	}}
}
