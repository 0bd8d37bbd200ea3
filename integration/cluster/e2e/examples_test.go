package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/e2e-framework/klient/decoder"
	"sigs.k8s.io/e2e-framework/klient/k8s"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/yaml"
)

// examples maps the examples in deploy/examples to the container that uses the proxy. Each example requests a path of
// its own from the server.
var examples = map[string]string{
	"wait-init-container": "job", "wait-init-container-proceed": "job",
	"wait-post-start": "app", "wait-native-sidecar": "app",
}

// example returns the manifest of an example, changed so that it sends its request to the tests' server.
func example(ctx context.Context, t *testing.T, c *envconf.Config, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deployed, "examples", name+".yaml"))
	must(t, err)
	return strings.ReplaceAll(images.Replace(string(text)), "http://example.com/", urls(ctx, t, c)[0]+name)
}

// applyExamples creates the pods of the examples on a node without a proxy. It checks that only the one with
// `--on-timeout proceed` sends its request.
func applyExamples(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(deployed, "examples", "*.yaml"))
	must(t, err)
	if len(files) != len(examples) {
		t.Errorf("deploy/examples contains %v, but the test knows %d examples", files, len(examples))
	}
	for name := range examples {
		must(t, apply(ctx, c, example(ctx, t, c, name), decoder.MutateNamespace(namespace)))
	}
	waitFor(ctx, t, "the example with --on-timeout proceed continues without the proxy", func() (bool, error) {
		return strings.Contains(logs(ctx, t, c, namespace, "server"), "url:/wait-init-container-proceed"), nil
	})
	requests := logs(ctx, t, c, namespace, "server")
	for name := range examples {
		if name != "wait-init-container-proceed" && strings.Contains(requests, "url:/"+name+"\n") {
			t.Errorf("%s did not wait for the proxy", name)
		}
	}
}

// makeExplicit makes the example proxy listen on the node too, by the patch for that.
func makeExplicit(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deployed, "mitmproxy", "explicit.yaml"))
	must(t, err)
	patch, err := yaml.YAMLToJSON([]byte(images.Replace(string(text))))
	must(t, err)
	strategic := k8s.Patch{PatchType: types.StrategicMergePatchType, Data: patch}
	must(t, client(c).Patch(ctx, daemonSet(proxies, "mitmproxy"), strategic))
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
}

// makeImplicit undoes makeExplicit.
func makeImplicit(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	must(t, client(c).Delete(ctx, daemonSet(proxies, "mitmproxy")))
	must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
}

// checkExamples checks, with the proxy running, that the waiting examples send their requests through it, and that all
// examples receive their responses.
func checkExamples(ctx context.Context, t *testing.T, c *envconf.Config) {
	makeExplicit(ctx, t, c)
	defer makeImplicit(ctx, t, c)
	proxy, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	for name, container := range examples {
		if name != "wait-init-container-proceed" {
			waitFor(ctx, t, name+" sends its request through the proxy", func() (bool, error) {
				return strings.Contains(logs(ctx, t, c, proxies, proxy), "/"+name+"\n"), nil
			})
		}
		waitFor(ctx, t, name+" has its response", func() (bool, error) {
			text, err := containerLogs(ctx, c, namespace, name, container)
			if apierrors.IsBadRequest(err) { // kubelet has not reported yet that the container runs
				return false, nil
			}
			return strings.Contains(text, "hello"), err
		})
		must(t, remove(ctx, c, example(ctx, t, c, name), decoder.MutateNamespace(namespace)))
	}
	waitFor(ctx, t, "no pod of an example remains", func() (bool, error) {
		var pods corev1.PodList
		err := client(c).WithNamespace(namespace).List(ctx, &pods)
		for _, p := range pods.Items {
			if examples[p.Name] != "" {
				return false, err
			}
		}
		return true, err
	})
}
