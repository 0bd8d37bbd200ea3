package mitmproxy

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// intermediate issues an intermediate CA, as mitmproxy reads it: its key, its certificate, and the root's. Its
// Subject Key Identifier is made by another method than that of mitmproxy up to 12.1.
func intermediate(root pki.CA, name string) []byte {
	ca := root.Intermediate(name)
	return slices.Concat(ca.Key, ca.Cert, root.Cert)
}

// newSceneWithRoot makes a scene in which mitmproxy has an intermediate CA, and the pod trusts its root.
func newSceneWithRoot(t *testing.T, version, mode, name string) (*scene, pki.CA, error) {
	t.Helper()
	root := pki.NewCA("root")
	s := newScene(t, version, mode)
	if err := errors.Join(
		os.Mkdir(testbed.Confdir(s.node), 0o700), replaceCA(s, intermediate(root, name)),
		os.WriteFile(filepath.Join(testbed.Confdir(s.node), "mitmproxy-ca-cert.pem"), root.Cert, 0o600),
	); err != nil {
		return nil, root, err
	}
	s.complete(t)
	web{tellRequest, true}.serve(t.Context(), s.node.World, secureAddress, s.serverTLS)
	return s, root, nil
}

// caFile is where mitmproxy has its CA.
func caFile(s *scene) string { return filepath.Join(testbed.Confdir(s.node), "mitmproxy-ca.pem") }

// replaceCA puts a CA into its place, in one step.
func replaceCA(s *scene, content []byte) error {
	return errors.Join(os.WriteFile(caFile(s)+".new", content, 0o600), os.Rename(caFile(s)+".new", caFile(s)))
}

// changeCA gives mitmproxy one intermediate CA after the other under traffic. No connection may fail.
func changeCA(t *testing.T, version, mode string) error {
	s, root, err := newSceneWithRoot(t, version, mode, "intermediate 0")
	if err != nil {
		return err
	}
	trusted := x509.NewCertPool()
	trusted.AddCert(root.Certificate)
	var issuer atomic.Value
	issuer.Store("")
	c := &trusting{scene: s}
	f := startTrafficOf(func() func() error {
		return func() error {
			conn, err := c.handshake(false, secureAddress, &tls.Config{RootCAs: trusted, ServerName: site})
			if err != nil {
				return err
			}
			defer conn.Close() //nolint:errcheck // the response was read
			issuer.Store(conn.ConnectionState().PeerCertificates[0].Issuer.CommonName)
			return askOn(conn)
		}
	})
	// While other workers may be in a handshake still, a page by the new CA is followed by more of the old one.
	served := func(name string) error {
		return soon("certificates are by "+name, func() bool { return issuer.Load() == name })
	}
	errs := served("intermediate 0")
	for i := range 6 {
		name := fmt.Sprint("intermediate ", i+1)
		content := intermediate(root, name)
		var err error
		switch i % 3 {
		case 0:
			err = replaceCA(s, content)
		case 1: // with a file that cannot be used in between
			broken := func() bool { return strings.Contains(s.proxy.Log(), "cannot be used, the CA stays") }
			err = errors.Join(os.WriteFile(caFile(s), content[:200], 0o600), soon("the file was read", broken),
				f.serves(3*workers), replaceCA(s, content))
		case 2: // written byte by byte, so to say
			var file *os.File
			if file, err = os.Create(caFile(s)); err == nil {
				for part := range bytes.Lines(content) {
					_, failed := file.Write(part)
					err = errors.Join(err, failed)
				}
				err = errors.Join(err, file.Close())
			}
		}
		errs = errors.Join(errs, err, served(name), f.serves(3*workers))
	}
	errs = errors.Join(errs, f.end(0))
	t.Logf("%s, %s: %d connections, %d failed", version, mode, f.served.Load(), len(f.failed))
	return errs
}

// strictPython verifies certificates strictly, as Python 3.13 does by default. OpenSSL does it in any version of Python.
func strictPython(t *testing.T, version, mode string) error {
	s, _, err := newSceneWithRoot(t, version, mode, "intermediate")
	if err != nil {
		return err
	}
	pythons, err := filepath.Glob(filepath.Join(testbed.SourceFile(t, "bin/mitmproxy"), "*", "venv", "bin", "python"))
	if err != nil {
		return err
	}
	const program = `
import socket, ssl, sys
context = ssl.create_default_context(cafile=sys.argv[1])
if sys.version_info < (3, 13):
    context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
assert context.verify_flags & ssl.VERIFY_X509_STRICT
with context.wrap_socket(socket.create_connection((sys.argv[2], 443)), server_hostname=sys.argv[3]) as s:
    s.sendall(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
    print(s.getpeercert()["issuer"], s.recv(100))
`
	trusted := filepath.Join(testbed.Confdir(s.node), "mitmproxy-ca-cert.pem")
	for _, python := range append(pythons, "python3") {
		out, err := s.pod.TryExec(python, "-c", program, trusted, testbed.WorldIPv4, site)
		if err != nil || !strings.Contains(out, "'intermediate'") || !strings.Contains(out, "200 OK") {
			return fmt.Errorf("%s: %w\n%s", python, err, out)
		}
	}
	out, err := s.pod.TryExec("curl", "-sS", "--cacert", trusted,
		"--connect-to", site+":443:"+net.JoinHostPort(testbed.WorldIPv4, portHTTPS), "https://"+site+"/")
	if err != nil || !strings.Contains(out, "asked for") {
		return fmt.Errorf("curl: %w\n%s", err, out)
	}
	return nil
}
