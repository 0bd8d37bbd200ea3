package mitmproxy

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestAddonAcceptsInThePod: every kind of traffic, as through a relay, and the proxy sees the pod's own address.
func TestAddonAcceptsInThePod(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, "sockets")
			ca := serveWorld(t, n)
			proxy := testbed.LaunchAddon(n, "--set", "ssl_verify_upstream_trusted_ca="+ca, "-s", testbed.FlowPrinter(n))
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "web", nil)
			d.WaitForProxies(1, 1)
			for _, family := range []struct{ name, world, node, pod string }{
				{"IPv4", testbed.WorldIPv4, testbed.NodeIPv4, pod.IPv4},
				{"IPv6", testbed.WorldIPv6, testbed.NodeIPv6, pod.IPv6},
			} {
				m := mitmCase{node: n, proxy: proxy, from: pod.Host, world: family.world, seenAs: family.node}
				t.Run("HTTP over "+family.name, m.http)
				t.Run("HTTPS over "+family.name, m.https)
				t.Run("client speaks first over "+family.name, m.clientFirst)
				t.Run("server speaks first over "+family.name, m.serverFirst)
				for _, kind := range []string{"http", "tcp"} {
					m.wantLogged(t, fmt.Sprintf("%s from %s of default/web uid-web outbound", kind, family.pod))
				}
			}
			flows := func() int { return strings.Count(proxy.Log(), "http from "+pod.IPv4+" of") }
			before := flows()
			m := mitmCase{node: n, proxy: proxy, from: pod.Nested(), world: testbed.WorldIPv4, seenAs: testbed.NodeIPv4}
			t.Run("from a nested container", m.http)
			testbed.Eventually(t, "its flow is the pod's", func() bool { return flows() > before })
		})
	}
}

// TestAddonBehindARelay: the flows of a mitmproxy that is asked by CONNECT show the pod too, but only if sluiced asks.
func TestAddonBehindARelay(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	serveWorld(t, n)
	proxy := testbed.StartMitmdump(n, "--showhost", "-s", testbed.Addon(t), "--set", "sluice_socket="+n.ProxySocket(),
		"-s", testbed.FlowPrinter(n))
	n.StartDaemon()
	pod := n.AddPod("web")
	m := mitmCase{node: n, proxy: proxy, from: pod.Host, world: testbed.WorldIPv4, seenAs: testbed.NodeIPv4}
	m.http(t)
	m.wantLogged(t, "of default/web uid-web outbound comment default/web")
	testbed.Eventually(t, "mitmdump shows the pod in its line", func() bool {
		return strings.Contains(proxy.Log(), " default/web: GET http://")
	})
	m.clientFirst(t)
	testbed.Eventually(t, "flows of raw TCP show it too", func() bool {
		return strings.Contains(proxy.Log(), "tcp from 127.0.0.1 of default/web")
	})

	// A client without the secret asks the same proxy, from the address of sluiced, and names that pod.
	c, err := n.Dial(testbed.Context(t), "tcp", testbed.ProxyAddress)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // its response was read
	destination := net.JoinHostPort(testbed.WorldIPv4, portClientFirst)
	request := "CONNECT " + destination + " HTTP/1.1\r\nHost: " + destination +
		"\r\nSluice-Secret: " + strings.Repeat("a1", 32) +
		"\r\nSluice-Pod-Namespace: default\r\nSluice-Pod-Name: forged\r\nSluice-Pod-UID: x\r\n\r\n"
	resp, err := testbed.RoundTrip(testbed.Context(t), c, request)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("CONNECT: %v, %v", resp, err)
	}
	defer resp.Body.Close() //nolint:errcheck // it has none
	if _, err := c.Write([]byte("\x01 hello")); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the flow is there", func() bool {
		return strings.Contains(proxy.Log(), "tcp from 127.0.0.1 of None")
	})
	if strings.Contains(proxy.Log(), "default/forged") {
		t.Error("the flow shows the pod, though sluiced has not asked")
	}
}
