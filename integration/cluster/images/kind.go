package images

import (
	_ "embed"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sluice-cni/sluice/integration/cluster/programs"
)

// kindNetwork is the manifest that kind applies in place of its own kindnetd. IMAGE stands for an image.
//
//go:embed kindnet.yaml
var kindNetwork string

// importImages makes containerd import the images of the node when it starts, and kubelet start after that.
const (
	importImages = "[Service]\nTimeoutStartSec=10min\n" +
		"ExecStartPost=/usr/local/bin/ctr -n k8s.io images import " + kindImages + "\n"
	afterImages = "[Unit]\nAfter=containerd.service\n"
	kindImages  = "/kind/images.tar"
)

// KindNode builds kind-node:e2e, the image of a kind node, from the root that kind-root.sh makes and from programs by
// name: those of package programs, and etcd in the version that kubeadm names.
func KindNode(root string, paths map[string]string) (Image, error) {
	version, err := kubeadm(paths, "version", "--output=short")
	if err != nil {
		return Image{}, err
	}
	names, err := kubeadm(paths, "config", "images", "list", "--kubernetes-version="+version[0])
	if err != nil {
		return Image{}, err
	}
	proxy := slices.IndexFunc(names, func(name string) bool { return strings.Contains(name, "/kube-proxy:") })
	if proxy < 0 {
		return Image{}, fmt.Errorf("kubeadm names no image of kube-proxy among %q", names)
	}
	var archive strings.Builder
	if err := controlPlane(&archive, names, paths); err != nil {
		return Image{}, fmt.Errorf("packing the images of the control plane: %w", err)
	}
	t := newTree()
	if err := t.matching(root, "*"); err != nil {
		return Image{}, err
	}
	for _, name := range programs.Containerd {
		t.program("/usr/local/bin/"+name, paths[name])
	}
	for _, name := range programs.CNI {
		t.program("/opt/cni/bin/"+name, paths[name])
	}
	t.program("/usr/bin/kubelet", paths["kubelet"])
	t.symlink("/usr/bin/kubeadm", "kubelet")
	t.symlink("/usr/bin/kubectl", "kubelet")
	t.text("/kind/version", version[0])
	t.text("/kind/manifests/default-cni.yaml", strings.ReplaceAll(kindNetwork, "IMAGE", names[proxy]))
	t.text(kindImages, archive.String())
	t.text("/etc/systemd/system/containerd.service.d/images.conf", importImages)
	t.text("/etc/systemd/system/kubelet.service.d/images.conf", afterImages)
	return newImage("kind-node:e2e", t, v1.Config{
		Entrypoint: []string{"/usr/local/bin/entrypoint", "/sbin/init"}, StopSignal: "SIGRTMIN+3",
		Env: []string{searchPath, "container=docker"},
	})
}

// kubeadm runs kubeadm and returns the lines of its output.
func kubeadm(paths map[string]string, args ...string) ([]string, error) {
	cmd := exec.Command(paths["kubeadm"], args...)
	cmd.Args[0] = "kubeadm" // the program has several names
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("kubeadm %q: %w", args, err)
	}
	return strings.Fields(string(out)), nil
}

// controlPlane writes an archive of the image of sandboxes, and of one image with all programs of the control plane
// under the names that kubeadm asks for.
func controlPlane(w io.Writer, names []string, paths map[string]string) error {
	t := newTree()
	if err := t.iptables("iproute2", "conntrack"); err != nil {
		return err
	}
	t.program("/usr/local/bin/etcd", paths["etcd"])
	t.program("/usr/local/bin/kube", paths["kubectl"])
	for _, name := range programs.Kubernetes {
		t.symlink(filepath.Join("/usr/local/bin", name), "kube")
	}
	components, err := newImage(names[0], t, v1.Config{Env: []string{searchPath}})
	if err != nil {
		return err
	}
	pause, err := Pause()
	if err != nil {
		return err
	}
	all := map[name.Tag]v1.Image{pause.tag: pause.image}
	for _, reference := range names {
		if strings.Contains(reference, "/pause:") || strings.Contains(reference, "/coredns") {
			continue // containerd's configuration names the one above; kind.yaml leaves CoreDNS out
		}
		tag, err := name.NewTag(reference)
		if err != nil {
			return err
		}
		all[tag] = components.image
	}
	return tarball.MultiWrite(all, w)
}
