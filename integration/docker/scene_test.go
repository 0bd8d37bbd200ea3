package docker

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// scene is a pod with two bridges in it, each with two containers. A server answers with the address that it sees the
// connection come from.
type scene struct {
	node   *testbed.Node
	proxy  *testbed.RecordingProxy
	daemon *testbed.Daemon
	pod    *testbed.Pod
	flavour
	first, second network
}

// network is a bridge in the pod.
type network struct {
	gateway        testbed.Addresses // of the bridge
	client, server container
	published      string // the port of the pod that leads to port 80 of the server
}

// container is a container with its addresses on one bridge.
type container struct {
	*testbed.Host
	testbed.Addresses
}

// The networks of both variants.
var (
	firstGateway  = testbed.Addresses{IPv4: "172.17.0.1", IPv6: "fd00:d0c::1"}
	secondGateway = testbed.Addresses{IPv4: "172.18.0.1", IPv6: "fd00:d1::1"}
)

const (
	firstPublished  = "8080"
	secondPublished = "8081"
	podPort         = "9000" // a server of the pod itself
)

// flavour is the way in which the pod is captured, if it is.
type flavour struct {
	testbed.Flavour
	captured bool
	docker   string // the variant of iptables that Docker uses: nft or legacy
}

// flavours are those of the testbed. In the control, a pod that is not captured, all connections within the pod must
// take the same way: otherwise the scene is wrong.
func flavours() []flavour {
	all := []flavour{{Flavour: testbed.Flavour{Name: "not captured"}, docker: "nft"}}
	for _, f := range testbed.Flavours {
		docker := "nft"
		if f.Name == "iptables-legacy" {
			docker = "legacy"
		}
		all = append(all, flavour{f, true, docker})
	}
	return all
}

// newScene makes the node, the pod and servers in the world. Docker and its containers are missing.
func newScene(t *testing.T, f flavour) *scene {
	t.Helper()
	n := testbed.New(t)
	s := &scene{node: n, flavour: f}
	s.proxy = testbed.StartRecordingProxy(n, testbed.ProxyAddress)
	s.daemon = n.StartDaemon()
	if f.captured {
		s.pod = f.AddPod(t, n, "runner", nil)
	} else {
		s.pod = n.AddBystander()
	}
	s.pod.ServeCaller(":" + podPort)
	n.World.ServeCaller(":80")
	for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
		for _, port := range []string{"53", "443"} {
			n.World.ServeCallerUDP(net.JoinHostPort(ip, port))
		}
	}
	s.pod.PrepareBridges()
	watchQUIC(n)
	return s
}

// watchQUIC counts the datagrams to port 443 that leave the pods' links.
func watchQUIC(n *testbed.Node) {
	n.Exec("nft", "add table inet quic; add counter inet quic left; "+
		"add chain inet quic prerouting { type filter hook prerouting priority -350; }; "+
		`add rule inet quic prerouting iifname "cni0" udp dport 443 counter name left`)
}

// connection is one that a test makes, and the address that the server sees it come from.
type connection struct {
	name     string
	from     *testbed.Host
	to, port string
	caller   string
}

// wantCallers fails the test unless all servers see the callers that they should. All connections are made at the same
// time, by ask.
func wantCallers(
	t *testing.T, ask func(*testbed.Host, context.Context, string) (string, error), connections ...connection,
) {
	t.Helper()
	ctx := testbed.Context(t)
	testbed.ForEach(t, len(connections), func(i int) error {
		c := connections[i]
		address := net.JoinHostPort(c.to, c.port)
		switch got, err := ask(c.from, ctx, address); {
		case err != nil:
			return fmt.Errorf("%s: connecting to %s: %w", c.name, address, err)
		case got != c.caller:
			return fmt.Errorf("%s: %s saw %q, want %s", c.name, address, got, c.caller)
		default:
			return nil
		}
	})
}

// checkStay checks connections that stay in the pod, or come from outside: the proxy is not asked, and none leaves.
func (s *scene) checkStay(t *testing.T, connections ...connection) {
	t.Helper()
	syns, requests := s.node.SYNs(), len(s.proxy.Requests())
	t.Run("reach", func(t *testing.T) { wantCallers(t, (*testbed.Host).Caller, connections...) })
	s.wantAsked(t, requests, 0)
	s.wantNoneLeft(t, syns)
}

// wantAsked fails the test unless the proxy was asked that many times since it had had so many requests.
func (s *scene) wantAsked(t *testing.T, since, times int) {
	t.Helper()
	var destinations []string
	for _, r := range s.proxy.Requests()[since:] {
		destinations = append(destinations, r.Host)
	}
	if len(destinations) != times {
		t.Errorf("the proxy was asked %d times, for %q; want %d times", len(destinations), destinations, times)
	}
}

// wantNoneLeft fails the test if a SYN has left the pod since so many had.
func (s *scene) wantNoneLeft(t *testing.T, since int) {
	t.Helper()
	if left := s.node.SYNs() - since; left != 0 {
		t.Errorf("%d SYNs left the pod, want none", left)
	}
}

// checkInside checks the connections between the pod and the containers on each bridge, and those from outside to the
// published ports.
func (s *scene) checkInside(t *testing.T) {
	t.Helper()
	t.Run("first bridge", func(t *testing.T) { s.checkStay(t, s.connections(s.first)...) })
	t.Run("second bridge", func(t *testing.T) { s.checkStay(t, s.connections(s.second)...) })
}

// connections are those on one bridge. The pod itself connects to a container by the address of the bridge, and so does
// docker-proxy, which takes connections to a published port where no rule of Docker's rewrites their destination.
func (s *scene) connections(nw network) []connection {
	client, server, gateway, pod, world := nw.client, nw.server, nw.gateway, s.pod, s.node.World
	return []connection{
		{"container to container, IPv4", client.Host, server.IPv4, "80", client.IPv4},
		{"container to container, IPv6", client.Host, server.IPv6, "80", client.IPv6},
		{"pod to container, IPv4", pod.Host, server.IPv4, "80", gateway.IPv4},
		{"pod to container, IPv6", pod.Host, server.IPv6, "80", gateway.IPv6},
		{"pod to a published port on localhost, IPv4", pod.Host, "127.0.0.1", nw.published, gateway.IPv4},
		{"pod to a published port on localhost, IPv6", pod.Host, "::1", nw.published, gateway.IPv6},
		{"pod to a published port on its own address, IPv4", pod.Host, pod.IPv4, nw.published, pod.IPv4},
		{"pod to a published port on its own address, IPv6", pod.Host, pod.IPv6, nw.published, pod.IPv6},
		{"container to a published port of the pod, IPv4", client.Host, pod.IPv4, nw.published, gateway.IPv4},
		{"container to a published port of the pod, IPv6", client.Host, pod.IPv6, nw.published, gateway.IPv6},
		{"container to a published port of its gateway", client.Host, gateway.IPv4, nw.published, gateway.IPv4},
		{"container to the pod, IPv4", client.Host, gateway.IPv4, podPort, client.IPv4},
		{"container to the pod, IPv6", client.Host, gateway.IPv6, podPort, client.IPv6},
		{"world to a published port, IPv4", world, pod.IPv4, nw.published, testbed.WorldIPv4},
		{"world to a published port, IPv6", world, pod.IPv6, nw.published, testbed.WorldIPv6},
		{"node to a published port", s.node.Host, pod.IPv4, nw.published, "10.88.0.1"},
	}
}

// checkIsolation checks that a container reaches another bridge only as Docker allows it: by a published port, which
// docker-proxy serves. Capture must not be a way around that.
func (s *scene) checkIsolation(t *testing.T) {
	t.Helper()
	first, second := s.first, s.second
	s.checkStay(t,
		connection{"by a published port, IPv4", first.client.Host, s.pod.IPv4, second.published, second.gateway.IPv4},
		connection{"by a published port, IPv6", first.client.Host, s.pod.IPv6, second.published, second.gateway.IPv6},
		connection{"by the gateway", second.client.Host, second.gateway.IPv4, first.published, first.gateway.IPv4},
	)
	requests := len(s.proxy.Requests())
	var wg sync.WaitGroup
	for _, ip := range []string{second.server.IPv4, second.server.IPv6} {
		wg.Go(func() { testbed.WantDropped(t, first.client.Host, net.JoinHostPort(ip, "80")) })
	}
	wg.Wait()
	s.wantAsked(t, requests, 0)
}

// checkNodeWithSameAddress checks that the pod and a container reach another container although the node has its
// addresses, and serves at the same port.
func (s *scene) checkNodeWithSameAddress(t *testing.T) {
	t.Helper()
	client, server, gateway := s.first.client, s.first.server, s.first.gateway
	for _, address := range []string{server.IPv4 + "/32", server.IPv6 + "/128"} {
		s.node.IP("addr", "add", address, "dev", "lo")
	}
	s.node.ServeCaller(":80")
	s.checkStay(t,
		connection{"pod, IPv4", s.pod.Host, server.IPv4, "80", gateway.IPv4},
		connection{"pod, IPv6", s.pod.Host, server.IPv6, "80", gateway.IPv6},
		connection{"container, IPv4", client.Host, server.IPv4, "80", client.IPv4},
		connection{"container, IPv6", client.Host, server.IPv6, "80", client.IPv6},
	)
}

// outsideCallers are the addresses that the world sees TCP from the pod come from: the proxy connects from the node,
// and without capture Docker masquerades.
func (s *scene) outsideCallers() testbed.Addresses {
	if s.captured {
		return testbed.Addresses{IPv4: testbed.NodeIPv4, IPv6: testbed.NodeIPv6}
	}
	return testbed.Addresses{IPv4: s.pod.IPv4, IPv6: s.pod.IPv6}
}

// checkOutside checks that connections of containers to the world are captured.
func (s *scene) checkOutside(t *testing.T) {
	t.Helper()
	syns, requests := s.node.SYNs(), len(s.proxy.Requests())
	callers := s.outsideCallers()
	for _, client := range []container{s.first.client, s.second.client} {
		testbed.WantCaller(t, client.Host, testbed.Web, callers.IPv4)
		testbed.WantCaller(t, client.Host, net.JoinHostPort(testbed.WorldIPv6, "80"), callers.IPv6)
	}
	if !s.captured {
		return
	}
	s.wantAsked(t, requests, 4)
	s.wantNoneLeft(t, syns)
}

// checkUDP checks that QUIC from a container never leaves the pod, although the first rules in FORWARD are Docker's,
// and that it passes within the pod.
func (s *scene) checkUDP(t *testing.T) {
	t.Helper()
	client, server, gateway := s.first.client, s.first.server, s.first.gateway
	server.ServeCallerUDP(":443")
	t.Run("inside", func(t *testing.T) {
		wantCallers(t, (*testbed.Host).CallerUDP,
			connection{"container to container, IPv4", client.Host, server.IPv4, "443", client.IPv4},
			connection{"container to container, IPv6", client.Host, server.IPv6, "443", client.IPv6},
			connection{"pod to container, IPv4", s.pod.Host, server.IPv4, "443", gateway.IPv4},
			connection{"pod to container, IPv6", s.pod.Host, server.IPv6, "443", gateway.IPv6},
		)
	})
	for _, world := range []connection{
		{"QUIC of a container to the world, IPv4", client.Host, testbed.WorldIPv4, "53", s.pod.IPv4},
		{"QUIC of a container to the world, IPv6", client.Host, testbed.WorldIPv6, "53", s.pod.IPv6},
	} {
		t.Run(world.name, func(t *testing.T) {
			sendQUIC(t, world.from, world.to)
			// The way of a datagram to port 53 is the same: once it is answered, the others have arrived or never will.
			wantCallers(t, (*testbed.Host).CallerUDP, world)
			counter := s.node.Exec("nft", "reset", "counter", "inet", "quic", "left")
			if left := !strings.Contains(counter, "packets 0 "); left == s.captured {
				t.Errorf("datagrams left the pod: %t, want %t", left, !s.captured)
			}
		})
	}
}

// sendQUIC sends some datagrams. Whether they are dropped or rejected makes no difference here.
func sendQUIC(t *testing.T, h *testbed.Host, ip string) {
	t.Helper()
	c, err := h.Dial(testbed.Context(t), "udp", net.JoinHostPort(ip, "443"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // no answer is read
	for range 3 {
		_, _ = io.WriteString(c, "?") // fails when the one before was rejected
	}
}

// checkWithoutDaemon checks the same with the daemon killed: the connections that are captured wait.
func (s *scene) checkWithoutDaemon(t *testing.T) {
	t.Helper()
	if !s.captured {
		return
	}
	s.daemon.Kill()
	s.checkInside(t)
	syns := s.node.SYNs()
	testbed.WantDropped(t, s.first.client.Host, testbed.Web)
	s.wantNoneLeft(t, syns)
}

// dockerProxy serves a published port in the pod as docker-proxy does: it makes a connection of its own to the server,
// by IPv4 or IPv6 like its client.
func (s *scene) dockerProxy(ctx context.Context, nw network) {
	s.pod.Serve(":"+nw.published, func(c net.Conn) {
		to := nw.server.IPv6
		if c.LocalAddr().(*net.TCPAddr).IP.To4() != nil {
			to = nw.server.IPv4
		}
		if caller, err := s.pod.Caller(ctx, net.JoinHostPort(to, "80")); err == nil {
			fmt.Fprint(c, caller)
		}
	})
}
