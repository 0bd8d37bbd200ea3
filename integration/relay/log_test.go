package relay

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestPodDoesNotFloodTheLog: a pod can cause resets and refusals at any rate. A line stands for many of them.
func TestPodDoesNotFloodTheLog(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.StartAnsweringProxy(n, "connect", "HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n")
	n.Config["capture"] = map[string]any{"source": "all", "excludeCIDRs": []string{}}
	d := n.StartDaemon()
	pod := n.AddPod("loud")
	const count = 300
	for message, address := range map[string]string{
		"connection reset": testbed.Web, "connection refused": "169.254.169.254:80",
	} {
		for range count / 10 {
			testbed.ForEach(t, 10, func(int) error {
				c, err := pod.Open(testbed.Context(t), address)
				if err == nil {
					_, err = io.ReadAll(c)
					_ = c.Close() // read to its end
				}
				if !errors.Is(err, unix.ECONNRESET) {
					return fmt.Errorf("connecting to %s: got %w, want a reset", address, err)
				}
				return nil
			})
		}
		if got := strings.Count(d.Log(), `msg="`+message+`"`); got == 0 || got > count/10 {
			t.Errorf("%d lines %q for %d connections, want a few", got, message, count)
		}
		testbed.WantMatch(t, d.Log(), message+`" pod=default/loud source=.* count=1 `)
	}
}

// TestRefusedDestinationsDoNotFloodTheLog: a pod alternates destinations that the proxy refuses as a proxy that is
// misconfigured does, and others. Those that it refuses in an unclear way end with a reset, and are not reported.
func TestRefusedDestinationsDoNotFloodTheLog(t *testing.T) {
	t.Parallel()
	const badPort, passwordPort = "9", "10"
	n := testbed.New(t)
	testbed.ServeEcho(n)
	n.Serve(testbed.ProxyAddress, func(c net.Conn) {
		in := bufio.NewReader(c)
		req, err := http.ReadRequest(in)
		if err != nil {
			return // the daemon's idle connection
		}
		switch _, port, _ := net.SplitHostPort(req.Host); port {
		case badPort:
			_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
		case passwordPort:
			_, _ = io.WriteString(c, "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
		default:
			testbed.ConnectTo(n, c, in, req.Host, testbed.Connected, "")
		}
	})
	d := n.StartDaemon()
	pod := n.AddPod("loud")
	const count = 50
	alternate := func(port string) (refused []net.Conn) {
		for range count {
			refused = append(refused, testbed.MustOpen(t, pod.Host, net.JoinHostPort(testbed.WorldIPv4, port)))
			testbed.EchoAll(t, 2, 200, pod.Host)
		}
		return refused
	}
	for _, c := range alternate(badPort) {
		if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("a destination that the proxy refuses: got %v, want a reset", err)
		}
	}
	if s := d.Status().Upstream; s.Reason != "" || strings.Contains(d.Log(), "misconfigured") {
		t.Errorf("got %s, want no report of a misconfiguration", testbed.JSON(s))
	}
	alternate(passwordPort)
	if s := d.Status().Upstream; !s.Ready || !strings.Contains(s.Reason, "requires a user and a password") {
		t.Errorf("got %s, want a misconfiguration", testbed.JSON(s))
	}
	if got := strings.Count(d.Log(), "misconfigured"); got == 0 || got > count/10 {
		t.Errorf("%d lines about it for %d connections, want a few", got, count)
	}
}
