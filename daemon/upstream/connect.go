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
)

const (
	// maxAnswer bounds the header of an answer to CONNECT, in bytes.
	maxAnswer = 64 << 10
	// maxReason bounds how much of an error page is read to find the reason, in bytes.
	maxReason = 4 << 10
)

// askConnect asks with HTTP CONNECT (RFC 9110, section 9.3.6). Nothing follows the request until the answer
// is there: mitmproxy eats line breaks that come with it.
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
		return nil, fmt.Errorf("%w: it ended before its answer: %w", ErrLate, err)
	default:
		return nil, fmt.Errorf("%w: no HTTP proxy answers there: %w", ErrMisconfigured, err)
	}
	if resp.StatusCode/100 == 2 {
		first := make([]byte, answer.Buffered()) // what the server said at once
		_, err := io.ReadFull(answer, first)
		return first, err
	}
	return nil, refusal(conn, resp)
}

// ending remembers how a connection ended: half an answer looks malformed to its parser.
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

// direction is said of what is not the rule.
func direction(req Request) string {
	if req.Inbound {
		return "inbound"
	}
	return ""
}

// lost tells a connection that ended, or that stayed silent for too long, from one that said something odd.
func lost(err error) bool {
	var n net.Error
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &n)
}

// outOfDescriptors is how mitmproxy says that it could not open a socket: EMFILE or ENFILE.
var outOfDescriptors = regexp.MustCompile(`(?i)errno 2[34]\b|too many open files`)

func refusal(conn net.Conn, resp *http.Response) error {
	switch resp.StatusCode {
	case http.StatusBadGateway:
		// mitmproxy leaves the connection open behind the page.
		_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		page, _ := io.ReadAll(io.LimitReader(resp.Body, maxReason)) // as much as there is
		if outOfDescriptors.Match(page) {
			return fmt.Errorf("%w: it is out of file descriptors", ErrLate)
		}
		return fmt.Errorf("%w: %s", ErrUnreachable, resp.Status)
	case http.StatusForbidden, http.StatusGatewayTimeout:
		return fmt.Errorf("%w: %s", ErrUnreachable, resp.Status)
	case http.StatusServiceUnavailable, http.StatusTooManyRequests, http.StatusInternalServerError:
		return fmt.Errorf("%w: %s", ErrLate, resp.Status)
	case http.StatusProxyAuthRequired:
		return fmt.Errorf("%w: it wants a user and a password (%s); sluice has none to give", ErrMisconfigured, resp.Status)
	default:
		return fmt.Errorf("%w: it answers CONNECT with %s", ErrMisconfigured, resp.Status)
	}
}
