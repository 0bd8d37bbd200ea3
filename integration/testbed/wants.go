package testbed

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

// IPOf is the IP of an address with a port.
func IPOf(a net.Addr) string {
	host, _, _ := net.SplitHostPort(a.String())
	return host
}

// ServeCaller answers every connection with the IP that it comes from, and closes it.
func (h *Host) ServeCaller(address string) {
	h.tb.Helper()
	h.Serve(address, func(c net.Conn) { fmt.Fprint(c, IPOf(c.RemoteAddr())) })
}

// Caller connects from the netns to a server of ServeCaller and returns its answer: the IP that the connection comes
// from, as the server sees it.
func (h *Host) Caller(ctx context.Context, address string) (string, error) {
	c, err := h.Dial(ctx, "tcp", address)
	if err != nil {
		return "", err
	}
	defer c.Close() //nolint:errcheck // read to its end
	return ReadAll(ctx, c)
}

// ReadAll reads c to its end within the deadline of ctx.
func ReadAll(ctx context.Context, c net.Conn) (string, error) {
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return "", err
		}
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// WantCaller fails the test unless the server at address sees h's connection come from want.
func WantCaller(t *testing.T, h *Host, address, want string) {
	t.Helper()
	if got, err := h.Caller(Context(t), address); err != nil || got != want {
		t.Errorf("connecting to %s: the server saw %q, %v; want a connection from %s", address, got, err, want)
	}
}

// WantReset fails the test unless a connection is accepted, and then reset without a byte.
func WantReset(t *testing.T, h *Host, address string) {
	t.Helper()
	got, err := h.Caller(Context(t), address)
	if !errors.Is(err, unix.ECONNRESET) || got != "" {
		t.Errorf("connecting to %s got %q, %v; want a reset", address, got, err)
	}
}

// WantDropped fails the test if a connection from h to address is accepted. A dropped SYN gives no sign, so the test
// waits until the second SYN, which goes after one second, is dropped too.
func WantDropped(t *testing.T, h *Host, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", address)
	if err == nil {
		_ = c.Close() // nothing is asked of it
		t.Errorf("a connection from %s to %s was accepted", h.Name, address)
	}
}

// HTTPClient makes HTTP requests from the netns, each on a new connection.
func (h *Host) HTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return h.Dial(ctx, network, address)
		},
	}}
}

// Get returns the body of a page, asked for from the netns.
func (h *Host) Get(ctx context.Context, url string) (string, error) {
	return Get(ctx, h.HTTPClient(), url)
}

// Get returns the body of a page. Any status but 200 is an error.
func Get(ctx context.Context, c *http.Client, url string) (string, error) {
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

// RoundTrip writes a request as it is and reads the response.
func RoundTrip(ctx context.Context, c net.Conn, request string) (*http.Response, error) {
	deadline := time.Now().Add(20 * time.Second)
	if d, ok := ctx.Deadline(); ok {
		deadline = d
	}
	if err := c.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if _, err := io.WriteString(c, request); err != nil {
		return nil, err
	}
	return http.ReadResponse(bufio.NewReader(c), nil)
}

// MustSluiced runs a command of sluiced that succeeds, and returns its output.
func MustSluiced(t *testing.T, n *Node, args ...string) string {
	t.Helper()
	out, err := n.Sluiced(args...)
	if err != nil {
		t.Fatalf("sluiced %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// ConfigFile writes a configuration of the daemon: a string as it is, any other value as YAML.
func ConfigFile(t *testing.T, config any) string {
	t.Helper()
	data, is := config.(string)
	if !is {
		y, err := yaml.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		data = string(y)
	}
	file := filepath.Join(t.TempDir(), "sluiced.yaml")
	if err := os.WriteFile(file, []byte(data), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// WantMatch fails the test unless text matches pattern.
func WantMatch(t *testing.T, text, pattern string) {
	t.Helper()
	if !regexp.MustCompile(pattern).MatchString(text) {
		t.Errorf("got %q; want something like %s", text, pattern)
	}
}

// Describe is a CNI error with its details, some of which its Error method leaves out.
func Describe(err error) string {
	var e *types.Error
	if errors.As(err, &e) {
		return fmt.Sprintf("code %d: %s; %s", e.Code, e.Msg, e.Details)
	}
	return fmt.Sprint(err)
}

// WantCNIError fails the test unless err is a CNI error with that code and every one of the words. Code 0 stands for
// any.
func WantCNIError(t *testing.T, err error, code uint, words ...string) {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) {
		t.Errorf("got %v; want a CNI error with code %d", err, code)
		return
	}
	if code != 0 && e.Code != code {
		t.Errorf("got %s; want code %d", Describe(err), code)
	}
	for _, w := range words {
		if text := Describe(err); !strings.Contains(text, w) {
			t.Errorf("got %s; want it to name %q", text, w)
		}
	}
}

// WantErrorLike fails the test unless there is an error and it matches pattern.
func WantErrorLike(t *testing.T, err error, pattern string) {
	t.Helper()
	if err == nil || !regexp.MustCompile(pattern).MatchString(Describe(err)) {
		t.Errorf("got %s; want an error like %s", Describe(err), pattern)
	}
}
