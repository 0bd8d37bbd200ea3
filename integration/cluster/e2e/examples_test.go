package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/e2e-framework/klient/decoder"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// examples are those of deploy/examples, and the container that uses the proxy. Each asks the server at a path of its
// own.
var examples = map[string]string{
	"wait-init-container": "job", "wait-init-container-proceed": "job", "wait-post-start": "app", "wait-native-sidecar": "app",
}

// example is the manifest of an example that asks the server.
func example(ctx context.Context, t *testing.T, c *envconf.Config, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deployed, "examples", name+".yaml"))
	must(t, err)
	return strings.ReplaceAll(images.Replace(string(text)), "http://example.com/", urls(ctx, t, c)[0]+name)
}

// applyExamples is for a node on which there is no proxy yet. One of them does not wait for long.
func applyExamples(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(deployed, "examples", "*.yaml"))
	must(t, err)
	if len(files) != len(examples) {
		t.Errorf("there are the examples %v, want %d", files, len(examples))
	}
	for name := range examples {
		must(t, apply(ctx, c, example(ctx, t, c, name), decoder.MutateNamespace(namespace)))
	}
	must(t, eventually(ctx, "one goes on without the proxy", func() (bool, error) {
		return strings.Contains(logs(ctx, t, c, namespace, "server"), "url:/wait-init-container-proceed"), nil
	}))
	for name := range examples {
		if name != "wait-init-container-proceed" && strings.Contains(logs(ctx, t, c, namespace, "server"), "url:/"+name+"\n") {
			t.Errorf("%s did not wait for the proxy", name)
		}
	}
}

// checkExamples is for when the proxy has come.
func checkExamples(ctx context.Context, t *testing.T, c *envconf.Config) {
	proxy, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	for name, container := range examples {
		if name != "wait-init-container-proceed" {
			must(t, eventually(ctx, name+" asks through the proxy", func() (bool, error) {
				return strings.Contains(logs(ctx, t, c, proxies, proxy), "/"+name+"\n"), nil
			}))
		}
		must(t, eventually(ctx, name+" has its answer", func() (bool, error) {
			text, err := containerLogs(ctx, c, namespace, name, container)
			return strings.Contains(text, "hello"), err
		}))
		must(t, remove(ctx, c, example(ctx, t, c, name), decoder.MutateNamespace(namespace)))
	}
	must(t, eventually(ctx, "they are gone", func() (bool, error) {
		var pods corev1.PodList
		err := client(c).WithNamespace(namespace).List(ctx, &pods)
		for _, p := range pods.Items {
			if examples[p.Name] != "" {
				return false, err
			}
		}
		return true, err
	}))
}
