package mitmproxy

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// site is the name of the server in the world. It cannot be resolved: only Host and SNI carry it.
const site = "site.example.test"

// Ports of the servers in the world.
const (
	portHTTP        = "80"
	portHTTPS       = "443"
	portClientFirst = "4000"
	portServerFirst = "2222"
)

// worldCA is the name of the CA behind the certificates of the world.
const worldCA = "the world's CA"

const banner = "SSH-2.0-world\r\n"

// serveWorld starts the servers of the world. It returns the file of the CA behind the one that speaks TLS.
func serveWorld(t *testing.T, n *testbed.Node) (caFile string) {
	t.Helper()
	caFile = filepath.Join(n.Dir, "world-ca.pem")
	certificate := certify(t, caFile)
	for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
		plain := n.World.Listen(net.JoinHostPort(ip, portHTTP))
		withTLS := &tls.Config{Certificates: []tls.Certificate{certificate}}
		secret := tls.NewListener(n.World.Listen(net.JoinHostPort(ip, portHTTPS)), withTLS)
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

// tellRequest answers with the request as it reached the server.
func tellRequest(w http.ResponseWriter, r *http.Request) {
	from, _, _ := net.SplitHostPort(r.RemoteAddr)
	fmt.Fprintf(w, "%s asked for %s as %s", from, r.Host, r.Context().Value(http.LocalAddrContextKey))
	if r.TLS != nil {
		fmt.Fprintf(w, " with SNI %s", r.TLS.ServerName)
	}
}

// tellFirstBytes answers with the first bytes that it gets, and closes the connection.
func tellFirstBytes(c net.Conn) {
	b := make([]byte, 1<<10)
	if n, err := c.Read(b); err == nil {
		fmt.Fprintf(c, "%s said %s", testbed.IPOf(c.RemoteAddr()), b[:n])
	}
}

// certify makes a certificate for site, and writes the CA behind it to a file.
func certify(t *testing.T, caFile string) tls.Certificate {
	t.Helper()
	ca := pki.NewCA(worldCA)
	if err := os.WriteFile(caFile, ca.Cert, 0o600); err != nil {
		t.Fatal(err)
	}
	return ca.Server(site, []string{site, "*.example.test"}, []net.IP{net.ParseIP(testbed.WorldIPv4)}).TLS()
}
