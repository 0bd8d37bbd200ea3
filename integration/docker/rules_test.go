package docker

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// dockerRules is a document of iptables-restore like those of dockerd 20.10 with two bridges and two published ports.
// dockerd inserts its rules into FORWARD before all others, and appends those of nat.
const dockerRules = `*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-ISOLATION-STAGE-1 - [0:0]
:DOCKER-ISOLATION-STAGE-2 - [0:0]
:DOCKER-USER - [0:0]
-I FORWARD -i docker0 -o docker0 -j ACCEPT
-I FORWARD -i docker0 ! -o docker0 -j ACCEPT
-I FORWARD -o docker0 -j DOCKER
-I FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-I FORWARD -i br-ci -o br-ci -j ACCEPT
-I FORWARD -i br-ci ! -o br-ci -j ACCEPT
-I FORWARD -o br-ci -j DOCKER
-I FORWARD -o br-ci -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-I FORWARD -j DOCKER-ISOLATION-STAGE-1
-I FORWARD -j DOCKER-USER
-A DOCKER -d SERVER1 ! -i docker0 -o docker0 -p tcp --dport 80 -j ACCEPT
-A DOCKER -d SERVER2 ! -i br-ci -o br-ci -p tcp --dport 80 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -i br-ci ! -o br-ci -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-1 -j RETURN
-A DOCKER-ISOLATION-STAGE-2 -o br-ci -j DROP
-A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
-A DOCKER-ISOLATION-STAGE-2 -j RETURN
-A DOCKER-USER -j RETURN
COMMIT
*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d LOOPBACK -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s SUBNET2 ! -o br-ci -j MASQUERADE
-A POSTROUTING -s SUBNET1 ! -o docker0 -j MASQUERADE
-A DOCKER -i br-ci -j RETURN
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp --dport 8080 -j DNAT --to-destination SERVER1:80
-A DOCKER ! -i br-ci -p tcp --dport 8081 -j DNAT --to-destination SERVER2:80
COMMIT
`

// addRules adds to the scene what dockerd and containers are for the network: bridges, netns behind them, the rules of
// dockerd, and docker-proxy. Without isolation the rules let the bridges reach each other.
func (s *scene) addRules(t *testing.T, isolation bool) {
	t.Helper()
	s.pod.Exec("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	s.first = s.addNetwork(t, "docker0", firstGateway, firstPublished)
	s.second = s.addNetwork(t, "br-ci", secondGateway, secondPublished)
	for _, family := range []struct {
		tool, loopback, subnet1, subnet2, server1, server2 string
	}{
		{"iptables", "127.0.0.0/8", "172.17.0.0/16", "172.18.0.0/16", s.first.server.IPv4, s.second.server.IPv4},
		{"ip6tables", "::1", "fd00:d0c::/64", "fd00:d1::/64", s.first.server.IPv6, s.second.server.IPv6},
	} {
		var rules strings.Builder
		for line := range strings.Lines(dockerRules) {
			if isolation || !strings.HasSuffix(line, "-j DOCKER-ISOLATION-STAGE-1\n") {
				rules.WriteString(line)
			}
		}
		file := filepath.Join(s.node.Dir, family.tool+".rules")
		document := strings.NewReplacer(
			"SERVER1:80", net.JoinHostPort(family.server1, "80"), "SERVER2:80", net.JoinHostPort(family.server2, "80"),
			"SERVER1", family.server1, "SERVER2", family.server2,
			"SUBNET1", family.subnet1, "SUBNET2", family.subnet2, "LOOPBACK", family.loopback,
		).Replace(rules.String())
		if err := os.WriteFile(file, []byte(document), 0o600); err != nil {
			t.Fatal(err)
		}
		s.pod.Exec(fmt.Sprintf("%s-%s-restore", family.tool, s.docker), "--noflush", file)
	}
	s.dockerProxy(t.Context(), s.first)
	s.dockerProxy(t.Context(), s.second)
}

// addNetwork adds a bridge with two containers.
func (s *scene) addNetwork(t *testing.T, bridge string, gateway testbed.Addresses, published string) network {
	t.Helper()
	s.pod.IP("link", "add", bridge, "type", "bridge")
	s.pod.IP("addr", "add", gateway.IPv4+"/16", "dev", bridge)
	s.pod.IP("addr", "add", gateway.IPv6+"/64", "dev", bridge, "nodad")
	s.pod.IP("link", "set", bridge, "up")
	add := func(name, number string) container {
		h := testbed.NewHost(t, bridge+"-"+name)
		ips := testbed.Addresses{
			IPv4: strings.TrimSuffix(gateway.IPv4, "1") + number, IPv6: strings.TrimSuffix(gateway.IPv6, "1") + number,
		}
		port := "veth" + number + bridge
		s.pod.IP("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", h.Name)
		s.pod.IP("link", "set", port, "master", bridge, "up")
		h.IP("addr", "add", ips.IPv4+"/16", "dev", "eth0")
		h.IP("addr", "add", ips.IPv6+"/64", "dev", "eth0", "nodad")
		h.IP("link", "set", "eth0", "up")
		h.IP("route", "add", "default", "via", gateway.IPv4)
		h.IP("-6", "route", "add", "default", "via", gateway.IPv6)
		h.ServeCaller(":80")
		return container{h, ips}
	}
	return network{gateway, add("client", "2"), add("server", "3"), published}
}

// TestRulesOfDocker: rules like dockerd's, without dockerd.
func TestRulesOfDocker(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, f)
			s.addRules(t, true)
			t.Run("inside", s.checkInside)
			t.Run("outside", s.checkOutside)
			t.Run("UDP", s.checkUDP)
			t.Run("two bridges", s.checkIsolation)
			t.Run("the node has the same address", s.checkNodeWithSameAddress)
			t.Run("without the daemon", s.checkWithoutDaemon)
		})
	}
}

// TestBridgesRoutedDirectly: rules that let two bridges reach each other, as with `iptables -I DOCKER-USER -j ACCEPT`.
func TestBridgesRoutedDirectly(t *testing.T) {
	t.Parallel()
	for _, f := range flavours() {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, f)
			s.addRules(t, false)
			first, second := s.first, s.second
			s.checkStay(t,
				connection{"first to second, IPv4", first.client.Host, second.server.IPv4, "80", secondGateway.IPv4},
				connection{"first to second, IPv6", first.client.Host, second.server.IPv6, "80", secondGateway.IPv6},
				connection{"second to first, IPv4", second.client.Host, first.server.IPv4, "80", firstGateway.IPv4},
				connection{"second to first, IPv6", second.client.Host, first.server.IPv6, "80", firstGateway.IPv6},
			)
			t.Run("outside", s.checkOutside)
		})
	}
}
