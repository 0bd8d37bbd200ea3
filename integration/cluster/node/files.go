package node

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/sluice-cni/sluice/integration/cluster/programs"
	"github.com/sluice-cni/sluice/integration/pki"
)

// Folders in Dir.
const (
	rootDir       = "root"       // the upper layer of the node's root: its differences from the machine's root
	workDir       = "work"       // overlayfs needs it
	mergedDir     = "merged"     // the mount point of the node's root, in the node's mount namespace
	containerdDir = "containerd" // /var/lib/containerd: an overlay on an overlay does not work
	kubeletDir    = "kubelet"    // /var/lib/kubelet
)

// Paths on the node.
const (
	binDir      = "/usr/local/bin"
	logDir      = "/var/log/node"
	kubeDir     = "/etc/kubernetes"
	adminConfig = kubeDir + "/admin.conf"
	pauseTar    = "/var/lib/pause.tar"
)

// Addresses of pods and Services.
const (
	podsIPv4     = "10.244.0.0/24"
	podsIPv6     = "fd00:10:244::/64"
	servicesIPv4 = "10.96.0.0/16"
	servicesIPv6 = "fd00:10:96::/112"
)

var environment = []string{
	"PATH=" + binDir + ":/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
	"KUBECONFIG=" + adminConfig,
}

// ownDirs are folders whose content on the machine is hidden from the node.
var ownDirs = []string{
	"/etc/cni", "/opt/cni", "/etc/containerd", "/etc/kubernetes", "/etc/nri", "/opt/nri", "/etc/cdi",
	"/var/lib/cni", "/var/lib/containerd", "/var/lib/kubelet", "/var/log/pods", "/var/log/containers", logDir,
}

// files writes files of the node. After the first failure it writes no more, and keeps the error.
type files struct {
	root string
	err  error
}

func (f *files) make(path string, write func(string) error) {
	if f.err != nil {
		return
	}
	target := filepath.Join(f.root, path)
	if f.err = os.MkdirAll(filepath.Dir(target), 0o755); f.err == nil {
		f.err = write(target)
	}
}

func (f *files) write(path string, data []byte) {
	f.make(path, func(target string) error { return os.WriteFile(target, data, 0o600) })
}

func (f *files) text(path, text string) {
	f.make(path, func(target string) error { return os.WriteFile(target, []byte(text), 0o644) })
}

func (f *files) yaml(path string, value any) {
	data, err := yaml.Marshal(value)
	if err != nil {
		f.err = fmt.Errorf("rendering %s: %w", path, err)
	}
	f.write(path, data)
}

func (f *files) pair(path string, p pki.Pair) {
	f.write(path+".crt", p.Cert)
	f.write(path+".key", p.Key)
}

// ownDir creates a folder that hides the machine's folder of the same name.
func (f *files) ownDir(path string) {
	f.make(path, func(target string) error {
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		if err := unix.Setxattr(target, "trusted.overlay.opaque", []byte("y"), 0); err != nil {
			return fmt.Errorf("making %s opaque: %w", target, err)
		}
		return nil
	})
}

// link adds a program as a hard link, which takes no time and no space. The node must not write to the file.
func (f *files) link(path, from string) {
	f.make(path, func(target string) error {
		if err := os.Link(from, target); err == nil {
			return nil
		}
		return copyFile(from, target) // for example, on another file system
	})
}

func (f *files) copy(path, from string) {
	f.make(path, func(target string) error { return copyFile(from, target) })
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close() //nolint:errcheck // only read
	target, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(target, source); err != nil {
		_ = target.Close()
		return fmt.Errorf("copying %s to %s: %w", from, to, err)
	}
	return target.Close()
}

// layDown writes all files of the node.
func (c Config) layDown(paths map[string]string, pause []byte) error {
	for _, name := range []string{rootDir, workDir, mergedDir, containerdDir, kubeletDir} {
		if err := os.MkdirAll(c.path(name), 0o755); err != nil {
			return err
		}
	}
	f := &files{root: c.path(rootDir)}
	for _, dir := range ownDirs {
		f.ownDir(dir)
	}
	for _, name := range append(append([]string{}, programs.Kubernetes...), programs.Containerd...) {
		f.link(filepath.Join(binDir, name), paths[name])
	}
	for _, name := range programs.CNI {
		f.copy(filepath.Join("/opt/cni/bin", name), paths[name]) // a copy, because tests may change it
	}
	f.write(pauseTar, pause)
	f.text("/etc/hostname", Name+"\n")
	f.text("/etc/hosts", fmt.Sprintf("127.0.0.1 localhost\n::1 localhost\n%s %s\n", nodeIPv4, Name))
	f.text("/etc/resolv.conf", "nameserver "+WorldIPv4+"\n")
	f.text("/etc/containerd/config.toml", containerdConfig)
	f.text("/etc/cni/net.d/10-bridge.conflist", conflist(c))
	f.yaml(kubeDir+"/kubelet.yaml", kubeletConfig(c))
	f.yaml(kubeDir+"/kube-proxy.yaml", proxyConfig(c))
	if f.err != nil {
		return f.err
	}
	if err := c.layDownKeys(f); err != nil {
		return fmt.Errorf("making certificates: %w", err)
	}
	if f.err != nil {
		return f.err
	}
	admin, err := os.ReadFile(filepath.Join(f.root, adminConfig))
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.Kubeconfig(), admin, 0o600); err != nil {
		return err
	}
	return os.Symlink(paths["kubectl"], c.path("kubectl"))
}

func (c Config) layDownKeys(f *files) error {
	ca := pki.NewCA("kubernetes-ca")
	f.pair(kubeDir+"/ca", ca.Pair)
	server := ca.Server("kube-apiserver",
		[]string{
			"localhost", Name,
			"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
		},
		[]net.IP{
			net.IPv4(127, 0, 0, 1), net.IPv6loopback, net.ParseIP(nodeIPv4), net.ParseIP(nodeIPv6),
			firstOf(servicesIPv4), firstOf(servicesIPv6),
		})
	f.pair(kubeDir+"/apiserver", server)
	f.pair(kubeDir+"/apiserver-kubelet-client", ca.Client("kube-apiserver-kubelet-client", "system:masters"))
	f.write(kubeDir+"/service-accounts.key", pki.SigningKey())
	for _, u := range []struct{ file, name, group string }{
		{adminConfig, "kubernetes-admin", "system:masters"},
		{kubeDir + "/kube-controller-manager.conf", "system:kube-controller-manager", ""},
		{kubeDir + "/kube-scheduler.conf", "system:kube-scheduler", ""},
		{kubeDir + "/kube-proxy.conf", "system:kube-proxy", ""},
		{kubeDir + "/kubelet.conf", "system:node:" + Name, "system:nodes"},
	} {
		var groups []string
		if u.group != "" {
			groups = []string{u.group}
		}
		config, err := kubeconfig(c.apiURL(), ca.Cert, u.name, ca.Client(u.name, groups...))
		if err != nil {
			return err
		}
		f.write(u.file, config)
	}
	return nil
}

// kubeconfig is a kubeconfig for the API server at url, with a client certificate for the user.
func kubeconfig(url string, ca []byte, user string, client pki.Pair) ([]byte, error) {
	const name = "sluice"
	return yaml.Marshal(map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": name,
		"clusters": []any{map[string]any{"name": name, "cluster": map[string]any{
			"server": url, "certificate-authority-data": ca,
		}}},
		"users": []any{map[string]any{"name": user, "user": map[string]any{
			"client-certificate-data": client.Cert, "client-key-data": client.Key,
		}}},
		"contexts": []any{map[string]any{"name": name, "context": map[string]any{"cluster": name, "user": user}}},
	})
}

func (c Config) apiURL() string { return fmt.Sprintf("https://127.0.0.1:%d", c.Port) }

// firstOf returns the first address of a Service CIDR, which is the address of the Service "kubernetes".
func firstOf(cidr string) net.IP {
	ip, _, err := net.ParseCIDR(cidr)
	if err != nil {
		panic(err) // a constant
	}
	ip[len(ip)-1]++
	return ip
}

const containerdConfig = `version = 4

[plugins.'io.containerd.cri.v1.images']
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = 'localhost/pause:node'

[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE, containerd must not give a process a lower oom_score_adj than its own.
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
`

func conflist(c Config) string {
	ranges := []any{[]any{map[string]string{"subnet": podsIPv4}}}
	routes := []any{map[string]string{"dst": "0.0.0.0/0"}}
	if c.DualStack {
		ranges = append(ranges, []any{map[string]string{"subnet": podsIPv6}})
		routes = append(routes, map[string]string{"dst": "::/0"})
	}
	data, err := json.MarshalIndent(map[string]any{
		"cniVersion": "1.0.0",
		"name":       "pods",
		"plugins": []any{
			map[string]any{
				"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
				"ipam": map[string]any{"type": "host-local", "ranges": ranges, "routes": routes},
			},
			map[string]any{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}},
		},
	}, "", "  ")
	if err != nil {
		panic(err) // all values have a JSON form
	}
	return string(data) + "\n"
}
