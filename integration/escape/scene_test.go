package escape

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/invoke"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// Addresses of the world besides testbed's.
const (
	otherIPv4, otherIPv6       = "198.51.100.20", "2001:db8::20" // captured with some settings
	excludedIPv4, excludedIPv6 = "198.51.100.30", "2001:db8::30" // never captured
)

// Ports of the world. webPort is captured at testbed's addresses with all settings.
const (
	webPort     = 80
	freePort    = 7001 // captured with some settings
	udpPort     = 5353
	missingPort = 6999 // withPorts does not include it
	highPort    = 8000
)

// podPort is where the pod serves.
const podPort = 8080

// scene is a node with a captured pod, a container nested in it, and a tap at its link.
type scene struct {
	t       *testing.T
	n       *testbed.Node
	flavour testbed.Flavour
	pod     *testbed.Pod
	nested  *testbed.Host
	tap     *tap
	current settings
	macs    [][]byte // of the gateway, of the pod, broadcast, of the bridge in the pod
}

func newScene(t *testing.T, f testbed.Flavour) *scene {
	t.Helper()
	s := &scene{t: t, n: testbed.New(t), flavour: f}
	for _, a := range []string{otherIPv4 + "/24", otherIPv6 + "/64", excludedIPv4 + "/24", excludedIPv6 + "/64"} {
		args := []string{"addr", "add", a, "dev", "eth0"}
		if strings.Contains(a, ":") {
			args = append(args, "nodad")
		}
		s.n.World.IP(args...)
	}
	for _, port := range []int{webPort, 443, freePort, missingPort, highPort} {
		s.n.World.ServeCaller(":" + strconv.Itoa(port))
	}
	for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} { // it answers from the address that was asked
		serveUDP(t, s.n.World, at(ip, udpPort))
	}
	return s
}

// serveUDP echoes datagrams until the test ends.
func serveUDP(t *testing.T, h *testbed.Host, address string) {
	t.Helper()
	var c net.PacketConn
	err := h.Do(func() (err error) {
		c, err = net.ListenPacket("udp", address)
		return err
	})
	if err != nil {
		t.Fatalf("UDP %s: %v", address, err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			size, from, err := c.ReadFrom(b)
			if err != nil {
				return // closed: the test has ended
			}
			_, _ = c.WriteTo(b[:size], from) // a lost answer shows in the test
		}
	}()
}

// furnish makes the rest of the scene once the pod is added.
func (s *scene) furnish(pod *testbed.Pod) {
	s.t.Helper()
	s.pod, s.nested = pod, pod.Nested()
	for _, h := range []*testbed.Host{pod.Host, s.nested} {
		h.Serve(":"+strconv.Itoa(podPort), echoConn)
	}
	// The kernel limits the rate of the ICMP errors that a probe waits for.
	pod.Exec("sysctl", "-qw", "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0")
	peer, mac := link(s.t, pod.Host, "eth0")
	_, gateway := link(s.t, s.n.Host, "cni0")
	_, bridge := link(s.t, pod.Host, "docker0")
	s.macs = [][]byte{gateway, mac, {255, 255, 255, 255, 255, 255}, bridge}
	s.tap = startTap(s.t, s.n.Host, peer, s.current)
}

// echoConn echoes until the client has ended. The client notices an error.
func echoConn(c net.Conn) { _, _ = io.Copy(c, c) }

// link returns the index of an interface's peer, and its address.
func link(t *testing.T, h *testbed.Host, name string) (peer int, mac []byte) {
	t.Helper()
	var links []struct {
		Peer    int    `json:"link_index"`
		Address string `json:"address"`
	}
	out := h.Exec("ip", "-json", "link", "show", name)
	if err := json.Unmarshal([]byte(out), &links); err != nil || len(links) != 1 {
		t.Fatalf("link %s in %s: %v", name, h.Name, err)
	}
	mac, err := net.ParseMAC(links[0].Address)
	if err != nil {
		t.Fatalf("link %s in %s: %v", name, h.Name, err)
	}
	return links[0].Peer, mac
}

// always are the settings that all others begin with. The daemon's configuration excludes the link-local CIDRs.
func always() settings {
	return settings{quic: "reject", excludeCIDRs: prefixes(
		"169.254.0.0/16", "fe80::/10", excludedIPv4+"/32", excludedIPv6+"/128",
	)}
}

func prefixes(all ...string) []netip.Prefix {
	var p []netip.Prefix
	for _, s := range all {
		p = append(p, netip.MustParsePrefix(s))
	}
	return p
}

// randomSettings capture webPort of testbed's addresses in any case.
func randomSettings(r *rand.Rand) settings {
	s := always()
	s.quic = []string{"reject", "allow"}[r.IntN(2)]
	s.includePorts = [][]ports{nil, nil, {{80, 80}, {443, 443}}, {{1, 1024}, {7000, 7999}}}[r.IntN(4)]
	s.excludePorts = [][]ports{nil, nil, {{freePort, freePort}}, {{443, 443}, {7000, 7010}}}[r.IntN(4)]
	s.inbound = [][]ports{nil, {{podPort, podPort}}}[r.IntN(2)]
	if r.IntN(3) == 0 {
		s.includeCIDRs = prefixes("198.51.0.0/16", "2001:db8::/32", "10.0.0.0/8")
	}
	if r.IntN(2) == 0 {
		s.excludeCIDRs = append(s.excludeCIDRs, prefixes(otherIPv4+"/32", otherIPv6+"/128")...)
	}
	return s
}

// annotations are those of a pod with these settings.
func (s settings) annotations() map[string]string {
	a := map[string]string{
		"sluice.dev/quic": s.quic, "sluice.dev/exclude-outbound-cidrs": list(s.excludeCIDRs),
		"sluice.dev/exclude-outbound-ports": list(s.excludePorts),
		"sluice.dev/include-outbound-ports": list(s.includePorts),
		"sluice.dev/include-outbound-cidrs": list(s.includeCIDRs), "sluice.dev/capture-inbound-ports": list(s.inbound),
	}
	return a
}

func list[T any](values []T) string {
	var words []string
	for _, v := range values {
		words = append(words, fmt.Sprint(v))
	}
	return strings.Join(words, ",")
}

// String is the form that annotations have.
func (p ports) String() string { return fmt.Sprintf("%d-%d", p.first, p.last) }

// replace has the plugin add the pod once more, with other annotations, as a runtime may do. The daemon decides anew,
// and the plugin replaces the rules.
func (s *scene) replace(next settings) error {
	result, err := json.Marshal(s.pod.Result)
	if err != nil {
		return err
	}
	conf := map[string]any{
		"cniVersion": s.n.CNIVersion, "name": "pods", "prevResult": json.RawMessage(result),
		"runtimeConfig": map[string]any{"io.kubernetes.cri.pod-annotations": next.annotations()},
	}
	maps.Copy(conf, s.n.Plugin)
	stdin, err := json.Marshal(conf)
	if err != nil {
		return err
	}
	args := &invoke.Args{
		Command: "ADD", ContainerID: s.pod.ID, NetNS: s.pod.Path(), IfName: "eth0", Path: s.n.Binaries(),
		PluginArgsStr: fmt.Sprintf("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=%s;K8S_POD_UID=%s",
			s.pod.Name(), s.pod.UID()),
	}
	exec := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}}
	return s.n.Do(func() error {
		_, err := exec.ExecPlugin(context.Background(), s.n.Binary("sluice"), stdin, args.AsEnv())
		return err
	})
}

func (s settings) String() string { return testbed.JSON(s.annotations()) }
