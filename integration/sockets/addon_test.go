package sockets

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestAddonIsLoadedAgain: mitmproxy loads the addon again when its file changes, as an update of a ConfigMap does.
// Connections that are open go on and keep their pod, new ones are served, and options keep their values.
func TestAddonIsLoadedAgain(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	testbed.ServeEcho(n)
	// mitmproxy 8 tells raw TCP by the server's address alone.
	const host = "198.51.100.11"
	n.World.IP("addr", "add", host+"/24", "dev", "eth0")
	const site = host + ":80"
	serveHTTP(n, site)
	addon := filepath.Join(n.Dir, "sluice.py")
	program, err := os.ReadFile(testbed.Addon(t))
	if err != nil {
		t.Fatal(err)
	}
	load := func(program []byte, modified time.Time) {
		if err := os.WriteFile(addon, program, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(addon, modified, modified); err != nil {
			t.Fatal(err)
		}
	}
	load(program, time.Now().Add(-time.Hour))
	proxy := testbed.LaunchMitmdump(n, "--showhost", "--set", "server=false",
		"--tcp-hosts", testbed.WorldIPv4, "--tcp-hosts", testbed.WorldIPv6,
		"--set", "sluice_socket="+n.ProxySocket(), "-s", addon, "-s", testbed.FlowPrinter(n))
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(1, 1)
	open := testbed.MustOpen(t, pod.Host, testbed.EchoAddresses[0])
	testbed.WantEcho(t, open, "before")
	kept := pod.HTTPClient()
	kept.Transport.(*http.Transport).DisableKeepAlives = false
	get := func() {
		t.Helper()
		if _, err := testbed.Get(testbed.Context(t), kept, "http://"+site+"/"); err != nil {
			t.Error(err)
		}
	}
	get()

	// A later version of the addon may describe an option in another way, which resets the option in mitmproxy.
	changed := bytes.Replace(program, []byte("Unix socket of sluiced"), []byte("The unix socket of sluiced"), 1)
	if bytes.Equal(changed, program) {
		t.Fatal("the addon does not describe its option as expected")
	}
	for loads, program := range [][]byte{program, changed, program} {
		load(program, time.Now().Add(time.Duration(loads-10)*time.Minute))
		outcome := testbed.Echoes(t, 40, 200, pod.Host)
		testbed.Eventually(t, "the new instance is connected", func() bool {
			return strings.Count(proxy.Log(), "connected to sluiced") == loads+2
		})
		testbed.WantServed(t, outcome, 40)
		d.WaitForProxies(1, 1)
		testbed.EchoAll(t, 10, 200, pod.Host)
		testbed.WantEcho(t, open, "after")
		get()
		of := fmt.Sprintf("http from %s of default/web", pod.IPv4)
		testbed.Eventually(t, "the flow on the connection of before has its pod", func() bool {
			return strings.Count(proxy.Log(), of) == loads+2
		})
		testbed.Eventually(t, "the open connections are counted", func() bool {
			return d.Status().Upstream.Proxies[0].Connections == 2
		})
	}
	if clients := strings.Count(proxy.Log(), "client connect"); clients != 2+3*50 {
		t.Errorf("got %d connections at the proxy; want 152: the HTTP client had to connect again", clients)
	}
}

// serveHTTP serves an empty answer to each request in the world.
func serveHTTP(n *testbed.Node, address string) {
	l := n.World.Listen(address)
	empty := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	s := &http.Server{Handler: empty, ReadHeaderTimeout: time.Minute}
	go func() { _ = s.Serve(l) }() // ends with the listener
}

// TestFailureOfTheServerIsAReset: of a server that refuses the connection, and of one that resets it later.
func TestFailureOfTheServerIsAReset(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	testbed.LaunchAddon(n)
	const reset, late = "4001", "4002"
	for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
		end := func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0) } // Serve closes it
		n.World.Serve(net.JoinHostPort(ip, reset), func(c net.Conn) {
			_, _ = c.Read(make([]byte, 1))
			end(c)
		})
		n.World.Serve(net.JoinHostPort(ip, late), func(c net.Conn) {
			_, _ = io.WriteString(c, "\x01hello")
			_, _ = c.Read(make([]byte, 1))
			end(c)
		})
	}
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(1, 1)
	n.IP("route", "add", "unreachable", "203.0.113.0/24")
	testbed.WantReset(t, pod.Host, "203.0.113.1:80")
	hello := "\x16\x03\x01\x00\x05hello" // as TLS begins
	for _, c := range []struct{ name, port, say, hears, then string }{
		{name: "refused, silent", port: "9"},
		{name: "refused, HTTP", port: "9", say: "GET / HTTP/1.1\r\nHost: x\r\n\r\n"},
		{name: "refused, TLS", port: "9", say: hello},
		{name: "reset", port: reset, say: "\x01\x02\x03\x04"},
		{name: "reset after data", port: late, hears: "\x01hello", then: "\x01"},
	} {
		for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
			t.Run(c.name+" by "+ip, func(t *testing.T) {
				conn, err := pod.Open(testbed.Context(t), net.JoinHostPort(ip, c.port))
				if errors.Is(err, unix.ECONNRESET) {
					return // the reset may come before connect returns
				} else if err != nil {
					t.Fatal(err)
				}
				defer conn.Close() //nolint:errcheck // read to its end
				// A write may meet the reset before the read does.
				_, failed := io.WriteString(conn, c.say)
				heard := make([]byte, len(c.hears))
				if _, err := io.ReadFull(conn, heard); err != nil || string(heard) != c.hears {
					t.Fatalf("got %q, %v; want %q", heard, err, c.hears)
				}
				if c.then != "" {
					testbed.Send(t, conn, c.then)
				}
				rest, err := io.ReadAll(conn)
				isReset := errors.Is(err, unix.ECONNRESET) || errors.Is(failed, unix.EPIPE) ||
					errors.Is(failed, unix.ECONNRESET)
				if !isReset || len(rest) > 0 {
					t.Errorf("got %q, %v, %v; want a reset", rest, failed, err)
				}
			})
		}
	}
}

// TestClientGivesUpInTheQueue: the proxy says nothing about a client that has gone, and serves the others.
func TestClientGivesUpInTheQueue(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	testbed.ServeEcho(n)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	for i, address := range append(testbed.EchoAddresses, testbed.EchoAddresses...) {
		c := testbed.MustOpen(t, pod.Host, address)
		if i < 2 { // a reset; without it, the connection is half-closed
			if err := c.SetLinger(0); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	testbed.Eventually(t, "the closes reach the other ends", func() bool {
		return pod.Exec("ss", "--no-header", "--tcp", "--numeric", "state", "established") == ""
	})
	pod.Exec("conntrack", "-F") // as time does
	outcome := testbed.Echoes(t, 10, 200, pod.Host)
	proxy := testbed.LaunchAddon(n, testbed.RawTCP...)
	d.WaitForProxies(1, 1)
	testbed.WantServed(t, outcome, 10)
	if strings.Contains(proxy.Log(), "refused") || strings.Contains(proxy.Log(), "ended:") {
		t.Error("the proxy warns of clients that have gone")
	}
}

// TestDNSFlowsShowThePod: a version that knows DNS over TCP makes another kind of flow of it.
func TestDNSFlowsShowThePod(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	const server = testbed.WorldIPv4 + ":53"
	n.World.Serve(server, func(c net.Conn) { _, _ = io.Copy(c, c) })
	script := filepath.Join(n.Dir, "tell.py")
	const program = `
def tell(flow): print("comment", flow.comment, flush=True)

dns_request = tcp_start = tell
`
	if err := os.WriteFile(script, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	proxy := testbed.LaunchAddon(n, "-s", script)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(1, 1)
	c := testbed.MustOpen(t, pod.Host, server)
	const query = "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01"
	testbed.Send(t, c, "\x00\x1d"+query)
	testbed.Eventually(t, "the flow has a comment", func() bool {
		return strings.Contains(proxy.Log(), "comment default/web")
	})
}

// TestOptionsForExplicitClients: pods need no credentials, and a proxy behind the proxy, which would not get their
// connections, is warned of.
func TestOptionsForExplicitClients(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	const site = testbed.WorldIPv4 + ":80"
	serveHTTP(n, site)
	proxy := testbed.LaunchAddon(n, "--mode", "upstream:http://127.0.0.1:3128", "--proxyauth", "user:secret")
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(1, 1)
	if body, err := testbed.Get(testbed.Context(t), pod.HTTPClient(), "http://"+site+"/"); err != nil || body != "" {
		t.Errorf("got %q, %v; want the server's empty answer", body, err)
	}
	if !strings.Contains(proxy.Log(), "--mode upstream, but directly") {
		t.Error("the proxy does not warn of the mode")
	}
}

// TestSavedFlowsOpenElsewhere: a mitmproxy without the addon opens a file that one with the addon has written.
func TestSavedFlowsOpenElsewhere(t *testing.T) {
	t.Parallel()
	n := testbed.NewWith(t, "sockets")
	const site = testbed.WorldIPv4 + ":80"
	serveHTTP(n, site)
	file := filepath.Join(n.Dir, "flows")
	proxy := testbed.LaunchAddon(n, "-w", file)
	d := n.StartDaemon()
	pod := n.AddPod("web")
	d.WaitForProxies(1, 1)
	if _, err := testbed.Get(testbed.Context(t), pod.HTTPClient(), "http://"+site+"/saved"); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "mitmdump shows the pod in its line", func() bool {
		return strings.Contains(proxy.Log(), " default/web: GET http://")
	})
	proxy.Stop()
	open := exec.CommandContext(t.Context(), n.Mitmproxy("mitmdump"), "--no-server",
		"--set", "confdir="+testbed.Confdir(n), "--rfile", file, "~comment default/web & ~meta uid-web")
	out, err := open.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "/saved") {
		t.Errorf("%v\n%s", err, out)
	}
}
