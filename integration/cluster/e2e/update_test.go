package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// previousManifests is the environment variable with the folder of the manifests of the version before this one. The
// nodes have its image sluice:previous.
const previousManifests = "E2E_PREVIOUS"

// TestUpdate is the story of an update from the version before this one, on all nodes, while captured pods send
// requests.
func TestUpdate(t *testing.T) {
	step(t, "an old pod that restarts in an update has its own configuration", oldPodRestarts)
	if os.Getenv(previousManifests) == "" {
		t.Skipf("%s is not set: `make e2e-kind` sets it", previousManifests)
	}
	step(t, "captured pods send requests while sluice is updated, and then mitmproxy", update)
}

func update(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, deleteFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, deleteFile(ctx, c, "sluice.yaml"))
	must(t, deleteNamespace(ctx, c, system))
	must(t, deleteNamespace(ctx, c, proxies))
	sluice := regexp.MustCompile(`image: (.*/)?sluice:.*`)
	for _, name := range []string{"sluice.yaml", "mitmproxy/mitmproxy.yaml"} {
		text, err := os.ReadFile(filepath.Join(os.Getenv(previousManifests), name))
		must(t, err)
		must(t, apply(ctx, c, sluice.ReplaceAllString(images.Replace(string(text)), "image: sluice:previous")))
	}
	waitForRollout(ctx, t, c, system, "sluice")
	waitForRollout(ctx, t, c, proxies, "mitmproxy")

	nodes := append([]string{home}, others...)
	var pods []*corev1.Pod
	for i, name := range nodes {
		p := newPod(fmt.Sprintf("updated-%d", i), namespace, capture, requestLoop(urls(ctx, t, c)[0]), "")
		onNodeNamed(p, name)
		must(t, client(c).Create(ctx, p))
		pods = append(pods, p)
	}
	for _, p := range pods {
		waitForRequests(ctx, t, c, p.Name)
	}
	for _, next := range []struct{ file, namespace, name string }{
		{"sluice.yaml", system, "sluice"}, {"mitmproxy/mitmproxy.yaml", proxies, "mitmproxy"},
	} {
		must(t, applyFile(ctx, c, next.file))
		waitForRollout(ctx, t, c, next.namespace, next.name)
		for _, p := range pods {
			waitForRequests(ctx, t, c, p.Name)
		}
		waitForState(ctx, t, c, namespace+"/"+pods[0].Name, "captured")
		checkRequests(ctx, t, c, pods[0].Name, true)
	}
	endRequests(ctx, t, c, pods...)
}

// requestLoop is a shell script that sends requests to the server one after the other, and logs each. Their path is not
// that of the requests that checkRequests counts.
func requestLoop(url string) string {
	return "while sleep 0.2; do timeout 120 wget -q -O- " + url + "index.html || echo failed; done"
}

// waitForRequests waits until a pod with a requestLoop has logged more responses than now.
func waitForRequests(ctx context.Context, t *testing.T, c *envconf.Config, pod string) {
	t.Helper()
	waitFor(ctx, t, pod+" runs", func() (bool, error) { return running(ctx, c, pod), nil })
	responses := func() int { return strings.Count(logs(ctx, t, c, namespace, pod), "hello\n") }
	before := responses()
	waitFor(ctx, t, pod+" has three responses more", func() (bool, error) { return responses() >= before+3, nil })
}

// endRequests deletes pods with a requestLoop, whose requests go on and must all have been answered.
func endRequests(ctx context.Context, t *testing.T, c *envconf.Config, pods ...*corev1.Pod) {
	t.Helper()
	for _, p := range pods {
		waitForRequests(ctx, t, c, p.Name)
		if log := logs(ctx, t, c, namespace, p.Name); strings.Contains(log, "failed") {
			t.Errorf("requests of %s have failed:\n%s", p.Name, log)
		}
		must(t, client(c).Delete(ctx, p))
	}
}

// onNodeNamed makes a pod of newPod run on any node, whatever its taints.
func onNodeNamed(p *corev1.Pod, node string) {
	p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
}

// oldPodRestarts changes the configuration while the old pods stay. A container of one that restarts has the
// configuration of its pod.
func oldPodRestarts(ctx context.Context, t *testing.T, c *envconf.Config) {
	// In a rolling update the controller replaces a pod that is not ready at once.
	rolling := regexp.MustCompile(`type: RollingUpdate\n +rollingUpdate:\n +maxSurge: 1\n +maxUnavailable: 0`)
	onDelete := func(values ...string) string {
		return rolling.ReplaceAllString(render(ctx, t, values...), "type: OnDelete")
	}
	must(t, apply(ctx, c, onDelete()))
	waitForRollout(ctx, t, c, system, "sluice")
	name, err := only(ctx, c, system, daemonPods)
	must(t, err)
	var p corev1.Pod
	must(t, client(c).Get(ctx, name, system, &p))
	must(t, apply(ctx, c, onDelete("config.late.timeout=77s")))
	_, err = node(ctx, "pkill -9 -x sluiced")
	must(t, err)
	waitForRestart(ctx, t, c, &p)
	config, err := node(ctx, fmt.Sprintf(
		"cat /var/lib/kubelet/pods/%s/volumes/kubernetes.io~projected/config/config.yaml", p.UID))
	if err != nil || config == "" || strings.Contains(config, "77s") {
		t.Errorf("the old pod has the configuration %q, %v", config, err)
	}
	must(t, applyFile(ctx, c, "sluice.yaml"))
	waitForRollout(ctx, t, c, system, "sluice")
}
