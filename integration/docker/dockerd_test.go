package docker

import (
	"regexp"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// startDocker adds Docker and its containers to the scene. The second network is a user-defined one.
func (s *scene) startDocker(options ...string) *testbed.Docker {
	d := s.pod.StartDocker(s.docker, options...)
	d.CreateNetwork("ci", "172.18.0.0/16", "fd00:d1::/64")
	run := func(name, network string, publish ...string) container {
		c := d.Run(name, network, publish...)
		c.ServeCaller(":80")
		return container{c.Host, c.Addresses[network]}
	}
	s.first = network{
		firstGateway, run("client1", "bridge"), run("server1", "bridge", firstPublished+":80"), firstPublished,
	}
	s.second = network{
		secondGateway, run("client2", "ci"), run("server2", "ci", secondPublished+":80"), secondPublished,
	}
	return d
}

// TestDockerd: a real dockerd in the pod.
func TestDockerd(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, f)
			d := s.startDocker()
			t.Run("inside", s.checkInside)
			t.Run("container on both bridges", func(t *testing.T) { s.checkContainerOnBothBridges(t, d) })
			t.Run("two bridges", s.checkIsolation)
			t.Run("outside", s.checkOutside)
			t.Run("build", func(t *testing.T) { s.checkBuild(t, d) })
			t.Run("UDP", s.checkUDP)
			t.Run("the node has the same address", s.checkNodeWithSameAddress)
			t.Run("without the daemon", s.checkWithoutDaemon)
		})
	}
}

// TestDockerdWithoutProxy: rules take the place of docker-proxy. They also rewrite the destination of connections to
// localhost, and of those that come back to the same bridge.
func TestDockerdWithoutProxy(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, f)
			s.startDocker("--userland-proxy=false")
			client, gateway := s.first.client, s.first.gateway
			s.checkStay(t,
				connection{"pod by localhost", s.pod.Host, "127.0.0.1", firstPublished, gateway.IPv4},
				connection{"pod by its own address, IPv4", s.pod.Host, s.pod.IPv4, firstPublished, gateway.IPv4},
				connection{"pod by its own address, IPv6", s.pod.Host, s.pod.IPv6, firstPublished, gateway.IPv6},
				connection{"container, IPv4", client.Host, s.pod.IPv4, firstPublished, client.IPv4},
				connection{"container, IPv6", client.Host, s.pod.IPv6, firstPublished, client.IPv6},
				connection{"world, IPv4", s.node.World, s.pod.IPv4, firstPublished, testbed.WorldIPv4},
				connection{"world, IPv6", s.node.World, s.pod.IPv6, firstPublished, testbed.WorldIPv6},
			)
			s.checkOutside(t)
		})
	}
}

// checkContainerOnBothBridges checks that containers of each bridge reach a container that is on both.
func (s *scene) checkContainerOnBothBridges(t *testing.T, d *testbed.Docker) {
	t.Helper()
	both := d.Run("both", "bridge")
	d.Connect("ci", both)
	both.ServeCaller(":80")
	first, second := s.first.client, s.second.client
	s.checkStay(t,
		connection{"from the first, IPv4", first.Host, both.Addresses["bridge"].IPv4, "80", first.IPv4},
		connection{"from the first, IPv6", first.Host, both.Addresses["bridge"].IPv6, "80", first.IPv6},
		connection{"from the second, IPv4", second.Host, both.Addresses["ci"].IPv4, "80", second.IPv4},
		connection{"from the second, IPv6", second.Host, both.Addresses["ci"].IPv6, "80", second.IPv6},
	)
}

// checkBuild checks that a step of `docker build` that connects to the world is captured, whatever its network.
func (s *scene) checkBuild(t *testing.T, d *testbed.Docker) {
	t.Helper()
	for _, network := range []string{"bridge", "ci", "host"} {
		requests := len(s.proxy.Requests())
		out := d.Build(network, "nc", "-w", "20", testbed.WorldIPv4, "80")
		// What the step prints has no line of its own: "198.51.100.1Removing intermediate container …".
		testbed.WantMatch(t, out, `\n`+regexp.QuoteMeta(s.outsideCallers().IPv4)+`[^0-9]`)
		want := 0
		if s.captured {
			want = 1
		}
		s.wantAsked(t, requests, want)
	}
}
