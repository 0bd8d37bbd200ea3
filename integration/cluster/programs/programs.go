// Package programs builds what a Kubernetes node runs, from Go modules, and keeps it by content: the same sources,
// flags and compiler are built once.
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

// Kubernetes are the names that the one binary of Kubernetes goes by.
var Kubernetes = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"}

// CNI are the reference plugins.
var CNI = []string{"bridge", "host-local", "loopback", "portmap"}

// Containerd is containerd, its shim and its client.
var Containerd = []string{"containerd", "containerd-shim-runc-v2", "ctr"}

// Machine are the programs that come from the machine's packages (see integration/setup.sh).
var Machine = []string{"etcd", "runc", "ip", "iptables", "ip6tables", "conntrack", "nsenter", "mount", "busybox"}

// A build is one `go build` in a module's folder.
type build struct {
	module string
	what   string // what people know it as
	pkg    string
	as     string // the name of the file; empty: each package has its own
	// stamped names a module whose version is linked in: Kubernetes does not know its own.
	stamped string
}

var builds = []build{
	{module: "kube", what: "Kubernetes", pkg: ".", as: "kube", stamped: "k8s.io/kubernetes"},
	{module: "tools", what: "containerd and the CNI plugins", pkg: "tool"},
}

// Build builds what is not in cache yet, from the modules in source, and returns where each program is.
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
			return nil, fmt.Errorf("building %s: %w", b.what, err)
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

// cached is the directory with what b builds.
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
	fmt.Fprintf(progress, "building %s: minutes, once\n", b.what)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(cache, "building-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp) //nolint:errcheck // renamed away, or of no use
	out := tmp + "/"
	if b.as != "" {
		out = filepath.Join(tmp, b.as)
	}
	ldflags, err := b.ldflags(ctx, source)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o", out, b.pkg)
	cmd.Dir = filepath.Join(source, b.module)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	cmd.Stdout, cmd.Stderr = progress, progress
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("go build in %s: %w", cmd.Dir, err)
	}
	// MkdirTemp's mode keeps others out.
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, dir); err != nil {
		// Another build of the same may have been faster.
		if _, missing := os.Stat(dir); missing != nil {
			return "", errors.Join(err, missing)
		}
	}
	fmt.Fprintf(progress, "built %s in %s\n", b.what, time.Since(start).Round(time.Second))
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
		return "", fmt.Errorf("asking for the version of %s in %s: %w", b.stamped, cmd.Dir, err)
	}
	version := strings.TrimSpace(string(out))
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(parts) != 3 {
		return "", fmt.Errorf("version %q of %s: want major.minor.patch", version, b.stamped)
	}
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		flags += fmt.Sprintf(" -X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=%[3]s -X %[1]s.gitMinor=%[4]s", pkg, version, parts[0], parts[1])
	}
	return flags, nil
}

// key names everything that the result depends on.
func (b build) key(ctx context.Context, source string) (string, error) {
	h := sha256.New()
	cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOEXPERIMENT")
	cmd.Dir = filepath.Join(source, b.module) // the toolchain is the module's
	cmd.Stdout = h
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("asking for the compiler's version in %s: %w", cmd.Dir, err)
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
