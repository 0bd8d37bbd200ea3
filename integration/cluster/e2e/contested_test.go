package e2e

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// undoing is a shell script that writes the network configuration without the plugin's entry as soon as it has one,
// until its file is gone. %s is the configuration, in base64.
const undoing = `touch /run/undoing
setsid sh -c 'while test -e /run/undoing; do
	f=$(grep -l "\"type\":\"sluice\"" /etc/cni/net.d/*.conflist) && echo %s | base64 -d >"$f"
	sleep 0.05
done' >/dev/null 2>&1 </dev/null &`

// contestTimeout bounds the wait until the daemon takes the installation to stand.
const contestTimeout = 6 * time.Minute

// TestContested is the story of a node on which another program wants the network configuration for itself.
func TestContested(t *testing.T) {
	t.Cleanup(func() { // in case that the test fails
		if _, err := node(context.Background(), "rm -f /run/undoing"); err != nil {
			t.Error(err)
		}
	})
	step(t, "a program that undoes the installation is reported, and pods are captured while they run", contested)
	step(t, "the node is ready again when the installation stands", contestEnds)
}

func contested(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, apply(ctx, c, render(ctx, t, "config.late.taintAfter=2s")))
	waitForRollout(ctx, t, c, system, "sluice")
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	waitFor(ctx, t, "the nodes have no taint", func() (bool, error) { return hasTaints(ctx, c) })
	_, err := node(ctx, fmt.Sprintf(undoing, base64.StdEncoding.EncodeToString([]byte(original))))
	must(t, err)
	waitFor(ctx, t, "an event on the node says that the installation is undone", func() (bool, error) {
		const message = "new pods are not captured when they start: "
		return hasEventIn(ctx, c, metav1.NamespaceDefault, home, "SluicePluginUndone", message)
	})
	waitFor(ctx, t, "the daemon is not ready, and its node has the taint", func() (bool, error) {
		s, err := status(ctx, c)
		if err != nil || !strings.Contains(s.NotReady, "undo") {
			return false, err
		}
		n, err := getNode(ctx, c)
		return slices.Contains(n.Spec.Taints, sluiceTaint), err
	})
	p := newPod("undone", namespace, capture, "sleep 86400", "")
	p.Spec.NodeName = home // past the scheduler, and so past the taint
	must(t, client(c).Create(ctx, p))
	waitForState(ctx, t, c, namespace+"/undone", "captured")
	waitFor(ctx, t, "the pod runs", func() (bool, error) { return running(ctx, c, "undone"), nil })
	checkRequests(ctx, t, c, "undone", true)
}

func contestEnds(ctx context.Context, t *testing.T, c *envconf.Config) {
	_, err := node(ctx, "rm /run/undoing")
	must(t, err)
	// The installation must stand for two minutes, after an interval of a minute at most.
	must(t, within(ctx, contestTimeout, "the installation stands", func() (bool, error) {
		s, err := status(ctx, c)
		return s.NotReady == "", err
	}))
	waitFor(ctx, t, "the nodes have no taint", func() (bool, error) { return hasTaints(ctx, c) })
	must(t, client(c).Delete(ctx, newPod("undone", namespace, nil, "", "")))
	// Without late.taintAfter before the proxy goes, which would taint the nodes.
	must(t, applyFile(ctx, c, "sluice.yaml"))
	waitForRollout(ctx, t, c, system, "sluice")
	must(t, deleteFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, deleteNamespace(ctx, c, proxies))
}
