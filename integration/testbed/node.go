package testbed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
)

// Addresses of the world, and of the node on the way there.
const (
	WorldIPv4 = "198.51.100.10"
	WorldIPv6 = "2001:db8::10"
	NodeIPv4  = "198.51.100.1"
	NodeIPv6  = "2001:db8::1"
)

// Web is where the world serves its one page.
const Web = WorldIPv4 + ":80"

// CNIPlugins is where the reference plugins are installed.
const CNIPlugins = "/usr/lib/cni"

// Node is a machine with pods.
type Node struct {
	*Host
	World *Host
	// Dir holds everything that the node's programs write.
	Dir string
	// Plugin holds the keys of sluice's entry in the conflist; change them before pods are added.
	Plugin map[string]any
	// Config holds the daemon's configuration; change it before the daemon is started.
	Config map[string]any
	// CNIVersion is that of the conflist.
	CNIVersion string
	// LogLevel is the daemon's.
	LogLevel string
	// ProbeSocket, unless empty, is the probe socket of the next daemon that is started.
	ProbeSocket string
	// Resolvers, unless nil, are the name servers in the resolv.conf that the daemon sees. Set them before it starts.
	Resolvers []string
	// MitmproxyVersion, unless empty, is the version in bin/mitmproxy that the node runs.
	MitmproxyVersion string
	// ConfDir is set where the daemon installs itself: the conflist is then the file that a runtime finds there.
	ConfDir string

	bin string
	cni *libcni.CNIConfig
}

// New makes a node and the world beside it, with the binaries under test. Its upstream is asked by CONNECT.
func New(tb TB) *Node {
	tb.Helper()
	return NewNode(tb, Binaries(tb))
}

// NewWith is New for an upstream that speaks the protocol.
func NewWith(tb TB, protocol string) *Node {
	tb.Helper()
	n := New(tb)
	n.SetProtocol(protocol)
	return n
}

// NewNode makes a node and the world beside it, with the binaries in a folder (see Build).
func NewNode(tb TB, binaries string) *Node {
	tb.Helper()
	n := &Node{
		Host: NewHost(tb, "node"), World: NewHost(tb, "world"), Dir: tb.TempDir(),
		CNIVersion: "1.0.0", LogLevel: "DEBUG", bin: binaries,
	}
	n.Plugin = map[string]any{
		"type": "sluice", "agentSocket": n.AgentSocket(), "stateDir": n.StateDir(), "dataDir": n.DataDir(),
	}
	n.Config = map[string]any{
		"upstream":       map[string]any{"address": ProxyAddress, "protocol": "connect"},
		"capture":        map[string]any{"source": "all"},
		"agentSocket":    n.AgentSocket(),
		"proxySocket":    n.ProxySocket(),
		"stateDir":       n.StateDir(),
		"dataDir":        n.DataDir(),
		"metricsAddress": "",
	}
	// Without one, CNIConfig makes an Exec at its first call, which is a race between pods that are added at the same
	// time.
	run := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}}
	path := []string{n.binDir(), binaries, CNIPlugins}
	n.cni = libcni.NewCNIConfigWithCacheDir(path, filepath.Join(n.Dir, "cni-cache"), run)

	// The index differs from the index of the peer. If they were equal, the kernel would not take the link for a veth
	// and would notice a second or two late that it is up; until then IPv6 would not work
	// (linkwatch_urgent_event in net/core/link_watch.c).
	n.IP("link", "add", "world", "index", "1000", "type", "veth", "peer", "name", "eth0", "netns", n.World.Name)
	n.IP("addr", "add", NodeIPv4+"/24", "dev", "world")
	n.IP("addr", "add", NodeIPv6+"/64", "dev", "world", "nodad")
	n.IP("link", "set", "world", "up")
	n.World.IP("addr", "add", WorldIPv4+"/24", "dev", "eth0")
	n.World.IP("addr", "add", WorldIPv6+"/64", "dev", "eth0", "nodad")
	n.World.IP("link", "set", "eth0", "up")
	n.World.IP("route", "add", "default", "via", NodeIPv4)
	n.World.IP("-6", "route", "add", "default", "via", NodeIPv6)
	// The bridge's address is unique here: duplicate address detection would take a second to find that out.
	n.Exec("sysctl", "-qw",
		"net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv6.conf.default.accept_dad=0")
	watchSYNs(n)
	return n
}

// SetProtocol sets the protocol of the node's upstream: connect, socks5, proxy-v2 or sockets. Call it before the
// daemon is started.
func (n *Node) SetProtocol(protocol string) {
	upstream := map[string]any{"protocol": protocol}
	if protocol != "sockets" { // its proxies come to the daemon
		upstream["address"] = ProxyAddress
	}
	n.Config["upstream"] = upstream
}

// Binaries is the folder of the node's binaries.
func (n *Node) Binaries() string { return n.bin }

// Binary is the path of one of the node's binaries: sluice, sluiced or connectproxy.
func (n *Node) Binary(name string) string { return filepath.Join(n.bin, name) }

// AgentSocket is the daemon's socket.
func (n *Node) AgentSocket() string { return filepath.Join(n.Dir, "agent.sock") }

// ProxySocket is where the daemon serves proxies that accept for themselves.
func (n *Node) ProxySocket() string { return filepath.Join(n.Dir, "proxy.sock") }

// StateDir is where attachments are recorded.
func (n *Node) StateDir() string { return filepath.Join(n.Dir, "state") }

// DataDir is where the files are that outlive the boot.
func (n *Node) DataDir() string { return filepath.Join(n.Dir, "data") }

// binDir is where the daemon installs the plugin.
func (n *Node) binDir() string { return filepath.Join(n.Dir, "cni-bin") }

// Install has the daemon install itself, into the node's chain as it is without sluice. Call it before the daemon is
// started.
func (n *Node) Install() {
	n.tb.Helper()
	n.ConfDir = filepath.Join(n.Dir, "cni-conf")
	err := errors.Join(
		os.Mkdir(n.ConfDir, 0o755), os.Mkdir(n.binDir(), 0o755), os.WriteFile(n.ConfFile(), n.Primary(), 0o600),
	)
	if err != nil {
		n.tb.Fatalf("the node's CNI configuration: %v", err)
	}
}

// ConfFile is the conflist of the primary plugin.
func (n *Node) ConfFile() string { return filepath.Join(n.ConfDir, "10-pods.conflist") }

// Primary is the conflist as the primary plugin's own installer writes it.
func (n *Node) Primary() []byte {
	n.tb.Helper()
	return marshalConflist(n, n.CNIVersion, bridgeConf(n))
}

// watchSYNs counts the SYNs that leave the pods' links: connections that bypass capture.
func watchSYNs(n *Node) {
	rules := filepath.Join(n.Dir, "watch.nft")
	err := os.WriteFile(rules, []byte(`table inet watch {
	counter syns { }
	chain prerouting {
		type filter hook prerouting priority -350
		iifname "cni0" tcp flags & (syn | ack) == syn counter name syns
	}
}
`), 0o600)
	if err != nil {
		n.tb.Fatalf("writing %s: %v", rules, err)
	}
	n.Exec("nft", "-f", rules)
}

var packets = regexp.MustCompile(`packets (\d+)`)

// SYNs is how many SYNs have left the links of the node's pods.
func (n *Node) SYNs() int {
	n.tb.Helper()
	m := packets.FindStringSubmatch(n.Exec("nft", "list", "counter", "inet", "watch", "syns"))
	if m == nil {
		n.tb.Fatalf("the SYN counter cannot be read")
	}
	count, _ := strconv.Atoi(m[1])
	return count
}

// Conflist is the node's CNI configuration: bridge, then sluice; or the file in ConfDir, as a runtime finds it.
func (n *Node) Conflist() *libcni.NetworkConfigList {
	n.tb.Helper()
	if n.ConfDir == "" {
		return newConflist(n, n.CNIVersion, bridgeConf(n), n.Plugin)
	}
	list, err := libcni.ConfListFromFile(n.ConfFile())
	if err != nil {
		n.tb.Fatalf("conflist: %v", err)
	}
	return list
}

func bridgeConf(n *Node) map[string]any {
	return map[string]any{
		"type": "bridge", "bridge": "cni0", "isGateway": true,
		"ipam": map[string]any{
			"type": "host-local", "dataDir": filepath.Join(n.Dir, "ipam"),
			"ranges": [][]map[string]string{{{"subnet": "10.88.0.0/16"}}, {{"subnet": "fd00:88::/64"}}},
			"routes": []map[string]string{{"dst": "0.0.0.0/0"}, {"dst": "::/0"}},
		},
	}
}

// alone is sluice's entry without the others, for GC and STATUS: the bridge plugin of some distributions is older than
// these verbs.
func sluiceConflist(n *Node) *libcni.NetworkConfigList {
	n.tb.Helper()
	return newConflist(n, "1.1.0", n.Plugin)
}

func newConflist(n *Node, version string, plugins ...any) *libcni.NetworkConfigList {
	n.tb.Helper()
	list, err := libcni.ConfListFromBytes(marshalConflist(n, version, plugins...))
	if err != nil {
		n.tb.Fatalf("conflist: %v", err)
	}
	return list
}

func marshalConflist(n *Node, version string, plugins ...any) []byte {
	n.tb.Helper()
	data, err := json.Marshal(map[string]any{"cniVersion": version, "name": "pods", "plugins": plugins})
	if err != nil {
		n.tb.Fatalf("conflist: %v", err)
	}
	return data
}

// Pod is a pod's sandbox.
type Pod struct {
	*Host
	ID     string
	IPv4   string
	IPv6   string
	Result types.Result

	node      *Node
	namespace string
	cgroup    string // empty until something is started in it
	// RuntimeConfig is handed to the plugins that declare the capabilities.
	RuntimeConfig map[string]any
}

// NewPod makes a sandbox that is not added to the network yet.
func (n *Node) NewPod(name string) *Pod {
	n.tb.Helper()
	h := NewHost(n.tb, name)
	return &Pod{Host: h, ID: h.Name, node: n, namespace: "default"}
}

// AddPod makes a sandbox and runs the chain's ADD for it; DEL runs when the test ends.
func (n *Node) AddPod(name string) *Pod {
	n.tb.Helper()
	p := n.NewPod(name)
	if err := p.Add(); err != nil {
		n.tb.Fatalf("ADD %s: %v", name, err)
	}
	n.tb.Cleanup(func() { _ = p.Del() })
	return p
}

// AddBystander adds a pod that is not captured: its namespace is excluded.
func (n *Node) AddBystander() *Pod {
	n.tb.Helper()
	p := n.NewPod("bystander").InNamespace("kube-system")
	if err := p.Add(); err != nil {
		n.tb.Fatalf("ADD of a pod that is not captured: %v", err)
	}
	n.tb.Cleanup(func() { _ = p.Del() })
	return p
}

// Annotated hands over a pod's annotations as containerd does. The result changes a pod before ADD.
func (n *Node) Annotated(annotations map[string]string) func(*Pod) {
	const capability = "io.kubernetes.cri.pod-annotations"
	n.Plugin["capabilities"] = map[string]bool{capability: true}
	return func(p *Pod) { p.RuntimeConfig = map[string]any{capability: annotations} }
}

// InNamespace sets the pod's Kubernetes namespace; call it before Add.
func (p *Pod) InNamespace(namespace string) *Pod {
	p.namespace = namespace
	return p
}

// Name is the pod's name as Kubernetes would know it.
func (p *Pod) Name() string { return p.Host.Name[strings.LastIndex(p.Host.Name, "-")+1:] }

// UID is the pod's UID.
func (p *Pod) UID() string { return "uid-" + p.Name() }

func (p *Pod) runtimeConf() *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: p.ID, NetNS: p.Path(), IfName: "eth0", CapabilityArgs: p.RuntimeConfig,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", p.namespace}, {"K8S_POD_NAME", p.Name()}, {"K8S_POD_UID", p.UID()},
		},
	}
}

// Add runs the chain's ADD.
func (p *Pod) Add() error {
	list := p.node.Conflist()
	err := p.node.Do(func() (err error) {
		p.Result, err = p.node.cni.AddNetworkList(context.Background(), list, p.runtimeConf())
		return err
	})
	if err != nil {
		return err
	}
	var r struct {
		IPs []struct{ Address string }
	}
	raw, err := json.Marshal(p.Result)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		return err
	}
	for _, ip := range r.IPs {
		a, _, _ := strings.Cut(ip.Address, "/")
		if strings.Contains(a, ":") {
			p.IPv6 = a
		} else {
			p.IPv4 = a
		}
	}
	return nil
}

// Del runs the chain's DEL.
func (p *Pod) Del() error {
	list := p.node.Conflist()
	return p.node.Do(func() error {
		return p.node.cni.DelNetworkList(context.Background(), list, p.runtimeConf())
	})
}

// Check runs the chain's CHECK.
func (p *Pod) Check() error {
	list := p.node.Conflist()
	return p.node.Do(func() error {
		return p.node.cni.CheckNetworkList(context.Background(), list, p.runtimeConf())
	})
}

// GC runs the chain's GC with these pods as the valid ones.
func (n *Node) GC(valid ...*Pod) error {
	list := sluiceConflist(n)
	args := &libcni.GCArgs{}
	for _, p := range valid {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: p.ID, IfName: "eth0"})
	}
	return n.Do(func() error { return n.cni.GCNetworkList(context.Background(), list, args) })
}

// Status runs the chain's STATUS.
func (n *Node) Status() error {
	list := sluiceConflist(n)
	return n.Do(func() error { return n.cni.GetStatusNetworkList(context.Background(), list) })
}

// Nested makes a container inside the pod, as Docker-in-Docker does: its own netns behind a bridge in the pod's netns,
// its packets forwarded and masqueraded.
func (p *Pod) Nested() *Host {
	p.tb.Helper()
	c := NewHost(p.tb, p.Name()+"-nested")
	p.IP("link", "add", "docker0", "type", "bridge")
	p.IP("addr", "add", "172.30.0.1/24", "dev", "docker0")
	p.IP("addr", "add", "fd00:30::1/64", "dev", "docker0", "nodad")
	p.IP("link", "set", "docker0", "up")
	p.IP("link", "add", "v0", "type", "veth", "peer", "name", "eth0", "netns", c.Name)
	p.IP("link", "set", "v0", "master", "docker0", "up")
	c.IP("addr", "add", "172.30.0.2/24", "dev", "eth0")
	c.IP("addr", "add", "fd00:30::2/64", "dev", "eth0", "nodad")
	c.IP("link", "set", "eth0", "up")
	c.IP("route", "add", "default", "via", "172.30.0.1")
	c.IP("-6", "route", "add", "default", "via", "fd00:30::1")
	p.Exec("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	for _, tool := range []string{"iptables", "ip6tables"} {
		p.Exec(tool, "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")
	}
	return c
}

func (p *Pod) String() string { return fmt.Sprintf("%s/%s", p.namespace, p.Name()) }
