// Package programs builds the programs of a Kubernetes node from Go modules. It caches them by a hash of the sources,
// the flags and the compiler, so that each combination is built once.
package programs

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Kubernetes lists the Kubernetes programs. One binary contains them all.
var Kubernetes = []string{
	"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl", "kubeadm",
}

// CNI lists the CNI reference plugins of the node.
var CNI = []string{"bridge", "host-local", "loopback", "portmap"}

// Containerd lists containerd, its shim and its client.
var Containerd = []string{"containerd", "containerd-shim-runc-v2", "ctr"}

// Machine lists the programs that come from the machine's packages (see integration/setup.sh).
var Machine = []string{"etcd", "runc", "ip", "iptables", "ip6tables", "conntrack", "nsenter", "mount", "busybox"}

// build is one `go build` in a module's folder.
type build struct {
	module string
	title  string // for messages
	pkg    string
	as     string // the name of the binary; empty: one binary for each package, with the package's name
	// stamped is a module whose version the linker writes into the binary. Kubernetes needs this to know its version.
	stamped string
}

var builds = []build{
	{module: "kube", title: "Kubernetes", pkg: ".", as: "kube", stamped: "k8s.io/kubernetes"},
	{module: "tools", title: "containerd and the CNI plugins", pkg: "tool"},
}

// Build builds the programs that are not in the folder cache yet, from the modules in the folder source. It returns the
// path of each program by name.
func Build(ctx context.Context, source, cache string, progress io.Writer) (map[string]string, error) {
	for _, name := range Machine {
		if _, err := exec.LookPath(name); err != nil {
			return nil, fmt.Errorf("a node needs %s (integration/setup.sh e2e installs it): %w", name, err)
		}
	}
	paths := map[string]string{}
	for _, b := range builds {
		dir, err := b.cached(ctx, source, cache, progress)
		if err != nil {
			return nil, fmt.Errorf("building %s: %w", b.title, err)
		}
		if b.as != "" {
			for _, name := range Kubernetes {
				paths[name] = filepath.Join(dir, b.as)
			}
			continue
		}
		for _, name := range append(append([]string{}, CNI...), Containerd...) {
			paths[name] = filepath.Join(dir, name)
		}
	}
	return paths, nil
}

// cached returns the folder with the programs of b, and builds them if they are not cached.
func (b build) cached(ctx context.Context, source, cache string, progress io.Writer) (string, error) {
	key, err := b.key(ctx, source)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, b.module+"-"+key)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	start := time.Now()
	fmt.Fprintf(progress, "building %s: this takes minutes, but only once\n", b.title)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(cache, "building-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp) //nolint:errcheck // after a successful build it has been renamed
	out := tmp + "/"
	if b.as != "" {
		out = filepath.Join(tmp, b.as)
	}
	ldflags, err := b.ldflags(ctx, source)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags,
		"-o", out, b.pkg)
	cmd.Dir = filepath.Join(source, b.module)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	cmd.Stdout, cmd.Stderr = progress, progress
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("go build in %s: %w", cmd.Dir, err)
	}
	// MkdirTemp creates the folder with mode 0700.
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, dir); err != nil {
		// A concurrent build of the same programs may have been faster.
		if _, missing := os.Stat(dir); missing != nil {
			return "", errors.Join(err, missing)
		}
	}
	fmt.Fprintf(progress, "built %s in %s\n", b.title, time.Since(start).Round(time.Second))
	return dir, nil
}

func (b build) ldflags(ctx context.Context, source string) (string, error) {
	flags := "-s -w"
	if b.stamped == "" {
		return flags, nil
	}
	cmd := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Version}}", b.stamped)
	cmd.Dir = filepath.Join(source, b.module)
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("reading the version of %s in %s: %w", b.stamped, cmd.Dir, err)
	}
	version := strings.TrimSpace(string(out))
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(parts) != 3 {
		return "", fmt.Errorf("version %q of %s: want major.minor.patch", version, b.stamped)
	}
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		flags += fmt.Sprintf(" -X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=%[3]s -X %[1]s.gitMinor=%[4]s",
			pkg, version, parts[0], parts[1])
	}
	return flags, nil
}

// key returns a hash of everything that the result depends on.
func (b build) key(ctx context.Context, source string) (string, error) {
	h := sha256.New()
	cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOEXPERIMENT")
	cmd.Dir = filepath.Join(source, b.module) // the toolchain is the module's
	cmd.Stdout = h
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("reading the compiler's version in %s: %w", cmd.Dir, err)
	}
	fmt.Fprintf(h, "%+v\n", b)
	files, err := filepath.Glob(filepath.Join(source, b.module, "*"))
	if err != nil {
		return "", err
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d\n%s", filepath.Base(file), len(data), data)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:6]), nil
}
