package upstream

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

const (
	// maxAnswer bounds the header of an answer to CONNECT, in bytes.
	maxAnswer = 64 << 10
	// maxReason bounds how much of an error page is read to find the reason, in bytes.
	maxReason = 4 << 10
	// maxInterim bounds the number of interim answers before the final one.
	maxInterim = 8
)

// askConnect asks with HTTP CONNECT (RFC 9110, section 9.3.6). It sends nothing after the request until the answer has
// come: mitmproxy loses line breaks that arrive together with the request.
func askConnect(conn net.Conn, req Request, secret string) ([]byte, error) {
	if _, err := io.WriteString(conn, connectRequest(req, secret)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLate, err)
	}
	ending := &ending{Reader: io.LimitReader(conn, maxAnswer)}
	answer := bufio.NewReader(ending)
	resp, err := http.ReadResponse(answer, &http.Request{Method: http.MethodConnect})
	for n := 0; n < maxInterim && err == nil && isInterim(resp); n++ {
		resp, err = http.ReadResponse(answer, resp.Request)
	}
	switch {
	case err == nil:
	case lost(err), ending.err != nil:
		return nil, fmt.Errorf("%w: the connection ended before the answer: %w", ErrLate, err)
	default:
		return nil, fmt.Errorf("%w: the answer is not HTTP: %w", ErrMisconfigured, err)
	}
	if resp.StatusCode/100 == 2 {
		first := make([]byte, answer.Buffered()) // sent by the server before the client
		_, err := io.ReadFull(answer, first)
		return first, err
	}
	return nil, refusal(conn, resp)
}

// isInterim reports whether another answer follows (RFC 9110, section 15.2). After 101 comes another protocol.
func isInterim(resp *http.Response) bool {
	return resp.StatusCode/100 == 1 && resp.StatusCode != http.StatusSwitchingProtocols
}

// ending remembers the read error of a connection: to the parser, an answer that is cut off looks malformed.
type ending struct {
	io.Reader
	err error
}

func (e *ending) Read(p []byte) (n int, err error) {
	n, err = e.Reader.Read(p)
	if err != nil {
		e.err = err
	}
	return n, err
}

func connectRequest(req Request, secret string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n", req.Destination)
	for _, h := range []struct{ name, value string }{
		{"Sluice-Secret", secret},
		{"Sluice-Pod-Namespace", req.Pod.Namespace},
		{"Sluice-Pod-Name", req.Pod.Name},
		{"Sluice-Pod-UID", req.Pod.UID},
		{"Sluice-Source", source(req.Source)},
		{"Sluice-Direction", direction(req)},
		{"Sluice-Trust", req.Trust.State},
		{"Sluice-TLS", string(tlsPolicy(req))},
		{"Sluice-Nested", nested(req)},
		{"Sluice-Container-Trust", req.Container},
	} {
		if h.value != "" {
			fmt.Fprintf(&b, "%s: %s\r\n", h.name, h.value)
		}
	}
	b.WriteString("\r\n")
	return b.String()
}

func source(s netip.AddrPort) string {
	if !s.IsValid() {
		return ""
	}
	return s.String()
}

// direction names the direction of inbound connections; outbound is the default.
func direction(req Request) string {
	if req.Inbound {
		return "inbound"
	}
	return ""
}

// tlsPolicy is the policy for the sender's TLS.
func tlsPolicy(req Request) attach.TLSPolicy {
	switch {
	case !req.Nested:
		return req.Trust.TLS
	case req.Container != "" && req.Container != string(truststore.Trusted):
		return attach.Pass
	default:
		return req.Trust.Nested
	}
}

func nested(req Request) string {
	if req.Nested {
		return "true"
	}
	return ""
}

// lost reports that a connection ended or timed out, rather than that it carried something malformed.
func lost(err error) bool {
	var n net.Error
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &n)
}

// refusal interprets an answer to CONNECT other than success. Proxies that cannot reach a destination answer 502, 503,
// 504 or 500, and some of them answer the same when they cannot serve at all. docs/proxies.md lists them.
func refusal(conn net.Conn, resp *http.Response) error {
	if err := proxyStatus(resp.Header.Values("Proxy-Status")); err != nil {
		return fmt.Errorf("%w, %s", err, resp.Status)
	}
	switch resp.StatusCode {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusInternalServerError:
		return failure(conn, resp)
	case http.StatusForbidden, http.StatusUnavailableForLegalReasons, http.StatusGatewayTimeout:
		return fmt.Errorf("%w: %s", ErrUnreachable, resp.Status)
	case http.StatusTooManyRequests:
		return fmt.Errorf("%w: %s", ErrLate, resp.Status)
	case http.StatusProxyAuthRequired:
		return fmt.Errorf("%w: the proxy requires a user and a password (%s), and sluice has none",
			ErrMisconfigured, resp.Status)
	default:
		return &unclearError{ErrMisconfigured, resp.Status}
	}
}

// failure interprets 500, 502 and 503.
func failure(conn net.Conn, resp *http.Response) error {
	if err := squidError(resp.Header.Get("X-Squid-Error")); err != nil {
		return fmt.Errorf("%w, %s", err, resp.Status)
	}
	// mitmproxy leaves the connection open after the page.
	_ = conn.SetReadDeadline(time.Now().Add(time.Second))
	page, _ := io.ReadAll(io.LimitReader(resp.Body, maxReason)) // a part suffices
	for _, p := range pages {
		if p.text.Match(page) {
			return fmt.Errorf("%w: %s, %s", p.means, p.says, resp.Status)
		}
	}
	switch {
	case resp.StatusCode == http.StatusBadGateway:
		return fmt.Errorf("%w: %s", ErrUnreachable, resp.Status)
	case resp.Header.Get("Retry-After") != "": // the proxy speaks of itself (RFC 9110, section 15.6.4)
		return fmt.Errorf("%w: %s", ErrLate, resp.Status)
	default:
		return &unclearError{ErrLate, resp.Status}
	}
}

// pages are texts of error pages that tell a failure of the proxy from one of the destination.
var pages = []struct {
	text  *regexp.Regexp
	means error
	says  string
}{
	// mitmproxy and Go: EMFILE or ENFILE.
	{regexp.MustCompile(`(?i)errno 2[34]\b|too many open files`), ErrLate, "the proxy is out of file descriptors"},
	// HAProxy, which is in front of other proxies then: it cannot connect for CONNECT itself.
	{regexp.MustCompile(`No server is available`), ErrLate, "no proxy behind this one is available"},
	// tinyproxy with another proxy as its own upstream.
	{regexp.MustCompile(`Unable to connect to upstream proxy`), ErrLate, "no proxy behind this one is available"},
	// Envoy, by the reason for which it has reset its stream to the destination.
	{regexp.MustCompile(`reset reason: overflow`), ErrLate, "the proxy has too many connections"},
	{
		regexp.MustCompile(`reset reason: (remote )?connection (failure|timeout)`),
		ErrUnreachable, "the proxy cannot connect",
	},
}

// squidFailure matches the errors of Squid that concern the connection to the destination, and their errno.
var squidFailure = regexp.MustCompile(`^ERR_CONNECT_FAIL (\d+)$`)

// squidError interprets the header X-Squid-Error. It returns nil if the header does not tell which side has failed.
func squidError(value string) error {
	m := squidFailure.FindStringSubmatch(value)
	if m == nil {
		return nil
	}
	errno, err := strconv.Atoi(m[1])
	if err == nil && isLocalExhaustion(unix.Errno(errno)) {
		return fmt.Errorf("%w: Squid reports: %w", ErrLate, unix.Errno(errno))
	}
	return fmt.Errorf("%w: Squid reports %s", ErrUnreachable, value)
}
