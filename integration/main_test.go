// Package integration tests sluice as its users meet it: the real binaries in real network namespaces, through
// real CNI chains, with a real mitmproxy.
package integration

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// bin holds the binaries under test.
var bin string

func TestMain(m *testing.M) {
	flag.Parse()
	build := func() (string, error) { return testbed.Build(true) }
	if *long {
		build = testbed.BuildReleased // what is drilled is what people run
	}
	var err error
	if bin, err = build(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := testbed.Main(m)
	_ = os.RemoveAll(bin)
	os.Exit(code)
}

// patience bounds what should take moments.
func patience(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// client makes HTTP requests from h; each on a connection of its own.
func client(h *testbed.Host) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return h.Dial(ctx, network, address)
		},
	}}
}

// get returns the body of a page.
func get(ctx context.Context, c *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return string(body), err
}

// serveHTTP serves a page in the world that says who asked.
func serveHTTP(n *testbed.Node, address string) {
	l := n.World.Listen(address)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintf(w, "hello %s", host)
	}), ReadHeaderTimeout: time.Minute}
	go func() { _ = s.Serve(l) }() // ends with the listener
}
