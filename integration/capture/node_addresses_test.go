package capture

import (
	"fmt"
	"net"
	"slices"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// azure is the address of a service of Azure for its nodes.
const azure = "168.63.129.16"

// TestAddressesThatMeanTheNodeAreRefused, unless the configuration allows them: the proxy reaches them as the node.
func TestAddressesThatMeanTheNodeAreRefused(t *testing.T) {
	t.Parallel()
	for _, value := range []string{"", "refuse", "allow"} {
		t.Run("nodeAddresses="+value, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			if value != "" {
				n.Config["capture"] = map[string]any{"source": "all", "nodeAddresses": value}
			}
			testbed.StartConnectProxy(n)
			n.StartDaemon()
			pod := n.AddPod("pod") // makes the bridge with the address
			addresses := []string{gatewayIPv4, testbed.NodeIPv4, testbed.NodeIPv6}
			for _, ip := range addresses {
				n.ServeCaller(net.JoinHostPort(ip, "8080"))
			}
			n.World.IP("addr", "add", azure+"/32", "dev", "eth0")
			n.IP("route", "add", azure, "via", testbed.WorldIPv4)
			n.World.ServeCaller(net.JoinHostPort(azure, "8080"))
			for _, ip := range append(addresses, azure) {
				to, seenAs := net.JoinHostPort(ip, "8080"), ip
				if ip == azure {
					seenAs = testbed.NodeIPv4
				}
				if value == "allow" {
					testbed.WantCaller(t, pod.Host, to, seenAs)
				} else {
					testbed.WantReset(t, pod.Host, to)
				}
			}
		})
	}
}

// TestAddressesThatMeanTheNodeAreRefusedDirect: the same holds for connections that go around a late proxy.
func TestAddressesThatMeanTheNodeAreRefusedDirect(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	n.Config["late"] = map[string]any{"policy": "direct", "timeout": "100ms"}
	n.World.ServeCaller(testbed.Web)
	n.StartDaemon()
	pod := n.AddPod("pod")
	n.ServeCaller(net.JoinHostPort(gatewayIPv4, "8080"))
	testbed.WantCaller(t, pod.Host, testbed.Web, pod.IPv4)
	testbed.WantReset(t, pod.Host, net.JoinHostPort(gatewayIPv4, "8080"))
}

// TestAddressesThatMeanTheNodeAreRefusedByTheAddon, unless its option allows them.
func TestAddressesThatMeanTheNodeAreRefusedByTheAddon(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{false, true} {
		t.Run(fmt.Sprintf("allowed=%t", allowed), func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, "sockets")
			args := testbed.RawTCP
			if allowed {
				args = append(slices.Clone(args), "--set", "sluice_node_addresses=true")
			}
			testbed.LaunchAddon(n, args...)
			n.World.ServeCaller(testbed.Web)
			n.StartDaemon()
			pod := n.AddPod("pod")
			testbed.WantCaller(t, pod.Host, testbed.Web, testbed.NodeIPv4)
			to := net.JoinHostPort(gatewayIPv4, "8080")
			n.ServeCaller(to)
			if allowed {
				testbed.WantCaller(t, pod.Host, to, gatewayIPv4)
			} else {
				testbed.WantReset(t, pod.Host, to)
			}
		})
	}
}
