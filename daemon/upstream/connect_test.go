package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func TestConnectRequestNamesDestinationAndPod(t *testing.T) {
	t.Parallel()
	trust := attach.PodTrust{State: "trusted", TLS: attach.Pass, Nested: attach.Inspect}
	for name, tc := range map[string]struct {
		req  Request
		want string
	}{
		"IPv4": {
			request,
			"CONNECT 192.0.2.7:443 HTTP/1.1\r\nHost: 192.0.2.7:443\r\n" +
				"Sluice-Pod-Namespace: ci\r\nSluice-Pod-Name: web-0\r\nSluice-Pod-UID: 7d3f\r\n" +
				"Sluice-Source: 10.0.0.5:40000\r\n\r\n",
		},
		"IPv6": {
			Request{
				Destination: netip.MustParseAddrPort("[2001:db8::7]:80"),
				Source:      netip.MustParseAddrPort("[fd00::5]:1"),
				Pod:         attach.Pod{Namespace: "ci", Name: "web-0"},
			},
			"CONNECT [2001:db8::7]:80 HTTP/1.1\r\nHost: [2001:db8::7]:80\r\n" +
				"Sluice-Pod-Namespace: ci\r\nSluice-Pod-Name: web-0\r\nSluice-Source: [fd00::5]:1\r\n\r\n",
		},
		"inbound": {
			Request{
				Destination: netip.MustParseAddrPort("10.0.0.5:80"),
				Source:      netip.MustParseAddrPort("192.0.2.7:40000"),
				Inbound:     true,
			},
			"CONNECT 10.0.0.5:80 HTTP/1.1\r\nHost: 10.0.0.5:80\r\n" +
				"Sluice-Source: 192.0.2.7:40000\r\nSluice-Direction: inbound\r\n\r\n",
		},
		"of a pod that trusts the CA": {
			Request{Destination: netip.MustParseAddrPort("192.0.2.7:443"), Trust: trust},
			"CONNECT 192.0.2.7:443 HTTP/1.1\r\nHost: 192.0.2.7:443\r\n" +
				"Sluice-Trust: trusted\r\nSluice-TLS: pass\r\n\r\n",
		},
		"of a nested container": {
			Request{Destination: netip.MustParseAddrPort("192.0.2.7:443"), Trust: trust, Nested: true},
			"CONNECT 192.0.2.7:443 HTTP/1.1\r\nHost: 192.0.2.7:443\r\n" +
				"Sluice-Trust: trusted\r\nSluice-TLS: inspect\r\nSluice-Nested: true\r\n\r\n",
		},
		"without source and pod": {
			Request{Destination: netip.MustParseAddrPort("192.0.2.7:443")},
			"CONNECT 192.0.2.7:443 HTTP/1.1\r\nHost: 192.0.2.7:443\r\n\r\n",
		},
	} {
		checkSent(t, name, config.Connect, tc.req, tc.want, func(conn *net.TCPConn) string {
			asked, _ := readConnect(conn)
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
			return asked
		})
	}
}

// checkSent checks all that is sent for a request. grant grants it, and returns what it has read.
func checkSent(
	t *testing.T, name string, protocol config.Protocol, req Request, want string, grant func(*net.TCPConn) string,
) {
	t.Helper()
	got := make(chan string, 1)
	p := startProxy(t, "127.0.0.1:0", func(conn *net.TCPConn) {
		asked := grant(conn)
		more, _ := io.ReadAll(conn) // until the test closes the connection
		got <- asked + string(more)
	})
	conn, first, err := ask(t, p.Addr().String(), protocol, req)
	if err != nil || len(first) > 0 {
		t.Fatalf("%s: got %q, %v", name, first, err)
	}
	_ = conn.Close()
	if diff := cmp.Diff(want, <-got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// TestConnectRequestHasTheSecret, before all that the proxy believes because of it.
func TestConnectRequestHasTheSecret(t *testing.T) {
	t.Parallel()
	got := make(chan string, 1)
	p := startProxy(t, "127.0.0.1:0", func(conn *net.TCPConn) {
		asked, _ := readConnect(conn)
		got <- asked
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
	})
	u := newUpstream(p.Addr().String(), config.Connect)
	u.Authenticate("a1b2")
	conn, _, err := dialAndAsk(t.Context(), u, request)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	const want = "CONNECT 192.0.2.7:443 HTTP/1.1\r\nHost: 192.0.2.7:443\r\nSluice-Secret: a1b2\r\nSluice-Pod-"
	if asked := <-got; !strings.HasPrefix(asked, want) {
		t.Errorf("got %q; want %q first", asked, want)
	}
}

// TestInboundFromTheUpstreamIsRefused without a request: the upstream would connect to the pod again, without end.
func TestInboundFromTheUpstreamIsRefused(t *testing.T) {
	t.Parallel()
	asked := make(chan string, 1)
	p := startProxy(t, "127.0.0.1:0", func(conn *net.TCPConn) {
		b, _ := io.ReadAll(conn)
		asked <- string(b)
	})
	_, _, err := ask(t, p.Addr().String(), config.Connect, Request{
		Destination: netip.MustParseAddrPort("10.0.0.5:80"),
		Source:      netip.MustParseAddrPort("127.0.0.1:40000"),
		Inbound:     true,
	})
	if got := <-asked; !errors.Is(err, ErrUnreachable) || got != "" {
		t.Errorf("got %v, and request %q; want ErrUnreachable, and no request", err, got)
	}
}

// TestConnectKeepsDataAfterTheHeader: the answer to CONNECT has no body (RFC 9110 section 9.3.6), even if its header
// describes one.
func TestConnectKeepsDataAfterTheHeader(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("0123456789abcdef", 20_000)
	for name, tc := range map[string]struct{ header, body string }{
		"nothing":               {"HTTP/1.1 200 Connection established\r\n\r\n", ""},
		"a greeting":            {"HTTP/1.1 200 Connection established\r\n\r\n", "SSH-2.0-x\r\n"},
		"more than any buffer":  {"HTTP/1.1 200 OK\r\n\r\n", long},
		"a content length":      {"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", "SSH-2.0-x\r\n"},
		"a content length of 0": {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "SSH-2.0-x\r\n"},
		"chunked":               {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "3\r\nabc\r\n"},
		"to be closed":          {"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n", "hello"},
		"another success":       {"HTTP/1.1 204 No Content\r\n\r\n", "hello"},
		"data like a header":    {"HTTP/1.1 200 OK\r\nVia: x\r\n\r\n", "HTTP/1.1 502 Bad Gateway\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startProxy(t, "127.0.0.1:0", answering(tc.header+tc.body, hangUp))
			conn, first, err := ask(t, p.Addr().String(), config.Connect, request)
			if err != nil {
				t.Fatal(err)
			}
			if got := rest(t, conn, first); got != tc.body {
				t.Errorf("got %d bytes %.40q, want %d bytes %.40q", len(got), got, len(tc.body), tc.body)
			}
		})
	}
}

func TestConnectAnswersAreClassified(t *testing.T) {
	t.Parallel()
	page := func(text string) string { return "HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\n\r\n" + text }
	for _, tc := range []struct {
		name, answer string
		then         func(*net.TCPConn)
		want         error
		says         string
	}{
		{
			"502 without descriptors", page("<h1>[Errno 24] Too many open files</h1>"), hangUp,
			ErrLate, "file descriptors",
		},
		{"502 without descriptors, left open", page("OSError: [Errno 24]"), stayOpen, ErrLate, "file descriptors"},
		{"502 without descriptors on the node", page("[Errno 23] "), hangUp, ErrLate, "file descriptors"},
		{"502 without descriptors, in words", page("dial: too many open files"), hangUp, ErrLate, "file descriptors"},
		{"502 unreachable", page("[Errno 111] Connect call failed"), hangUp, ErrUnreachable, "502"},
		{"502 unreachable, left open", page("[Errno 113] No route"), stayOpen, ErrUnreachable, "502"},
		{
			"502 with a length, left open", "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\noops", stayOpen,
			ErrUnreachable, "502",
		},
		{"502 without a page", "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", hangUp, ErrUnreachable, "502"},
		{"502 with another errno", page("[Errno 241] x"), hangUp, ErrUnreachable, "502"},
		{"502 with a reset", page("x"), resetConn, ErrUnreachable, "502"},
		{"502 and a page without an end", page(strings.Repeat("x", 1<<20)), hangUp, ErrUnreachable, "502"},
		{"403", "HTTP/1.1 403 Forbidden\r\n\r\n", hangUp, ErrUnreachable, "403"},
		{"451", "HTTP/1.1 451 Unavailable For Legal Reasons\r\n\r\n", hangUp, ErrUnreachable, "451"},
		{"504", "HTTP/1.1 504 Gateway Timeout\r\n\r\n", hangUp, ErrUnreachable, "504"},
		{"500", "HTTP/1.1 500 Internal Server Error\r\n\r\n", hangUp, ErrLate, "500"},
		{"503", "HTTP/1.1 503 Service Unavailable\r\n\r\n", stayOpen, ErrLate, "503"},
		{"429", "HTTP/1.1 429 Too Many Requests\r\n\r\n", hangUp, ErrLate, "429"},
		{"407", "HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", hangUp, ErrMisconfigured, "user and a password"},
		{"405", "HTTP/1.1 405 Method Not Allowed\r\n\r\n", hangUp, ErrMisconfigured, "405"},
		{"400", "HTTP/1.1 400 Bad Request\r\n\r\n", hangUp, ErrMisconfigured, "400"},
		{"a redirect", "HTTP/1.1 301 Moved Permanently\r\nLocation: /\r\n\r\n", hangUp, ErrMisconfigured, "301"},
		{
			"interim answers", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 x\r\nA: b\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
			hangUp, nil, "",
		},
		{
			"an interim answer before a refusal", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 Forbidden\r\n\r\n", hangUp,
			ErrUnreachable, "403",
		},
		{"an interim answer alone", "HTTP/1.1 100 Continue\r\n\r\n", hangUp, ErrLate, "ended before the answer"},
		{
			"interim answers without end", strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 1000), stayOpen,
			ErrMisconfigured, "100",
		},
		{"101", "HTTP/1.1 101 Switching Protocols\r\n\r\n", stayOpen, ErrMisconfigured, "101"},
		{"another protocol", "SSH-2.0-OpenSSH_9.2\r\n", hangUp, ErrMisconfigured, "not HTTP"},
		{"a TLS alert", "\x15\x03\x01\x00\x02\x02\x0a\n\n", hangUp, ErrMisconfigured, "not HTTP"},
		{"closed before the answer", "", hangUp, ErrLate, "ended before the answer"},
		{"closed during the answer", "HTTP/1.1 200 OK\r\nVia", hangUp, ErrLate, "ended before the answer"},
		{"reset before the answer", "", resetConn, ErrLate, "ended before the answer"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := startProxy(t, "127.0.0.1:0", answering(tc.answer, tc.then))
			conn, _, err := ask(t, p.Addr().String(), config.Connect, request)
			checkAnswer(t, conn, err, tc.want, tc.says)
		})
	}
}

// TestFailuresOfKnownProxiesAreToldApart, where they answer the same for a dead destination and for themselves.
func TestFailuresOfKnownProxiesAreToldApart(t *testing.T) {
	t.Parallel()
	const refused = `Proxy-Status: a; received-status=200, b;next-hop="x; error=y"; error=connection_refused`
	for _, tc := range []struct {
		name, status, header, page string
		want                       error
		says                       string
	}{
		{"Squid, refused", "503", "X-Squid-Error: ERR_CONNECT_FAIL 111", "", ErrUnreachable, "111"},
		{"Squid without descriptors", "503", "X-Squid-Error: ERR_CONNECT_FAIL 24", "", ErrLate, "too many open files"},
		{"Squid without ports", "503", "X-Squid-Error: ERR_CONNECT_FAIL 99", "", ErrLate, "cannot assign"},
		{"Squid without its parents", "500", "X-Squid-Error: ERR_CANNOT_FORWARD 0", "", ErrLate, "500"},
		{"HAProxy", "503", "", "No server is available to handle this request.", ErrLate, "behind this one"},
		{"tinyproxy", "502", "", "<h1>Unable to connect to upstream proxy</h1>", ErrLate, "behind this one"},
		{
			"Envoy, refused", "503", "", "upstream connect error or disconnect/reset before headers. reset reason: " +
				"remote connection failure, transport failure reason: delayed connect error: 111",
			ErrUnreachable, "cannot connect",
		},
		{"an older Envoy", "503", "", "reset reason: connection failure", ErrUnreachable, "cannot connect"},
		{"Envoy, timed out", "503", "", "reset reason: connection timeout", ErrUnreachable, "cannot connect"},
		{"Envoy, overflow", "503", "", "reset reason: overflow", ErrLate, "too many connections"},
		{"Envoy, itself", "503", "", "reset reason: local connection failure", ErrLate, "503"},
		{"without descriptors", "503", "", "[Errno 24]", ErrLate, "file descriptors"},
		{"too busy", "503", "Retry-After: 1", "", ErrLate, "503"},
		{"Proxy-Status, refused", "503", refused, "", ErrUnreachable, "connection_refused"},
		{"Proxy-Status, at its limit", "502", "Proxy-Status: p; error=connection_limit_reached", "", ErrLate, "limit"},
		{"Proxy-Status, a fault", "403", "Proxy-Status: p;error=proxy_internal_error", "", ErrLate, "internal"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			header := "X: y"
			if tc.header != "" {
				header = tc.header
			}
			answer := fmt.Sprintf("HTTP/1.1 %s\r\n%s\r\nContent-Length: %d\r\n\r\n%s",
				tc.status, header, len(tc.page), tc.page)
			p := startProxy(t, "127.0.0.1:0", answering(answer, stayOpen))
			conn, _, err := ask(t, p.Addr().String(), config.Connect, request)
			checkAnswer(t, conn, err, tc.want, tc.says)
		})
	}
}

// TestUnclearAnswerIsMarked, for Judge; Retry-After makes it clear.
func TestUnclearAnswerIsMarked(t *testing.T) {
	t.Parallel()
	for header, want := range map[string]bool{"X: y": true, "Retry-After: 1": false} {
		p := startProxy(t, "127.0.0.1:0", answering("HTTP/1.1 503 x\r\n"+header+"\r\n\r\n", hangUp))
		_, _, err := ask(t, p.Addr().String(), config.Connect, request)
		var unclear *unclearError
		if got := errors.As(err, &unclear); got != want {
			t.Errorf("%s: got %v, unclear %t; want %t", header, err, got, want)
		}
	}
}

// checkAnswer checks that err is want alone and contains says, and that there is a connection without an error only.
func checkAnswer(t *testing.T, conn *net.TCPConn, err, want error, says string) {
	t.Helper()
	for _, kind := range []error{ErrLate, ErrUnreachable, ErrMisconfigured} {
		if got := errors.Is(err, kind); got != errors.Is(want, kind) {
			t.Errorf("got error %v, want %v", err, want)
			break
		}
	}
	if err != nil && !strings.Contains(err.Error(), says) {
		t.Errorf("got error %q, want one with %q", err, says)
	}
	if (conn != nil) != (want == nil) {
		t.Errorf("got connection %v with error %v", conn, err)
	}
}

func TestRefusedDialMeansLate(t *testing.T) {
	t.Parallel()
	u := newUpstream(freeAddress(), config.Connect)
	conn, err := u.Dial(t.Context())
	if conn != nil {
		t.Errorf("got %v, want no connection", conn)
	}
	checkAnswer(t, nil, err, ErrLate, "refused")
}

// TestDialDoesNotWaitForTheAnswer of the proxy, but for the handshake of TCP only.
func TestDialDoesNotWaitForTheAnswer(t *testing.T) {
	t.Parallel()
	dialed := make(chan struct{})
	p := startProxy(t, "127.0.0.1:0", func(conn *net.TCPConn) {
		<-dialed
		answering("HTTP/1.1 200 OK\r\n\r\n", hangUp)(conn)
	})
	u := newUpstream(p.Addr().String(), config.Connect)
	conn, err := u.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	close(dialed)
	if _, err := u.Ask(t.Context(), conn, request); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
}

func TestAskEndsWithItsContext(t *testing.T) {
	t.Parallel()
	for _, protocol := range []config.Protocol{config.Connect, config.SOCKS5} {
		p := startProxy(t, "127.0.0.1:0", stayOpen)
		ctx, cancel := context.WithCancel(t.Context())
		u := newUpstream(p.Addr().String(), protocol)
		conn, err := u.Dial(ctx)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if _, err := u.Ask(ctx, conn, request); err == nil {
			t.Errorf("%s: got no error", protocol)
		}
		if err := conn.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: got %v; want the connection closed", protocol, err)
		}
	}
}

// TestAskLeavesNoDeadline, because the connection is used for long after it.
func TestAskLeavesNoDeadline(t *testing.T) {
	t.Parallel()
	p := startProxy(t, "127.0.0.1:0", echoing)
	ctx, cancel := context.WithCancel(t.Context())
	conn, _, err := dialAndAsk(ctx, newUpstream(p.Addr().String(), config.Connect), request)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // everything was read
	cancel()           // after the answer
	_, _ = io.WriteString(conn, "ping")
	got := make([]byte, 4)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "ping" {
		t.Errorf("got %q, %v; want an echo", got, err)
	}
}
