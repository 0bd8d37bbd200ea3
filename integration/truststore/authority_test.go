package truststore

import (
	"archive/zip"
	"bytes"
	"crypto/tls"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync"
	"testing"

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
	server := httptest.NewUnstartedServer(http.HandlerFunc(serve))
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

// serve serves a page, a git repository, an index of Python packages and a registry of cargo.
func serve(w http.ResponseWriter, r *http.Request) {
	page := []byte("hello")
	switch base := path.Base(r.URL.Path); {
	case base == "refs":
		page = []byte(strings.Repeat("1", 40) + "\trefs/heads/hello\n")
	case strings.HasPrefix(r.URL.Path, "/simple/"):
		w.Header().Set("Content-Type", "text/html")
		page = []byte("<a href=/" + wheelName + ">" + wheelName + "</a>")
	case base == wheelName:
		page = wheel()
	case base == "config.json":
		page = fmt.Appendf(nil, `{"dl": "https://%s/dl", "api": "https://%[1]s"}`, r.Host)
	case base == "crates":
		page = []byte(`{"crates": [{"name": "hello", "max_version": "1.0.0"}], "meta": {"total": 1}}`)
	}
	_, _ = w.Write(page) // a client that has gone fails by itself
}

const wheelName = "hello-1.0-py3-none-any.whl"

// wheel is a Python package without a module.
var wheel = sync.OnceValue(func() []byte {
	var data bytes.Buffer
	archive := zip.NewWriter(&data)
	for _, file := range [][2]string{
		{"METADATA", "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n"},
		{"WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"RECORD", "hello-1.0.dist-info/METADATA,,\nhello-1.0.dist-info/WHEEL,,\nhello-1.0.dist-info/RECORD,,\n"},
	} {
		w, err := archive.Create("hello-1.0.dist-info/" + file[0])
		if err == nil {
			_, err = w.Write([]byte(file[1]))
		}
		if err != nil {
			panic(err) // memory does not fail
		}
	}
	if err := archive.Close(); err != nil {
		panic(err) // as above
	}
	return data.Bytes()
})
