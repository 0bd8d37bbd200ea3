package waiting

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// badGateway is mitmproxy's response to CONNECT when it could not connect, with the reason in Python's words.
func badGateway(reason string) string {
	const head = "HTTP/1.1 502 Bad Gateway\r\nServer: mitmproxy 8.1.1\r\nConnection: close\r\n" +
		"Content-Type: text/html\r\n"
	page := "<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1><p>" + reason +
		"</p></body></html>"
	return fmt.Sprintf("%scontent-length: %d\r\n\r\n%s", head, len(page), page)
}

// socksReply is a SOCKS5 server's reply to a request.
func socksReply(code byte) string {
	return "\x05" + string(rune(code)) + "\x00\x01\x00\x00\x00\x00\x00\x00"
}

// TestConnectionsWaitWhileTheUpstreamFails: a failure of the upstream alone is no reason to end a connection.
func TestConnectionsWaitWhileTheUpstreamFails(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, protocol, answer string }{
		{"502 without descriptors", "connect", badGateway("[Errno 24] Too many open files")},
		{"503", "connect", "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"},
		{"half an answer", "connect", ""},
		{"SOCKS5 general failure", "socks5", socksReply(1)},
		{"SOCKS5 ended before its reply", "socks5", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, c.protocol)
			seen := testbed.ServeEcho(n)
			proxy := testbed.StartAnsweringProxy(n, c.protocol, c.answer)
			d := n.StartDaemon()
			pod := n.AddPod("patient")
			const count = 10
			outcome := testbed.Echoes(t, count, 64<<10, pod.Host)
			testbed.Eventually(t, "the upstream is asked again and again", func() bool {
				return proxy.Asked() >= 4*count
			})
			if got := d.Of(pod).Waiting; got != count || len(outcome) != 0 || seen.Load() != 0 {
				t.Errorf("%d connections wait, %d have ended, %d have arrived; want all %d to wait",
					got, len(outcome), seen.Load(), count)
			}
			proxy.Mend()
			testbed.WantServed(t, outcome, count)
			if got := n.SYNs(); got != 0 {
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}

// TestMisconfiguredUpstreamIsReported: connections wait here too. Since only the operator can change that, the daemon
// logs it as an error, once.
func TestMisconfiguredUpstreamIsReported(t *testing.T) {
	t.Parallel()
	const wantsPassword = "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
	for _, c := range []struct{ name, protocol, answer, report string }{
		{"407", "connect", wantsPassword, "requires a user and a password"},
		{"no HTTP proxy", "connect", "SSH-2.0-not-a-proxy\r\n\r\n", "the answer is not HTTP"},
		{"SOCKS5 with a password", "socks5", "\x05\xff", "requires a user and a password"},
		{"no SOCKS5 proxy", "socks5", "HT", "the answer is not SOCKS5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, c.protocol)
			testbed.ServeEcho(n)
			proxy := testbed.StartAnsweringProxy(n, c.protocol, c.answer)
			d := n.StartDaemon()
			pod := n.AddPod("patient")
			const count = 6
			outcome := testbed.Echoes(t, count, 200, pod.Host)
			testbed.Eventually(t, "the upstream is asked again", func() bool { return proxy.Asked() >= 2*count })
			wantReported(t, n, d, c.report)
			if got := d.Of(pod).Waiting; got != count || len(outcome) != 0 {
				t.Errorf("%d connections wait, %d have ended; want all %d to wait", got, len(outcome), count)
			}
			proxy.Mend()
			testbed.WantServed(t, outcome, count)
			testbed.Eventually(t, "the status no longer reports it", func() bool {
				return d.Status().Upstream.Reason == ""
			})
			testbed.Eventually(t, "the log says that the upstream is well", func() bool {
				return strings.Contains(d.Log(), "upstream is no longer misconfigured")
			})
		})
	}
}

// wantReported fails the test unless the daemon reports the fault of the upstream in its log, once, and in its status.
func wantReported(t *testing.T, n *testbed.Node, d *testbed.Daemon, fault string) {
	t.Helper()
	var said []string
	testbed.Eventually(t, "the log names the fault", func() bool { // the status may be quicker
		said = nil
		for line := range strings.Lines(d.Log()) {
			if strings.Contains(line, "upstream is misconfigured") {
				said = append(said, line)
			}
		}
		return len(said) > 0
	})
	if len(said) != 1 || !strings.Contains(said[0], "level=ERROR") || !strings.Contains(said[0], fault) {
		t.Errorf("the log has %q; want one error that the upstream %s", said, fault)
	}
	status := testbed.MustSluiced(t, n, "status", "--agent-socket="+n.AgentSocket())
	testbed.WantMatch(t, status, `upstream 127.0.0.1:18080 \(.*\): ready for .*`+fault)
}

// TestUnreachableDestinationIsAReset: the upstream is well, so the connection does not wait. An end without an error
// would look like a response.
func TestUnreachableDestinationIsAReset(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, protocol, answer string }{
		{"502 refused", "connect", badGateway("[Errno 111] Connect call failed ('198.51.100.10', 7)")},
		{"502 no route", "connect", badGateway("[Errno 113] No route to host")},
		{"504", "connect", "HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n"},
		{"403", "connect", "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"},
		{"SOCKS5 not allowed", "socks5", socksReply(2)},
		{"SOCKS5 host unreachable", "socks5", socksReply(4)},
		{"SOCKS5 refused", "socks5", socksReply(5)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, c.protocol)
			proxy := testbed.StartAnsweringProxy(n, c.protocol, c.answer)
			d := n.StartDaemon()
			pod := n.AddPod("unlucky")
			nested := pod.Nested()
			for _, address := range testbed.EchoAddresses {
				testbed.WantReset(t, pod.Host, address)
				testbed.WantReset(t, nested, address)
			}
			if got := proxy.Asked(); got != 4 {
				t.Errorf("the upstream was asked %d times, want once for each connection", got)
			}
			if s := d.Status().Upstream; !s.Ready || s.Reason != "" {
				t.Errorf("got %s, want an upstream that is well", testbed.JSON(s))
			}
		})
	}
}

// mitmModes are the protocols of mitmproxy, and its modes for them.
var mitmModes = []struct{ protocol, mode string }{{"connect", "regular"}, {"socks5", "socks5"}}

// TestClosedPortBehindMitmproxyIsAReset: mitmproxy refuses to connect.
func TestClosedPortBehindMitmproxyIsAReset(t *testing.T) {
	t.Parallel()
	for _, m := range mitmModes {
		t.Run(m.protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, m.protocol)
			testbed.StartMitmdump(n, "--mode", m.mode)
			n.StartDaemon()
			pod := n.AddPod("unlucky")
			for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
				testbed.WantReset(t, pod.Host, net.JoinHostPort(ip, "81"))
			}
		})
	}
}

// TestMitmproxyThatWantsAPassword: requests wait until it no longer does.
func TestMitmproxyThatWantsAPassword(t *testing.T) {
	t.Parallel()
	for _, m := range mitmModes {
		t.Run(m.protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, m.protocol)
			serveHTTP(n, testbed.Web)
			proxy := testbed.StartMitmdump(n, "--mode", m.mode, "--set", "proxyauth=user:secret")
			d := n.StartDaemon()
			pod := n.AddPod("patient")
			page := make(chan error, 1)
			go func() {
				_, err := pod.Get(testbed.Context(t), "http://"+testbed.Web)
				page <- err
			}()
			testbed.Eventually(t, "the daemon knows the fault", func() bool { return d.Status().Upstream.Reason != "" })
			wantReported(t, n, d, "requires a user and a password")
			if got := d.Of(pod).Waiting; got != 1 || len(page) != 0 {
				t.Errorf("%d requests wait, %d have ended; want one to wait", got, len(page))
			}
			proxy.Kill()
			testbed.StartMitmdump(n, "--mode", m.mode)
			testbed.WantServed(t, page, 1)
		})
	}
}

// TestMitmproxyOutOfDescriptors: a request waits until mitmproxy can connect again.
func TestMitmproxyOutOfDescriptors(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	serveHTTP(n, testbed.Web)
	proxy := testbed.StartMitmdump(n)
	d := n.StartDaemon()
	pod := n.AddPod("patient")
	// Python opens files too, for the modules that a first request needs.
	if _, err := pod.Get(testbed.Context(t), "http://"+testbed.Web); err != nil {
		t.Fatal(err)
	}
	// On the daemon's idle connection mitmproxy gets a request even when it cannot accept.
	testbed.Eventually(t, "mitmproxy has accepted the idle connection", func() bool {
		log := proxy.Log()
		return strings.Count(log, "client connect") == strings.Count(log, "client disconnect")+1
	})
	enough := limitDescriptors(t, proxy.Pid(), lowestFreeDescriptor(t, proxy.Pid()))
	page := make(chan error, 1)
	go func() {
		_, err := pod.Get(testbed.Context(t), "http://"+testbed.Web)
		page <- err
	}()
	testbed.Eventually(t, "mitmproxy cannot connect", func() bool {
		return strings.Contains(proxy.Log(), "error establishing server connection: [Errno 24]")
	})
	testbed.WantPending(t, page)
	if got := d.Of(pod).Waiting; got != 1 {
		t.Errorf("%d requests wait, want one", got)
	}
	limitDescriptors(t, proxy.Pid(), enough)
	testbed.WantServed(t, page, 1)
}

// limitDescriptors sets how many descriptors a process may have, and returns how many it could have before.
func limitDescriptors(t *testing.T, pid int, n uint64) (before uint64) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit); err != nil {
		t.Fatal(err)
	}
	before, limit.Cur = limit.Cur, n
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &limit, nil); err != nil {
		t.Fatal(err)
	}
	return before
}

func lowestFreeDescriptor(t *testing.T, pid int) uint64 {
	t.Helper()
	for fd := uint64(0); ; fd++ {
		_, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", pid, fd))
		if os.IsNotExist(err) {
			return fd
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
