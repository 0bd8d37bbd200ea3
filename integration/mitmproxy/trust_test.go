package mitmproxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/upstream"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// trusting is a scene in which the proxy is told how far the pod trusts its CA.
type trusting struct {
	*scene
	describer *describer // with `sockets`
	trust     trust      // with `connect`
	world     *x509.CertPool
	nested    *testbed.Host
}

// newTrusting makes such a scene, with an HTTPS server in the world. With `connect`, the test asks the proxy itself.
func newTrusting(t *testing.T, version, mode string, tr trust) *trusting {
	t.Helper()
	return newScene(t, version, mode).trusting(t, tr)
}

// trusting completes a scene, which has the proxy's CA already or lets mitmproxy make one.
func (s *scene) trusting(t *testing.T, tr trust) *trusting {
	t.Helper()
	c := &trusting{scene: s, trust: tr}
	if s.mode == "sockets" {
		c.describer = describePods(t, s.node, tr)
		s.socket = c.describer.socket
	}
	pem, err := os.ReadFile(s.worldCA)
	c.world = x509.NewCertPool()
	if err != nil || !c.world.AppendCertsFromPEM(pem) {
		t.Fatalf("the CA in %s: %v", s.worldCA, err)
	}
	s.complete(t)
	web{tellRequest, true}.serve(t.Context(), s.node.World, secureAddress, s.serverTLS)
	return c
}

var secureAddress = net.JoinHostPort(testbed.WorldIPv4, portHTTPS)

// change tells the proxy another trust.
func (c *trusting) change(tr trust) error {
	c.trust = tr
	if c.describer == nil {
		return nil
	}
	return c.describer.change(tr)
}

// dial connects out of the pod, or of a container nested in it.
func (c *trusting) dial(ctx context.Context, nested bool, address string) (net.Conn, error) {
	deadline, _ := ctx.Deadline()
	instead := c.mode == "connect" && c.trust != nil // of sluiced
	from, to := c.pod.Host, address
	switch {
	case instead:
		from, to = c.node.Host, testbed.ProxyAddress
	case nested:
		if c.nested == nil {
			c.nested = c.pod.Nested()
		}
		from = c.nested
	}
	conn, err := from.Dial(ctx, "tcp", to)
	if err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if instead {
		if err := c.ask(conn, nested, address); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	return conn, nil
}

// ask sends a CONNECT request like those of sluiced, with the trust.
func (c *trusting) ask(conn net.Conn, nested bool, address string) error {
	secret, err := os.ReadFile(filepath.Join(filepath.Dir(c.node.ProxySocket()), upstream.SecretFile))
	if err != nil {
		return err
	}
	policy := c.trust["tls"]
	headers := "Sluice-Secret: " + string(secret) + "\r\nSluice-Pod-Namespace: default\r\n" +
		"Sluice-Pod-Name: web\r\nSluice-Pod-UID: uid-web\r\n"
	if nested {
		policy = c.trust["nested"]
		headers += "Sluice-Nested: true\r\n"
	}
	headers += "Sluice-Trust: " + c.trust["trust"] + "\r\nSluice-TLS: " + policy + "\r\n"
	if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n", address, address, headers); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodConnect})
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("CONNECT: got %v, %w", resp, err)
	}
	return resp.Body.Close()
}

// handshake begins TLS on a new connection of the pod.
func (c *trusting) handshake(nested bool, address string, config *tls.Config) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), protocolTimeout)
	defer cancel()
	conn, err := c.dial(ctx, nested, address)
	if err != nil {
		return nil, err
	}
	secure := tls.Client(conn, config)
	if err := secure.Handshake(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return secure, nil
}

// request asks for a page, and returns the name of the CA that has signed the server's certificate.
func (c *trusting) request(nested bool, config *tls.Config) (string, error) {
	conn, err := c.handshake(nested, secureAddress, config)
	if err != nil {
		return "", err
	}
	defer conn.Close() //nolint:errcheck // the response was read
	return conn.ConnectionState().PeerCertificates[0].Issuer.CommonName, askOn(conn)
}

// askOn asks for a page on a connection.
func askOn(conn net.Conn) error {
	const request = "GET /trust HTTP/1.1\r\nHost: " + site + "\r\nConnection: close\r\n\r\n"
	if _, err := io.WriteString(conn, request); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	body, err := io.ReadAll(resp.Body)
	if err != nil || !strings.Contains(string(body), "asked for") {
		return fmt.Errorf("got %s, %q, %w; want a page", resp.Status, body, err)
	}
	return nil
}

// named is the configuration of a client that trusts both CAs and names a server.
func (c *trusting) named(name string) *tls.Config {
	config := c.clientTLS.Clone()
	config.ServerName = name
	return config
}

// distrusting is the configuration of a client that trusts the world's CA alone.
func (c *trusting) distrusting(name string) *tls.Config {
	return &tls.Config{RootCAs: c.world, ServerName: name}
}

// wantPassed makes a request, and wants its TLS to be passed through or inspected.
func (c *trusting) wantPassed(nested, want bool, name string) error {
	issuer, err := c.request(nested, c.named(name))
	if passed := issuer == worldCA; err != nil || passed != want {
		return fmt.Errorf("%s, %v: got a certificate by %q, %w; want TLS passed through: %v",
			name, c.trust, issuer, err, want)
	}
	return nil
}

// passThrough: TLS is passed through or inspected as the pod's description says, and is seen in any case.
func passThrough(t *testing.T, version, mode string) error {
	c := newTrusting(t, version, mode, trust{"trust": "unknown", "tls": "pass", "nested": "pass"})
	for _, step := range []struct {
		trust          trust
		passed, nested bool
	}{
		{trust{"trust": "unknown", "tls": "pass", "nested": "inspect"}, true, false},
		{trust{"trust": "files-only", "tls": "pass", "nested": "pass"}, true, true},
		{trust{"trust": "trusted", "tls": "pass", "nested": "pass"}, false, true},
		{trust{"trust": "unknown", "tls": "inspect", "nested": "inspect"}, false, false},
		{trust{"trust": "unknown", "tls": "pass", "nested": "pass"}, true, true},
	} {
		if err := c.change(step.trust); err != nil {
			return err
		}
		err := errors.Join(c.wantPassed(false, step.passed, site), c.wantPassed(true, step.nested, site))
		if err != nil {
			return err
		}
	}
	for _, line := range []string{
		" of default/web uid-web outbound comment default/web", ", TLS passed through: trust unknown, ",
		"sluice: TLS passed through: default/web to " + site + " (" + secureAddress + "), trust files-only, ",
		"sluice: TLS passed through: default/web to " + site + " (" + secureAddress + "), nested, ",
	} {
		if err := soon(line, func() bool { return strings.Contains(c.proxy.Log(), line) }); err != nil {
			return err
		}
	}
	return nil
}

// errPinned is that of a client that wants another certificate.
var errPinned = errors.New("not the pinned certificate")

// refusals are ways in which clients refuse a certificate.
var refusals = []struct {
	name   string // of the server
	how    string // the begin of the reason in the proxy's log
	refuse func(c *trusting, name string) error
}{
	{"alert.example.test", "alert ", func(c *trusting, name string) error {
		_, err := c.request(false, c.distrusting(name))
		return wantRefused(err)
	}},
	{"old.example.test", "alert ", func(c *trusting, name string) error {
		config := c.distrusting(name)
		config.MaxVersion = tls.VersionTLS12
		_, err := c.request(false, config)
		return wantRefused(err)
	}},
	{"pinned.example.test", "alert ", func(c *trusting, name string) error {
		_, err := c.request(false, pinned(name, c.serverTLS.Certificates[0].Certificate[0]))
		if !errors.Is(err, errPinned) {
			return fmt.Errorf("got %w, want %w", err, errPinned)
		}
		return nil
	}},
	{"", "alert ", func(c *trusting, name string) error { // without SNI
		_, err := c.request(false, pinned(name, c.serverTLS.Certificates[0].Certificate[0]))
		if !errors.Is(err, errPinned) {
			return fmt.Errorf("got %w, want %w", err, errPinned)
		}
		return nil
	}},
	// As GnuTLS, Node.js, and curl --pinnedpubkey do.
	{"later.example.test", "end after the handshake", func(c *trusting, name string) error {
		conn, err := c.handshake(false, secureAddress, c.named(name))
		if err != nil {
			return err
		}
		return conn.Close()
	}},
	{"abrupt.example.test", "end ", func(c *trusting, name string) error { // the same, with a reset
		conn, err := c.handshake(false, secureAddress, c.named(name))
		if err != nil {
			return err
		}
		tcp := conn.NetConn().(*net.TCPConn)
		return errors.Join(tcp.SetLinger(0), tcp.Close())
	}},
	{"mute.example.test", "end during the handshake", func(c *trusting, name string) error {
		ctx, cancel := context.WithTimeout(context.Background(), protocolTimeout)
		defer cancel()
		conn, err := c.dial(ctx, false, secureAddress)
		if err != nil {
			return err
		}
		// The client's second flight never leaves.
		err = tls.Client(&once{Conn: conn}, c.named(name)).Handshake()
		if !errors.Is(err, errOnce) {
			return fmt.Errorf("got %w, want %w", err, errOnce)
		}
		return conn.Close()
	}},
}

// wantRefused wants the error of a client that does not know the certificate's CA.
func wantRefused(err error) error {
	if unknown := (x509.UnknownAuthorityError{}); !errors.As(err, &unknown) {
		return fmt.Errorf("got %w, want an unknown authority", err)
	}
	return nil
}

// pinned is the configuration of a client that wants one certificate, and looks at nothing else.
func pinned(name string, certificate []byte) *tls.Config {
	return &tls.Config{
		ServerName: name, InsecureSkipVerify: true,
		VerifyPeerCertificate: func(raw [][]byte, _ [][]*x509.Certificate) error {
			if !bytes.Equal(raw[0], certificate) {
				return errPinned
			}
			return nil
		},
	}
}

var errOnce = errors.New("the second write")

// once is a connection on which only the first write succeeds.
type once struct {
	net.Conn
	written bool
}

func (o *once) Write(b []byte) (int, error) {
	if o.written {
		return 0, errOnce
	}
	o.written = true
	return o.Conn.Write(b)
}

// unrelated are failures that are no refusals. Each is of a connection to a name of its own.
var unrelated = []struct {
	name string
	fail func(c *trusting, name string) error
}{
	{"partial.example.test", func(c *trusting, name string) error { return c.hang(name, 40) }},
	{"early.example.test", func(c *trusting, name string) error { return c.hang(name, 1<<16) }},
	{"cipher.example.test", func(c *trusting, name string) error {
		config := c.named(name)
		config.MaxVersion = tls.VersionTLS12
		config.CipherSuites = []uint16{tls.TLS_RSA_WITH_RC4_128_SHA} // no proxy takes it
		if conn, err := c.handshake(false, secureAddress, config); err == nil {
			return errors.Join(errors.New("a handshake with RC4 has succeeded"), conn.Close())
		}
		return nil
	}},
	{"distrusted.example.test", func(c *trusting, name string) error { // mitmproxy does not trust the server
		conn, err := c.handshake(false, net.JoinHostPort(testbed.WorldIPv4, portDistrusted), c.named(name))
		if err != nil {
			return err
		}
		defer conn.Close() //nolint:errcheck // the response was read
		if err := askOn(conn); err == nil || !strings.Contains(err.Error(), "502") {
			return fmt.Errorf("got %w, want 502", err)
		}
		return nil
	}},
	{"alternating.example.test", func(c *trusting, name string) error { // another client accepts it
		_, err := c.request(false, c.distrusting(name))
		return errors.Join(wantRefused(err), c.wantPassed(false, false, name))
	}},
}

// portDistrusted is the port of a server in the world that mitmproxy does not trust.
const portDistrusted = "8443"

// hang sends the first bytes of a ClientHello, and resets the connection.
func (c *trusting) hang(name string, size int) error {
	ctx, cancel := context.WithTimeout(context.Background(), protocolTimeout)
	defer cancel()
	near, far := net.Pipe()
	go func() { _ = tls.Client(near, c.named(name)).Handshake() }() // it fails with the pipe
	hello := make([]byte, size)
	n, err := far.Read(hello)
	if err := errors.Join(err, far.Close()); err != nil {
		return err
	}
	conn, err := c.dial(ctx, false, secureAddress)
	if err != nil {
		return err
	}
	_, err = conn.Write(hello[:n])
	return errors.Join(err, conn.(*net.TCPConn).SetLinger(0), conn.Close())
}

// learnRefusals: TLS of clients that refuse the certificate twice is passed through, for their name and their pod.
func learnRefusals(t *testing.T, version, mode string) error {
	c := newTrusting(t, version, mode, trust{"trust": "trusted", "tls": "pass", "nested": "pass"})
	other := filepath.Join(c.node.Dir, "other-ca.pem")
	web{tellRequest, true}.serve(t.Context(), c.node.World, net.JoinHostPort(testbed.WorldIPv4, portDistrusted),
		&tls.Config{Certificates: []tls.Certificate{certify(t, other)}})
	for _, u := range unrelated {
		for i := range 3 {
			if err := u.fail(c, u.name); err != nil {
				return fmt.Errorf("%s, number %d: %w", u.name, i, err)
			}
		}
	}
	if err := c.logsRefusals(3, "alternating.example.test", "alert "); err != nil {
		return err
	}
	if err := c.refuseStrictly(); err != nil {
		return err
	}
	if err := c.change(trust{"trust": "trusted", "tls": "pass", "nested": "pass"}); err != nil {
		return err
	}
	if err := c.wantPassed(false, false, strict+refusals[0].name); err != nil {
		return err
	}
	for _, r := range refusals {
		for i := range 2 {
			if err := r.refuse(c, r.name); err != nil {
				return fmt.Errorf("%q, refusal %d: %w", r.name, i, err)
			}
		}
		learned := "clients refuse the certificate for " + r.name
		if err := soon(learned, func() bool { return strings.Contains(c.proxy.Log(), learned) }); err != nil {
			return err
		}
		config := c.named(r.name)
		if r.name == "" {
			config = pinned("", c.serverTLS.Certificates[0].Certificate[0])
		}
		if issuer, err := c.request(false, config); err != nil || issuer != worldCA {
			return fmt.Errorf("%q after two refusals: got a certificate by %q, %w", r.name, issuer, err)
		}
	}
	for _, u := range unrelated {
		if err := c.wantPassed(false, false, u.name); err != nil {
			return err
		}
		if u.name != "alternating.example.test" && strings.Contains(c.proxy.Log(), "refused: default/web to "+u.name) {
			return fmt.Errorf("the proxy logs a refusal for %s", u.name)
		}
	}
	const reason = ", TLS passed through: the client refused the certificate, "
	return soon("the flow has the reason", func() bool { return strings.Contains(c.proxy.Log(), reason) })
}

// strict begins the names of servers in refuseStrictly.
const strict = "strict-"

// refuseStrictly refuses certificates, and TLS is inspected all the same. The proxy logs each refusal.
func (c *trusting) refuseStrictly() error {
	if err := c.change(trust{"trust": "trusted", "tls": "inspect", "nested": "inspect"}); err != nil {
		return err
	}
	for _, r := range refusals {
		name := r.name
		if name != "" {
			name = strict + name
		}
		if err := errors.Join(r.refuse(c, name), c.logsRefusals(1, name, r.how)); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
	}
	for range 2 {
		if err := refusals[0].refuse(c, strict+refusals[0].name); err != nil {
			return err
		}
	}
	if err := c.logsRefusals(3, strict+refusals[0].name, "alert "); err != nil {
		return err
	}
	_, err := c.request(true, c.distrusting("nested.example.test"))
	return errors.Join(wantRefused(err), soon("the line names a nested container", func() bool {
		_, line, found := strings.Cut(c.proxy.Log(), "certificate refused: default/web to nested.example.test ")
		line, _, _ = strings.Cut(line, "\n")
		return found && strings.HasSuffix(line, ", nested")
	}))
}

// logsRefusals waits until the proxy has logged that clients have refused the certificate for a name that often.
func (c *trusting) logsRefusals(count int, name, how string) error {
	if name == "" {
		name = "no SNI"
	}
	line := "sluice: certificate refused: default/web to " + name + " (" + secureAddress + "), " + how
	return soon(line, func() bool { return strings.Count(c.proxy.Log(), line) == count })
}

// loseSluiced: without sluiced, nothing tells whether a container that starts meanwhile trusts the CA, so TLS of new
// connections is passed through, unless the policy is strict.
func loseSluiced(t *testing.T, version, mode string) error {
	c := newTrusting(t, version, mode, trust{"trust": "trusted", "tls": "pass", "nested": "inspect"})
	if err := c.wantPassed(false, false, site); err != nil {
		return err
	}
	open, err := c.handshake(false, secureAddress, c.named(site))
	if err != nil {
		return err
	}
	defer open.Close() //nolint:errcheck // the response was read
	c.daemon.Kill()
	const lost = "; connecting again"
	if err := soon(lost, func() bool { return strings.Contains(c.proxy.Log(), lost) }); err != nil {
		return err
	}
	err = errors.Join(c.wantPassed(false, true, site), c.wantPassed(true, false, site), askOn(open))
	if err != nil {
		return err
	}
	c.daemon = c.node.StartDaemon()
	c.daemon.WaitForProxies(1, 1)
	return soon("TLS is inspected again", func() bool { return c.wantPassed(false, false, site) == nil })
}

// TestTrust runs the scenarios about the trust in the CA with the default version.
func TestTrust(t *testing.T) {
	t.Parallel()
	for _, s := range trustScenarios {
		for _, mode := range modes {
			if s.mode != "" && s.mode != mode {
				continue
			}
			t.Run(s.name+" "+mode, func(t *testing.T) {
				t.Parallel()
				if err := s.run(t, "", mode); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// TestClientsThatRefuse: programs that do not trust the CA work from the third connection on.
func TestClientsThatRefuse(t *testing.T) {
	t.Parallel()
	c := newTrusting(t, "", "sockets", trust{"trust": "trusted", "tls": "pass", "nested": "pass"})
	const python = `
import socket, ssl, sys
context = ssl.create_default_context(cafile=sys.argv[1])
with context.wrap_socket(socket.create_connection((sys.argv[2], 443)), server_hostname=sys.argv[3]) as s:
    s.sendall(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
    assert s.recv(100)
`
	for _, program := range []struct {
		name    string
		command []string
	}{
		{"curl", []string{
			"curl", "-sS", "--cacert", c.worldCA, "--connect-to", "curl.example.test:443:" + secureAddress,
			"https://curl.example.test/",
		}},
		{"openssl", []string{
			"sh", "-c", `openssl s_client -verify_return_error -CAfile "$0" -connect "$1" -servername "$2" </dev/null`,
			c.worldCA, secureAddress, "openssl.example.test",
		}},
		{"python", []string{"python3", "-c", python, c.worldCA, testbed.WorldIPv4, "python.example.test"}},
		// It uses GnuTLS, and no SNI for an address.
		{"wget", []string{
			"wget", "-qO-", "--tries=1", "--ca-certificate", c.worldCA, "https://" + secureAddress + "/",
		}},
	} {
		t.Run(program.name, func(t *testing.T) {
			logged := func(text string) func() bool {
				before := strings.Count(c.proxy.Log(), text)
				return func() bool { return strings.Count(c.proxy.Log(), text) > before }
			}
			learned := logged("default/web: clients refuse the certificate for ")
			for i := range 2 {
				refused := logged("sluice: certificate refused: default/web to ")
				if out, err := c.pod.TryExec(program.command[0], program.command[1:]...); err == nil {
					t.Fatalf("connection %d has succeeded:\n%s", i, out)
				}
				testbed.Eventually(t, "the addon logs the refusal", refused)
			}
			testbed.Eventually(t, "the addon has learned it", learned)
			passed := logged("), the client refused the certificate, ")
			c.pod.Exec(program.command[0], program.command[1:]...)
			testbed.Eventually(t, "the log has a line", passed)
		})
	}
	c.pod.Exec("curl", "-sS", "--cacert", filepath.Join(testbed.Confdir(c.node), "mitmproxy-ca-cert.pem"),
		"--connect-to", "other.example.test:443:"+secureAddress, "https://other.example.test/")
	testbed.Eventually(t, "the request of a client that trusts is inspected", func() bool {
		return strings.Contains(c.proxy.Log(), "GET https://other.example.test/")
	})
}

// TestPassedInbound: clients of a pod are not the pod, so its trust does not matter.
func TestPassedInbound(t *testing.T) {
	t.Parallel()
	const port = "8443"
	for _, c := range []struct {
		policy, issuer string
	}{{"pass", worldCA}, {"inspect", "mitmproxy"}} {
		t.Run(c.policy, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, "", "sockets")
			s.socket = describePods(t, s.node, trust{"trust": "trusted", "tls": c.policy, "nested": "pass"}).socket
			s.pod = testbed.Flavours[0].AddPod(t, s.node, "web",
				s.node.Annotated(map[string]string{"sluice.dev/capture-inbound-ports": port}))
			s.start(t)
			web{tellRequest, true}.serve(t.Context(), s.pod.Host, ":"+port, s.serverTLS)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			conn, err := s.node.World.Dial(ctx, "tcp", net.JoinHostPort(s.pod.IPv4, port))
			if err != nil {
				t.Fatal(err)
			}
			secure := tls.Client(conn, &tls.Config{ServerName: site, InsecureSkipVerify: true})
			defer secure.Close() //nolint:errcheck // nothing more is sent
			if err := secure.HandshakeContext(ctx); err != nil {
				t.Fatal(err)
			}
			if got := secure.ConnectionState().PeerCertificates[0].Issuer.CommonName; got != c.issuer {
				t.Errorf("got a certificate by %q, want one by %q", got, c.issuer)
			}
		})
	}
}
