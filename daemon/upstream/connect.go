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
	"strings"
	"time"

	"github.com/sluice-cni/sluice/plugin/attach"
)

const (
	// maxAnswer bounds the header of an answer to CONNECT, in bytes.
	maxAnswer = 64 << 10
	// maxReason bounds how much of an error page is read to find the reason, in bytes.
	maxReason = 4 << 10
)

// askConnect asks with HTTP CONNECT (RFC 9110, section 9.3.6). It sends nothing after the request until the answer has
// come: mitmproxy loses line breaks that arrive together with the request.
func askConnect(conn net.Conn, req Request) ([]byte, error) {
	if _, err := io.WriteString(conn, connectRequest(req)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLate, err)
	}
	ending := &ending{Reader: io.LimitReader(conn, maxAnswer)}
	answer := bufio.NewReader(ending)
	resp, err := http.ReadResponse(answer, &http.Request{Method: http.MethodConnect})
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

func connectRequest(req Request) string {
	var b strings.Builder
	fmt.Fprintf(&b, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n", req.Destination)
	for _, h := range []struct{ name, value string }{
		{"Sluice-Pod-Namespace", req.Pod.Namespace},
		{"Sluice-Pod-Name", req.Pod.Name},
		{"Sluice-Pod-UID", req.Pod.UID},
		{"Sluice-Source", source(req.Source)},
		{"Sluice-Direction", direction(req)},
		{"Sluice-Trust", req.Trust.State},
		{"Sluice-TLS", string(tlsPolicy(req))},
		{"Sluice-Nested", nested(req)},
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
	if req.Nested {
		return req.Trust.Nested
	}
	return req.Trust.TLS
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

// outOfDescriptors matches mitmproxy's error page when it could not open a socket: EMFILE or ENFILE.
var outOfDescriptors = regexp.MustCompile(`(?i)errno 2[34]\b|too many open files`)

func refusal(conn net.Conn, resp *http.Response) error {
	switch resp.StatusCode {
	case http.StatusBadGateway:
		// mitmproxy leaves the connection open after the page.
		_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		page, _ := io.ReadAll(io.LimitReader(resp.Body, maxReason)) // a part suffices
		if outOfDescriptors.Match(page) {
			return fmt.Errorf("%w: the proxy is out of file descriptors", ErrLate)
		}
		return fmt.Errorf("%w: %s", ErrUnreachable, resp.Status)
	case http.StatusForbidden, http.StatusGatewayTimeout:
		return fmt.Errorf("%w: %s", ErrUnreachable, resp.Status)
	case http.StatusServiceUnavailable, http.StatusTooManyRequests, http.StatusInternalServerError:
		return fmt.Errorf("%w: %s", ErrLate, resp.Status)
	case http.StatusProxyAuthRequired:
		return fmt.Errorf("%w: the proxy requires a user and a password (%s), and sluice has none",
			ErrMisconfigured, resp.Status)
	default:
		return fmt.Errorf("%w: the proxy answers CONNECT with %s", ErrMisconfigured, resp.Status)
	}
}
