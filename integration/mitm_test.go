package integration

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// site is the name of the server in the world. Nobody can resolve it: only Host and SNI carry it.
const site = "site.example.test"

// Ports of the servers in the world.
const (
	portHTTP        = "80"
	portHTTPS       = "443"
	portClientFirst = "4000"
	portServerFirst = "2222"
)

const banner = "SSH-2.0-world\r\n"

// TestThroughMitmproxy is the main job: every kind of traffic, in both families, through every way to capture
// it and every way to hand it to mitmproxy.
func TestThroughMitmproxy(t *testing.T) {
	t.Parallel()
	for _, f := range flavours {
		for _, protocol := range []struct{ name, mode string }{{"connect", "regular"}, {"socks5", "socks5"}} {
			t.Run(f.name+" "+protocol.name, func(t *testing.T) {
				t.Parallel()
				n := testbed.NewNode(t, bin)
				ca := serveWorld(t, n)
				n.Config["upstream"] = map[string]any{"address": testbed.ProxyAddress, "protocol": protocol.name}
				proxy := n.StartMitmdump("--mode", protocol.mode, "--showhost", "--set", "ssl_verify_upstream_trusted_ca="+ca)
				n.StartDaemon()
				pod := f.addPod(t, n, "web", nil)
				for _, family := range []struct{ name, world, node string }{
					{"IPv4", testbed.WorldIPv4, nodeIPv4}, {"IPv6", testbed.WorldIPv6, nodeIPv6},
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
	seenAs string // the address from which it is asked
}

func (m mitmCase) http(t *testing.T) {
	destination := net.JoinHostPort(m.world, portHTTP)
	body, err := get(patience(t), m.client(destination, nil), "http://"+site+"/plain")
	m.want(t, err, body, fmt.Sprintf("%s asked for %s as %s", m.seenAs, site, destination))
	m.wantLogged(t, "GET http://"+site+"/plain")
}

func (m mitmCase) https(t *testing.T) {
	trusted := x509.NewCertPool()
	mitmCA, err := os.ReadFile(filepath.Join(m.node.Confdir(), "mitmproxy-ca-cert.pem"))
	if err != nil || !trusted.AppendCertsFromPEM(mitmCA) {
		t.Fatalf("mitmproxy's CA: %v", err)
	}
	destination := net.JoinHostPort(m.world, portHTTPS)
	body, err := get(patience(t), m.client(destination, trusted), "https://"+site+"/secret")
	m.want(t, err, body, fmt.Sprintf("%s asked for %s as %s with SNI %s", m.seenAs, site, destination, site))
	m.wantLogged(t, "GET https://"+site+"/secret")
}

func (m mitmCase) clientFirst(t *testing.T) {
	said, err := m.converse(t, portClientFirst, "\x01\x02 no protocol that anybody knows")
	m.want(t, err, said, m.seenAs+" said \x01\x02 no protocol that anybody knows")
	m.wantLogged(t, "tcp -> "+net.JoinHostPort(m.world, portClientFirst))
}

func (m mitmCase) serverFirst(t *testing.T) {
	said, err := m.converse(t, portServerFirst, "SSH-2.0-pod\r\n")
	m.want(t, err, said, banner+m.seenAs+" said SSH-2.0-pod\r\n")
	m.wantLogged(t, "tcp -> "+net.JoinHostPort(m.world, portServerFirst))
}

// converse waits for the banner where there is one, says something, and hears all of the answer.
func (m mitmCase) converse(t *testing.T, port, say string) (string, error) {
	t.Helper()
	ctx := patience(t)
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
	rest, err := readAll(ctx, c)
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
	testbed.Eventually(t, fmt.Sprintf("mitmproxy logs %q", line), func() bool { return strings.Contains(m.proxy.Log(), line) })
}

// client connects to destination, whatever the URL says.
func (m mitmCase) client(destination string, trusted *x509.CertPool) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{RootCAs: trusted},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return m.from.Dial(ctx, network, destination)
		},
	}}
}

// serveWorld starts the servers of the world. It returns the file of the CA behind the one that speaks TLS.
func serveWorld(t *testing.T, n *testbed.Node) (caFile string) {
	t.Helper()
	caFile = filepath.Join(n.Dir, "world-ca.pem")
	certificate := certify(t, caFile)
	for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
		plain := n.World.Listen(net.JoinHostPort(ip, portHTTP))
		secret := tls.NewListener(n.World.Listen(net.JoinHostPort(ip, portHTTPS)), &tls.Config{Certificates: []tls.Certificate{certificate}})
		for _, l := range []net.Listener{plain, secret} {
			s := &http.Server{Handler: http.HandlerFunc(tellRequest), ReadHeaderTimeout: time.Minute}
			go func() { _ = s.Serve(l) }() // ends with the listener
		}
		n.World.Serve(net.JoinHostPort(ip, portClientFirst), tellFirstBytes)
		n.World.Serve(net.JoinHostPort(ip, portServerFirst), func(c net.Conn) {
			fmt.Fprint(c, banner)
			tellFirstBytes(c)
		})
	}
	return caFile
}

// tellRequest answers with what reached the server.
func tellRequest(w http.ResponseWriter, r *http.Request) {
	from, _, _ := net.SplitHostPort(r.RemoteAddr)
	fmt.Fprintf(w, "%s asked for %s as %s", from, r.Host, r.Context().Value(http.LocalAddrContextKey))
	if r.TLS != nil {
		fmt.Fprintf(w, " with SNI %s", r.TLS.ServerName)
	}
}

// tellFirstBytes answers with what was said first, and hangs up.
func tellFirstBytes(c net.Conn) {
	b := make([]byte, 1<<10)
	if n, err := c.Read(b); err == nil {
		fmt.Fprintf(c, "%s said %s", hostOf(c.RemoteAddr()), b[:n])
	}
}

// certify makes a certificate for site, and writes the CA behind it to a file.
func certify(t *testing.T, caFile string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the world's CA"}, SubjectKeyId: []byte{1},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: site}, DNSNames: []string{site},
		NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leafDER, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(caFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{leafDER}, PrivateKey: key}
}

// TestUpstreamLearnsWhoAsks: the CONNECT request names the pod, and the pod's own address whoever in it asks.
func TestUpstreamLearnsWhoAsks(t *testing.T) {
	t.Parallel()
	n := testbed.NewNode(t, bin)
	proxy := startRecordingProxy(n, testbed.ProxyAddress)
	n.StartDaemon()
	pod := n.AddPod("asking")
	nested := pod.Nested()
	for _, c := range []struct {
		name       string
		from       *testbed.Host
		world, pod string
		port       string
	}{
		{"the pod over IPv4", pod.Host, testbed.WorldIPv4, pod.IPv4, "8001"},
		{"the pod over IPv6", pod.Host, testbed.WorldIPv6, pod.IPv6, "8002"},
		{"a nested container over IPv4", nested, testbed.WorldIPv4, pod.IPv4, "8003"},
		{"a nested container over IPv6", nested, testbed.WorldIPv6, pod.IPv6, "8004"},
	} {
		t.Run(c.name, func(t *testing.T) {
			destination := net.JoinHostPort(c.world, c.port)
			serveCaller(n.World, destination)
			conn, err := c.from.Dial(patience(t), "tcp", destination)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close() //nolint:errcheck // read to its end
			if _, err := readAll(patience(t), conn); err != nil {
				t.Fatal(err)
			}
			_, port, _ := net.SplitHostPort(conn.LocalAddr().String())
			want := map[string]string{
				"Sluice-Pod-Namespace": "default", "Sluice-Pod-Name": pod.Name(), "Sluice-Pod-Uid": pod.UID(),
				"Sluice-Source": net.JoinHostPort(c.pod, port),
			}
			for _, r := range proxy.requests() {
				if r.Host != destination {
					continue
				}
				for name, value := range want {
					if got := r.Header.Values(name); len(got) != 1 || got[0] != value {
						t.Errorf("%s: %q, want %q", name, got, value)
					}
				}
				return
			}
			t.Errorf("the proxy was never asked for %s", destination)
		})
	}
}
