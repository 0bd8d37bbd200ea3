package truststore

import (
	"bytes"
	"crypto/tls"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// authority is a CA with a TLS server on the loopback interface.
type authority struct {
	pem      []byte
	url      string
	refusals *refusals
}

// newAuthority makes a CA, and starts a server whose certificate it has issued.
func newAuthority(t *testing.T) authority {
	t.Helper()
	testbed.Run(t, "ip", "link", "set", "lo", "up")
	ca := pki.NewCA("The proxy's CA")
	server := httptest.NewUnstartedServer(http.HandlerFunc(clients.Serve))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{ca.Server("localhost", []string{"localhost"}, nil).TLS()}}
	refusals := &refusals{open: map[net.Conn]bool{}}
	server.Config.ErrorLog, server.Config.ConnState = log.New(refusals, "", 0), refusals.follow
	server.StartTLS()
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return authority{
		pem: ca.Cert,
		url: "https://localhost:" + port + "/", refusals: refusals,
	}
}

// refusals counts the handshakes that fail at a server: a proxy knows from them that a client does not trust the CA.
// GnuTLS does not tell it with TLS 1.3: it looks at the certificate after the handshake, and hangs up.
type refusals struct {
	mu     sync.Mutex
	failed int
	open   map[net.Conn]bool // the connections that have not ended
}

// Write implements io.Writer for the server's log.
func (r *refusals) Write(line []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if bytes.Contains(line, []byte("TLS handshake error")) {
		r.failed++
	}
	return len(line), nil
}

// follow is for http.Server.ConnState.
func (r *refusals) follow(c net.Conn, state http.ConnState) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if state == http.StateClosed {
		delete(r.open, c)
	} else {
		r.open[c] = true
	}
}

// count returns the number when all connections have ended.
func (r *refusals) count(t *testing.T) (failed int) {
	t.Helper()
	testbed.Eventually(t, "all connections end", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		failed = r.failed
		return len(r.open) == 0
	})
	return failed
}
