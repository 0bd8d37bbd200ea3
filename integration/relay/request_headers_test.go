package relay

import (
	"bufio"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// secretFile is the path of the secret of a node's daemon.
func secretFile(n *testbed.Node) string {
	return filepath.Join(filepath.Dir(n.ProxySocket()), "proxy.secret")
}

// TestRequestNamesThePod: the CONNECT request has the pod and the pod's own address, also for a container in the pod,
// and the secret by which the proxy believes it.
func TestRequestNamesThePod(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	n.HandOver(n.StartDaemon()) // the second daemon has the same secret
	secret, err := os.ReadFile(secretFile(n))
	if err != nil {
		t.Fatal(err)
	}
	pod := n.AddPod("asking")
	nested := pod.Nested()
	for _, c := range []struct {
		name       string
		from       *testbed.Host
		world, pod string
		port       string
	}{
		{"the pod over IPv4", pod.Host, testbed.WorldIPv4, pod.IPv4, "8001"},
		{"the pod over IPv6", pod.Host, testbed.WorldIPv6, pod.IPv6, "8002"},
		{"a nested container over IPv4", nested, testbed.WorldIPv4, pod.IPv4, "8003"},
		{"a nested container over IPv6", nested, testbed.WorldIPv6, pod.IPv6, "8004"},
	} {
		t.Run(c.name, func(t *testing.T) {
			destination := net.JoinHostPort(c.world, c.port)
			n.World.ServeCaller(destination)
			conn, err := c.from.Dial(testbed.Context(t), "tcp", destination)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close() //nolint:errcheck // read to its end
			if _, err := testbed.ReadAll(testbed.Context(t), conn); err != nil {
				t.Fatal(err)
			}
			_, port, _ := net.SplitHostPort(conn.LocalAddr().String())
			want := map[string]string{
				"Sluice-Pod-Namespace": "default", "Sluice-Pod-Name": pod.Name(), "Sluice-Pod-Uid": pod.UID(),
				"Sluice-Source": net.JoinHostPort(c.pod, port), "Sluice-Secret": string(secret),
			}
			for _, r := range proxy.Requests() {
				if r.Host != destination {
					continue
				}
				for name, value := range want {
					if got := r.Header.Values(name); len(got) != 1 || got[0] != value {
						t.Errorf("%s: %q, want %q", name, got, value)
					}
				}
				return
			}
			t.Errorf("the proxy was never asked for %s", destination)
		})
	}
}

// TestDaemonWithoutASecretServes: connections are more than the names on them.
func TestDaemonWithoutASecretServes(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	testbed.ServeEcho(n)
	if err := os.MkdirAll(filepath.Join(secretFile(n), "in-the-way"), 0o700); err != nil {
		t.Fatal(err)
	}
	proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	d := n.StartDaemon()
	testbed.EchoAll(t, 2, 200, n.AddPod("asking").Host)
	for _, r := range proxy.Requests() {
		if got := r.Header.Values("Sluice-Secret"); got != nil {
			t.Errorf("got the secret %q, want none", got)
		}
	}
	if !strings.Contains(d.Log(), "proxies cannot tell requests of this daemon from others") {
		t.Error("the log does not say so")
	}
}

// TestSecretStaysOnTheNode: it is sent to the node's own addresses, and to no other host.
func TestSecretStaysOnTheNode(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		host   func(*testbed.Node) *testbed.Host
		ip     string
		secret bool
	}{
		"the node":     {func(n *testbed.Node) *testbed.Host { return n.Host }, testbed.NodeIPv4, true},
		"another host": {func(n *testbed.Node) *testbed.Host { return n.World }, testbed.WorldIPv4, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			testbed.ServeEcho(n)
			address := net.JoinHostPort(c.ip, "3128")
			n.Config["upstream"].(map[string]any)["address"] = address
			asked := make(chan bool, 100)
			c.host(n).Serve(address, func(conn net.Conn) {
				in := bufio.NewReader(conn)
				req, err := http.ReadRequest(in)
				if err != nil {
					return // the daemon's idle connection
				}
				asked <- req.Header.Get("Sluice-Secret") != ""
				testbed.ConnectTo(n, conn, in, req.Host, testbed.Connected, "")
			})
			n.StartDaemon()
			testbed.EchoAll(t, 4, 200, n.AddPod("asking").Host) // on the idle connection, and on new ones
			for range 4 {
				if got := <-asked; got != c.secret {
					t.Errorf("a request with the secret: %t, want %t", got, c.secret)
				}
			}
		})
	}
}
