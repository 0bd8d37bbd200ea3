package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Addresses of the world outside, the same as in integration/testbed, and of the node on the link to it.
const (
	WorldIPv4 = "198.51.100.10"
	WorldIPv6 = "2001:db8::10"
	nodeIPv4  = "198.51.100.1"
	nodeIPv6  = "2001:db8::1"

	worldName = "world"
)

var sysctls = []struct{ name, value string }{
	{"net/ipv4/ip_forward", "1"},
	{"net/ipv6/conf/all/forwarding", "1"},
	{"net/ipv6/conf/default/accept_dad", "0"}, // the address of the bridge is unique
	// With a Service between two pods of one bridge, the replies must pass the iptables rules too.
	{"net/bridge/bridge-nf-call-iptables", "1"},
	{"net/bridge/bridge-nf-call-ip6tables", "1"},
}

// makeNetwork connects the node's netns, which is still empty, to a netns that is the world outside.
func makeNetwork(ctx context.Context) error {
	ip := func(args string) error {
		out, err := exec.CommandContext(ctx, "ip", strings.Fields(args)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip %s: %w: %s", args, err, out)
		}
		return nil
	}
	for _, args := range []string{
		"link set lo up",
		"netns add " + worldName,
		"-n " + worldName + " link set lo up",
		// The index must differ from the peer's: see integration/testbed.
		"link add eth0 index 1000 type veth peer name eth0 netns " + worldName,
		"addr add " + nodeIPv4 + "/24 dev eth0",
		"addr add " + nodeIPv6 + "/64 dev eth0 nodad",
		"link set eth0 up",
		"-n " + worldName + " addr add " + WorldIPv4 + "/24 dev eth0",
		"-n " + worldName + " addr add " + WorldIPv6 + "/64 dev eth0 nodad",
		"-n " + worldName + " link set eth0 up",
		"route add default via " + WorldIPv4,
		"-6 route add default via " + WorldIPv6,
		"-n " + worldName + " route add default via " + nodeIPv4,
		"-n " + worldName + " -6 route add default via " + nodeIPv6,
	} {
		if err := ip(args); err != nil {
			return err
		}
	}
	for _, s := range sysctls {
		path := filepath.Join("/proc/sys", s.name)
		err := os.WriteFile(path, []byte(s.value), 0o600)
		if errors.Is(err, os.ErrNotExist) && strings.HasPrefix(s.name, "net/bridge/") {
			// br_netfilter may be a module that is not loaded yet.
			_ = exec.CommandContext(ctx, "modprobe", "br_netfilter").Run()
			err = os.WriteFile(path, []byte(s.value), 0o600)
		}
		if err != nil {
			return fmt.Errorf("setting %s=%s: %w", s.name, s.value, err)
		}
	}
	return nil
}
