package e2e

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/e2e-framework/klient/k8s/resources"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// clusterBlock stands before the blocks of commands in the documentation that this suite runs.
const clusterBlock = "<!-- run: cluster -->\n```console\n"

// documented runs the commands of the documentation that need a cluster, as they are printed, page by page: first the
// README, on a cluster without sluice and proxy, and last the page about installation, which removes sluice again.
func documented(ctx context.Context, t *testing.T, c *envconf.Config) {
	const readme, install = "../../../README.md", "../../../docs/install.md"
	pages, err := filepath.Glob("../../../docs/*.md")
	must(t, err)
	pages = slices.DeleteFunc(pages, func(page string) bool { return page == install })
	removeAll(ctx, t, c)
	for _, page := range slices.Concat([]string{readme}, pages, []string{install}) {
		commands := clusterCommands(t, page)
		if commands == "" {
			continue
		}
		out := runOnCluster(ctx, t, page, commands, urls(ctx, t, c)[0])
		if page == readme {
			for _, want := range []string{"hello", "GET " + urls(ctx, t, c)[0]} { // the pod's log, and the proxy's
				if !strings.Contains(out, want) {
					t.Errorf("%s: the output of the commands does not contain %q", page, want)
				}
			}
		}
		deleteDocumentedPod(ctx, t, c)
	}
	text, err := inPod(ctx, c, namespace, "node", "sh", "-c", "cat /cni/*.conflist")
	must(t, err)
	if text != original {
		t.Errorf("after the commands of %s, the network configuration is\n%s\nand was\n%s", install, text, original)
	}
	for _, ns := range []string{system, proxies, "ci"} {
		must(t, deleteNamespace(ctx, c, ns))
	}
}

// deleteDocumentedPod deletes the pod that pages create, and waits until it has gone.
func deleteDocumentedPod(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	pod := newPod("web", "default", nil, "", "")
	if err := client(c).Delete(ctx, pod, resources.WithGracePeriod(0)); !apierrors.IsNotFound(err) {
		must(t, err)
	}
	waitFor(ctx, t, "the pod of the page has gone", func() (bool, error) {
		return apierrors.IsNotFound(client(c).Get(ctx, pod.Name, pod.Namespace, pod)), nil
	})
}

// removeAll removes sluice and the proxy from the cluster, and waits until they have gone.
func removeAll(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	must(t, deleteFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, deleteFile(ctx, c, "sluice.yaml"))
	for _, ns := range []string{system, proxies} {
		must(t, deleteNamespace(ctx, c, ns))
	}
}

// deleteNamespace deletes a namespace if it exists, and waits until it has gone.
func deleteNamespace(ctx context.Context, c *envconf.Config, name string) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := client(c).Delete(ctx, ns); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return eventually(ctx, "namespace "+name+" has gone", func() (bool, error) {
		return apierrors.IsNotFound(client(c).Get(ctx, name, "", ns)), nil
	})
}

// clusterCommands returns the commands of a page that this suite runs, without the prompts.
func clusterCommands(t *testing.T, page string) string {
	t.Helper()
	text, err := os.ReadFile(page)
	must(t, err)
	var commands strings.Builder
	for _, rest := range strings.Split(string(text), clusterBlock)[1:] {
		block, _, found := strings.Cut(rest, "```")
		if !found {
			t.Fatalf("%s: a block of commands does not end", page)
		}
		for line := range strings.Lines(block) {
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				commands.WriteString(command)
			}
		}
	}
	return commands.String()
}

// runOnCluster runs commands of a page in a copy of the repository's deploy folder. The images are those of the tests,
// and requests go to the tests' server.
func runOnCluster(ctx context.Context, t *testing.T, page, commands, server string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	dir := t.TempDir()
	must(t, copyDeployed(dir))
	bin, err := filepath.Abs("../../../bin")
	must(t, err)
	must(t, os.Symlink(bin, filepath.Join(dir, "bin"))) // helm
	commands = strings.NewReplacer(
		"http://example.com/", server, "--image=busybox:1.36", "--image=tools:e2e",
	).Replace(commands)
	shell := exec.CommandContext(ctx, "bash", "-c", "set -euxo pipefail\n"+commands)
	shell.Dir = dir
	// The node of integration/cluster has its kubectl beside the kubeconfig.
	shell.Env = append(os.Environ(), "PATH="+filepath.Dir(os.Getenv("KUBECONFIG"))+":"+os.Getenv("PATH"))
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	shell.Cancel = func() error { return syscall.Kill(-shell.Process.Pid, syscall.SIGKILL) } // a command that waits too
	out, err := shell.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: the commands fail: %v\n%s", page, err, out)
	}
	t.Logf("%s:\n%s", page, out)
	return string(out)
}

// copyDeployed copies the deploy folder of the repository into dir, with the images of the tests.
func copyDeployed(dir string) error {
	return fs.WalkDir(os.DirFS(deployed), ".", func(path string, d fs.DirEntry, err error) error {
		to := filepath.Join(dir, "deploy", path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(to, 0o755)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(filepath.Join(deployed, path))
		if err != nil {
			return err
		}
		image := strings.NewReplacer( // of the chart
			"repository: localhost/sluice", "repository: sluice", "appVersion: 0.1.0", "appVersion: e2e",
		)
		return os.WriteFile(to, []byte(image.Replace(images.Replace(string(text)))), info.Mode())
	})
}
