package capture

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// More addresses of the world: in a CIDR that the daemon's configuration excludes, in a CIDR that annotations name, and
// link-local.
const (
	excludedIPv4  = "198.51.100.65"
	excludedIPv6  = "2001:db8:0:0:e::1"
	annotatedIPv4 = "198.51.100.130"
	annotatedIPv6 = "2001:db8:0:0:a::1"
	linkLocalIPv4 = "169.254.10.10"
)

// A server knows by the address that a connection comes from whether it is captured.
const (
	captured = "captured"
	straight = "straight"
)

// newSelectiveNode is a node where the daemon excludes a part of the world.
func newSelectiveNode(t *testing.T) *testbed.Node {
	t.Helper()
	n := testbed.New(t)
	for _, address := range []string{excludedIPv4 + "/32", annotatedIPv4 + "/32", linkLocalIPv4 + "/32"} {
		n.World.IP("addr", "add", address, "dev", "eth0")
	}
	for _, address := range []string{excludedIPv6 + "/128", annotatedIPv6 + "/128"} {
		n.World.IP("addr", "add", address, "dev", "eth0", "nodad")
	}
	n.IP("route", "add", linkLocalIPv4, "via", testbed.WorldIPv4)
	for _, port := range []string{"80", "443", "8080", "9001"} {
		n.World.ServeCaller(":" + port)
	}
	testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	n.Config["capture"] = map[string]any{
		"source": "all", "excludePorts": []any{8080, "9000-9002"},
		"excludeCIDRs": []string{"198.51.100.64/28", "2001:db8:0:0:e::/80", "169.254.0.0/16", "fe80::/10"},
	}
	return n
}

// exclusions are the ways to each destination that follow from the annotations of a pod.
var exclusions = []struct {
	name        string
	annotations map[string]string
	want        map[string]string // by destination
}{
	{"the daemon's configuration", nil, map[string]string{
		testbed.WorldIPv4 + ":80": captured, "[" + testbed.WorldIPv6 + "]:80": captured,
		testbed.WorldIPv4 + ":8080": straight, "[" + testbed.WorldIPv6 + "]:8080": straight,
		testbed.WorldIPv4 + ":9001": straight, "[" + testbed.WorldIPv6 + "]:9001": straight,
		excludedIPv4 + ":80": straight, "[" + excludedIPv6 + "]:80": straight,
		annotatedIPv4 + ":80": captured, "[" + annotatedIPv6 + "]:80": captured,
		linkLocalIPv4 + ":80": straight,
	}},
	{"exclude-outbound-ports adds to it", map[string]string{"exclude-outbound-ports": "80"}, map[string]string{
		testbed.WorldIPv4 + ":80": straight, "[" + testbed.WorldIPv6 + "]:80": straight,
		testbed.WorldIPv4 + ":443": captured, "[" + testbed.WorldIPv6 + "]:443": captured,
		testbed.WorldIPv4 + ":8080": straight, "[" + testbed.WorldIPv6 + "]:8080": straight,
	}},
	{"exclude-outbound-cidrs adds to it", map[string]string{
		"exclude-outbound-cidrs": annotatedIPv4 + ", 2001:db8:0:0:a::/80",
	}, map[string]string{
		annotatedIPv4 + ":80": straight, "[" + annotatedIPv6 + "]:80": straight,
		excludedIPv4 + ":80": straight, "[" + excludedIPv6 + "]:80": straight,
		testbed.WorldIPv4 + ":80": captured, "[" + testbed.WorldIPv6 + "]:80": captured,
	}},
	{"include-outbound-ports limits capture", map[string]string{
		"include-outbound-ports": "443, 9000-9005",
	}, map[string]string{
		testbed.WorldIPv4 + ":80": straight, "[" + testbed.WorldIPv6 + "]:80": straight,
		testbed.WorldIPv4 + ":443": captured, "[" + testbed.WorldIPv6 + "]:443": captured,
		testbed.WorldIPv4 + ":9001": straight, // an exclusion wins
	}},
	{"include-outbound-cidrs limits capture", map[string]string{
		"include-outbound-cidrs": "198.51.100.128/25,2001:db8:0:0:a::/80",
	}, map[string]string{
		testbed.WorldIPv4 + ":80": straight, "[" + testbed.WorldIPv6 + "]:80": straight,
		annotatedIPv4 + ":80": captured, "[" + annotatedIPv6 + "]:80": captured,
		annotatedIPv4 + ":8080": straight,
	}},
	{"include-outbound-cidrs of one family leaves the other alone", map[string]string{
		"include-outbound-cidrs": annotatedIPv4,
	}, map[string]string{
		annotatedIPv4 + ":80": captured, "[" + annotatedIPv6 + "]:80": straight,
	}},
}

func TestExclusions(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := newSelectiveNode(t)
			n.StartDaemon()
			for i, c := range exclusions {
				annotations := map[string]string{"example.com/not-ours": "?"}
				for k, v := range c.annotations {
					annotations["sluice.dev/"+k] = v
				}
				pod := f.AddPod(t, n, fmt.Sprint("pod", i), n.Annotated(annotations))
				t.Run(c.name, func(t *testing.T) {
					for destination, want := range c.want {
						wantWay(t, pod, destination, want)
					}
				})
			}
		})
	}
}

// caller is the address that the server at a destination sees: the pod's, also for containers in the pod, or the
// node's.
func caller(pod *testbed.Pod, destination, way string) string {
	switch ipv6 := strings.HasPrefix(destination, "["); {
	case way == captured && ipv6:
		return testbed.NodeIPv6
	case way == captured:
		return testbed.NodeIPv4
	case ipv6:
		return pod.IPv6
	default:
		return pod.IPv4
	}
}

// wantWay fails the test unless the connection is captured, or goes straight.
func wantWay(t *testing.T, pod *testbed.Pod, destination, want string) {
	t.Helper()
	testbed.WantCaller(t, pod.Host, destination, caller(pod, destination, want))
}

func TestIncludePorts(t *testing.T) {
	t.Parallel()
	n := newSelectiveNode(t)
	n.Config["capture"] = map[string]any{"source": "all", "includePorts": []any{80, "9000-9002"}}
	n.StartDaemon()
	pod := n.AddPod("some")
	for _, port := range []string{"80", "9001"} {
		wantWay(t, pod, testbed.WorldIPv4+":"+port, captured)
		wantWay(t, pod, "["+testbed.WorldIPv6+"]:"+port, captured)
	}
	for _, port := range []string{"443", "8080"} {
		wantWay(t, pod, testbed.WorldIPv4+":"+port, straight)
		wantWay(t, pod, "["+testbed.WorldIPv6+"]:"+port, straight)
	}
}

// TestTrafficWithinThePod passes through, whether the daemon is there or not.
func TestTrafficWithinThePod(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
			d := n.StartDaemon()
			pod := f.AddPod(t, n, "itself", nil)
			pod.ServeCaller(":8080")
			nested := pod.Nested()
			checkStraight := func(t *testing.T) {
				for _, own := range []string{"127.0.0.1", "::1", pod.IPv4, pod.IPv6} {
					testbed.WantCaller(t, pod.Host, net.JoinHostPort(own, "8080"), own)
				}
				// From outside and from a nested container.
				testbed.WantCaller(t, n.World, net.JoinHostPort(pod.IPv4, "8080"), testbed.WorldIPv4)
				testbed.WantCaller(t, n.World, net.JoinHostPort(pod.IPv6, "8080"), testbed.WorldIPv6)
				testbed.WantCaller(t, nested, "172.30.0.1:8080", "172.30.0.2")
				testbed.WantCaller(t, nested, net.JoinHostPort(pod.IPv4, "8080"), "172.30.0.2")
			}
			checkStraight(t)
			if r := proxy.Requests(); len(r) > 0 {
				t.Errorf("the proxy was asked for %s", r[0].Host)
			}
			d.Kill()
			checkStraight(t)
		})
	}
}

// TestLinkLocal: only this node can answer at these addresses, so they go straight even before the daemon is there.
func TestLinkLocal(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := newSelectiveNode(t)
			n.Config["capture"] = map[string]any{"source": "all"}
			early := f.AddPod(t, n, "early", nil)
			n.ServeCaller(":8081")
			bridge, _ := linkLocalOf(t, n.Host, "cni0")
			checkStraight := func(t *testing.T, pod *testbed.Pod) {
				t.Helper()
				testbed.WantCaller(t, pod.Host, linkLocalIPv4+":80", pod.IPv4)
				own, index := linkLocalOf(t, pod.Host, "eth0")
				// The zone by its number: package net looks names up in a cache that knows only one netns.
				got, err := pod.Caller(testbed.Context(t), fmt.Sprintf("[%s%%%s]:8081", bridge, index))
				if err != nil || !strings.HasPrefix(got, own) {
					t.Errorf("connecting to %s: the node saw %q, %v; want %s", bridge, got, err, own)
				}
			}
			checkStraight(t, early)
			n.StartDaemon()
			checkStraight(t, f.AddPod(t, n, "late", nil))
		})
	}
}

// linkLocalOf waits for an interface's fe80:: address, and returns it with the interface's number.
func linkLocalOf(t *testing.T, h *testbed.Host, device string) (address, index string) {
	t.Helper()
	testbed.Eventually(t, device+" has a link-local address", func() bool {
		show := []string{"-6", "-oneline", "addr", "show", "dev", device, "scope", "link", "-tentative"}
		w := strings.Fields(h.Exec("ip", show...))
		if len(w) < 4 { // "2: eth0 inet6 fe80::1/64 …"
			return false
		}
		index = strings.TrimSuffix(w[0], ":")
		address, _, _ = strings.Cut(w[3], "/")
		return true
	})
	return address, index
}

// TestExcludedInterface: connections by an interface that an annotation excludes go straight.
func TestExcludedInterface(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			proxy := testbed.StartRecordingProxy(n, testbed.ProxyAddress)
			n.StartDaemon()
			n.World.ServeCaller(":80")
			open := f.AddPod(t, n, "open", n.Annotated(map[string]string{"sluice.dev/exclude-interfaces": "ext"}))
			connectDirectly(n, open, "203.0.113.1", "203.0.113.2")
			testbed.WantCaller(t, open.Host, "203.0.113.2:80", "203.0.113.1")
			testbed.WantCaller(t, open.Host, testbed.WorldIPv4+":80", testbed.NodeIPv4)

			closed := f.AddPod(t, n, "closed", nil)
			connectDirectly(n, closed, "203.0.113.5", "203.0.113.6")
			if got, err := closed.Caller(testbed.Context(t), "203.0.113.6:80"); err == nil {
				t.Errorf("not excluded: the server saw %q; want a reset, since the node has no route there", got)
			}
			if !proxy.Asked("203.0.113.6:80") {
				t.Error("not excluded: the proxy was never asked for it")
			}
		})
	}
}

// connectDirectly joins pod and world by a link that does not touch the node.
func connectDirectly(n *testbed.Node, pod *testbed.Pod, podIP, worldIP string) {
	peer := "to-" + pod.Name()
	pod.IP("link", "add", "ext", "type", "veth", "peer", "name", peer, "netns", n.World.Name)
	pod.IP("addr", "add", podIP+"/30", "dev", "ext")
	pod.IP("link", "set", "ext", "up")
	n.World.IP("addr", "add", worldIP+"/30", "dev", peer)
	n.World.IP("link", "set", peer, "up")
}

// TestUpstreamIsNotCaptured: a pod may be configured to use the proxy itself.
func TestUpstreamIsNotCaptured(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			const upstream = "10.88.0.1:18080"
			n.Config["upstream"] = map[string]any{"address": upstream, "protocol": "connect"}
			n.Config["capture"] = map[string]any{"source": "all", "nodeAddresses": "allow"}
			n.StartDaemon()
			pod := f.AddPod(t, n, "explicit", nil) // makes the bridge with the address
			proxy := testbed.StartRecordingProxy(n, upstream)
			n.World.ServeCaller(testbed.Web)
			c, err := pod.Dial(testbed.Context(t), "tcp", upstream)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close() //nolint:errcheck // read to its end
			fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", testbed.Web, testbed.Web)
			answer, err := testbed.ReadAll(testbed.Context(t), c)
			if err != nil || !strings.HasSuffix(answer, "\r\n\r\n"+testbed.NodeIPv4) {
				t.Fatalf("the proxy answered %q, %v", answer, err)
			}
			r := proxy.Requests()
			if len(r) != 1 || !strings.HasPrefix(r[0].RemoteAddr, pod.IPv4+":") ||
				r[0].Header.Get("Sluice-Source") != "" {
				t.Errorf("the proxy saw %v; want one request, by %s itself", r, pod.IPv4)
			}
			// Any other port of the same address is captured.
			n.ServeCaller("10.88.0.1:8080")
			testbed.WantCaller(t, pod.Host, "10.88.0.1:8080", "10.88.0.1")
			if !proxy.Asked("10.88.0.1:8080") {
				t.Error("a connection to another port of the upstream's address was not captured")
			}
		})
	}
}
