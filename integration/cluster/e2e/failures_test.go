package e2e

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// restartNode is the environment variable with the command that restarts a node; {} in it is the node's name.
const restartNode = "E2E_RESTART_NODE"

// TestNodeFailures is the story of a cluster with two nodes, one of which fails.
func TestNodeFailures(t *testing.T) {
	if os.Getenv(restartNode) == "" || len(others) == 0 {
		t.Skipf("%s is not set, or the cluster has one node: `make e2e-kind` has what it takes", restartNode)
	}
	step(t, "a daemon that hangs is replaced, and the other node does not notice", hangingDaemon)
	step(t, "a node is restarted, and the first connections of its pods wait for the proxy", rebootedNode)
}

// hangingDaemon stops the daemon of the node home.
func hangingDaemon(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, applyFile(ctx, c, "sluice.yaml"))
	waitForRollout(ctx, t, c, system, "sluice")
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	here := newPod("here", namespace, capture, requestLoop(urls(ctx, t, c)[0]), "")
	there := newPod("there", namespace, capture, requestLoop(urls(ctx, t, c)[0]), "")
	onNodeNamed(there, others[0])
	for _, p := range []*corev1.Pod{here, there} {
		must(t, client(c).Create(ctx, p))
		waitForRequests(ctx, t, c, p.Name)
	}
	name, err := only(ctx, c, system, daemonPods)
	must(t, err)
	var daemon corev1.Pod
	must(t, client(c).Get(ctx, name, system, &daemon))
	_, err = node(ctx, "pkill -STOP -x sluiced")
	must(t, err)
	waitForRequests(ctx, t, c, "there")
	waitForRestart(ctx, t, c, &daemon)
	endRequests(ctx, t, c, here, there)
}

// rebootedNode restarts the node home. A pod of another node is the server, because the addresses of the pods change.
func rebootedNode(ctx context.Context, t *testing.T, c *envconf.Config) {
	server := newPod("server-there", namespace, nil,
		"mkdir /w && cd /w && echo hello > index.html && exec httpd -f -vv -p 80", "")
	onNodeNamed(server, others[0])
	must(t, client(c).Create(ctx, server))
	waitFor(ctx, t, "the server runs", func() (bool, error) { return running(ctx, c, server.Name), nil })
	must(t, client(c).Get(ctx, server.Name, namespace, server))
	url := "http://" + server.Status.PodIP + "/"
	served := func() int { return strings.Count(logs(ctx, t, c, namespace, server.Name), "url:/\n") }

	p := newPod("rebooted", namespace, capture, "wget -q -O- "+url+"; sleep 86400", "")
	must(t, client(c).Create(ctx, p))
	waitFor(ctx, t, "the pod's request is served", func() (bool, error) { return served() == 1, nil })
	must(t, client(c).Get(ctx, p.Name, namespace, p))

	words := strings.Fields(strings.ReplaceAll(os.Getenv(restartNode), "{}", home))
	if out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("restarting %s: %v\n%s", home, err, out)
	}
	waitForRestart(ctx, t, c, p)
	waitForRollout(ctx, t, c, system, "sluice")
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	waitForState(ctx, t, c, namespace+"/"+p.Name, "captured")
	waitFor(ctx, t, "its second request is served", func() (bool, error) { return served() == 2, nil })
	waitFor(ctx, t, "the proxy, which has been restarted too, has logged the second request", func() (bool, error) {
		return proxyRequestsOn(ctx, t, c, home, url) == 1, nil
	})
	waitFor(ctx, t, "the fixtures run", func() (bool, error) {
		return running(ctx, c, "server") && running(ctx, c, "node"), nil
	})
	for _, name := range []string{p.Name, server.Name} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}}
		must(t, client(c).Delete(ctx, pod))
	}
}

// waitForRestart waits until the container of p, which describes the pod before that, has been restarted and is ready.
func waitForRestart(ctx context.Context, t *testing.T, c *envconf.Config, p *corev1.Pod) {
	t.Helper()
	before := p.Status.ContainerStatuses[0].RestartCount
	waitFor(ctx, t, p.Name+" is ready after a restart", func() (bool, error) {
		err := client(c).Get(ctx, p.Name, p.Namespace, p)
		return err == nil && p.Status.ContainerStatuses[0].RestartCount > before && isPodReady(p), err
	})
}
