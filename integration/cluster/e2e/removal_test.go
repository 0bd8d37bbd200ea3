package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/e2e-framework/klient/k8s"
	"sigs.k8s.io/e2e-framework/klient/k8s/resources"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// removal is a way to remove sluice from the node.
type removal struct {
	name   string
	remove func(ctx context.Context, t *testing.T, c *envconf.Config)
	// helm: sluice is installed by `helm install`, and not by `kubectl apply`.
	helm bool
	// tainted: the proxy is gone for longer than late.taintAfter before the removal.
	tainted bool
}

var removals = []removal{
	{name: "kubectl delete -f", remove: func(ctx context.Context, t *testing.T, c *envconf.Config) {
		kubectl(ctx, t, "delete", "-f", "deploy/sluice.yaml")
	}},
	{name: "the DaemonSet alone", remove: func(ctx context.Context, t *testing.T, c *envconf.Config) {
		kubectl(ctx, t, "delete", "-n", system, "daemonset/sluice")
	}},
	{name: "the DaemonSet, in the foreground", remove: func(ctx context.Context, t *testing.T, c *envconf.Config) {
		kubectl(ctx, t, "delete", "-n", system, "daemonset/sluice", "--cascade=foreground")
	}},
	{name: "the DaemonSet, then its rights", remove: func(ctx context.Context, t *testing.T, c *envconf.Config) {
		kubectl(ctx, t, "delete", "-n", system, "daemonset/sluice")
		deleteRights(ctx, t, c)
	}},
	{name: "the rights, then the DaemonSet", remove: func(ctx context.Context, t *testing.T, c *envconf.Config) {
		deleteRights(ctx, t, c)
		kubectl(ctx, t, "delete", "-n", system, "daemonset/sluice")
	}},
	{name: "the namespace first", remove: func(ctx context.Context, t *testing.T, c *envconf.Config) {
		kubectl(ctx, t, "delete", "namespace", system)
		kubectl(ctx, t, "delete", "--ignore-not-found", "-f", "deploy/sluice.yaml")
	}},
	{name: "helm uninstall", helm: true, remove: func(ctx context.Context, t *testing.T, c *envconf.Config) {
		program(ctx, t, "bin/tools/helm", "uninstall", "sluice", "-n", system)
	}},
	{name: "the nodeSelector leaves the node", remove: func(ctx context.Context, t *testing.T, c *envconf.Config) {
		placeDaemonSet(ctx, t, c, system, "sluice", false)
	}},
	{name: "the node loses the label that the nodeSelector selects", remove: nodeLosesLabel},
	{name: "the DaemonSet, after the proxy", tainted: true, remove: func(
		ctx context.Context, t *testing.T, c *envconf.Config,
	) {
		kubectl(ctx, t, "delete", "-n", system, "daemonset/sluice")
	}},
	{name: "the API server goes down before the daemon ends", remove: removeWithoutAPIServer},
}

// daemonLogs are the logs of the daemon's containers on the node.
const daemonLogs = "/var/log/pods/" + system + "_sluice-*/sluiced/*.log"

// TestRemoval removes sluice from the node in different ways. Afterwards the node has none of it, and its pods work:
// those that were captured, and new ones.
func TestRemoval(t *testing.T) {
	step(t, "the proxy runs", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	})
	for i, r := range removals {
		step(t, "sluice is removed: "+r.name, func(ctx context.Context, t *testing.T, c *envconf.Config) {
			checkRemoval(ctx, t, c, r, i)
		})
	}
	step(t, "sluice stays if its daemon ends for another reason", staysInstalled)
	step(t, "CNI folders that belong to another user need a capability more", foreignFolders)
}

func checkRemoval(ctx context.Context, t *testing.T, c *envconf.Config, r removal, run int) {
	installSluice(ctx, t, c, r.helm)
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	before := newPod(fmt.Sprintf("before-%d", run), namespace, capture, "sleep 86400", "")
	must(t, client(c).Create(ctx, before))
	waitFor(ctx, t, "the pod is captured", func() (bool, error) {
		a, err := attachment(ctx, c, namespace+"/"+before.Name)
		return a.State == "captured" && running(ctx, c, before.Name), err
	})
	checkRequests(ctx, t, c, before.Name, true)
	if r.tainted {
		taintByLateProxy(ctx, t, c)
	}

	r.remove(ctx, t, c)
	waitFor(ctx, t, "no daemon is left", func() (bool, error) {
		out, err := node(ctx, "pgrep -f '^sluiced run' | wc -l")
		return strings.TrimSpace(out) == "0", err
	})
	text, err := inPod(ctx, c, namespace, "node", "sh", "-c", "cat /cni/*.conflist")
	must(t, err)
	if text != original {
		t.Errorf("the network configuration is\n%s\nand was\n%s", text, original)
	}
	left, err := node(ctx, "ls -d /opt/cni/bin/sluice /var/lib/sluice/* /run/sluice/attachments/* "+
		"/run/sluice/trust/ca.pem /run/sluice/trust/reports 2>/dev/null; true")
	must(t, err)
	if left != "" {
		t.Errorf("files of sluice remain on the node:\n%s", left)
	}
	waitFor(ctx, t, "no node has the taint of sluice", func() (bool, error) {
		count, err := countTainted(ctx, c)
		return count == 0, err
	})
	check := func(pod string) { checkRequests(ctx, t, c, pod, false) }
	if r.tainted { // there is no proxy whose log could be counted, or that could answer
		check = func(pod string) { wantAnswer(ctx, t, c, pod, urls(ctx, t, c)[0]) }
		defer placeDaemonSet(ctx, t, c, proxies, "mitmproxy", true)
	}
	check(before.Name)
	for name, labels := range map[string]map[string]string{"after": capture, "after-plain": nil} {
		after := newPod(fmt.Sprintf("%s-%d", name, run), namespace, labels, "sleep 86400", "")
		must(t, client(c).Create(ctx, after))
		waitFor(ctx, t, "a new pod runs", func() (bool, error) { return running(ctx, c, after.Name), nil })
		check(after.Name)
		must(t, client(c).Delete(ctx, after))
	}
	must(t, client(c).Delete(ctx, before))
	waitFor(ctx, t, "the pod that was captured can be deleted", func() (bool, error) {
		return !running(ctx, c, before.Name), nil
	})
}

// taintByLateProxy removes the proxy, so that the daemon taints the node, and would taint it again.
func taintByLateProxy(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	must(t, apply(ctx, c, render(ctx, t, "config.late.taintAfter=2s")))
	waitForRollout(ctx, t, c, system, "sluice")
	placeDaemonSet(ctx, t, c, proxies, "mitmproxy", false)
	waitFor(ctx, t, "each node has the taint of sluice", func() (bool, error) {
		count, err := countTainted(ctx, c)
		return count == len(ownTaints), err
	})
}

// installSluice installs sluice, whatever of it is left in the cluster.
func installSluice(ctx context.Context, t *testing.T, c *envconf.Config, helm bool) {
	t.Helper()
	if helm {
		must(t, deleteFile(ctx, c, "sluice.yaml"))
		must(t, deleteNamespace(ctx, c, system))
		kubectl(ctx, t, "create", "namespace", system)
		kubectl(ctx, t, "label", "namespace", system, "pod-security.kubernetes.io/enforce=privileged")
		program(ctx, t, "bin/tools/helm", "install", "sluice", "deploy/chart", "-n", system,
			"--set", "image.repository=sluice,image.tag=e2e")
	} else {
		must(t, applyFile(ctx, c, "sluice.yaml"))
		placeDaemonSet(ctx, t, c, system, "sluice", true)
	}
	waitForRollout(ctx, t, c, system, "sluice")
}

// deleteRights deletes the daemon's ServiceAccount, and what gives it rights.
func deleteRights(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	name := metav1.ObjectMeta{Name: "sluice"}
	inSystem := metav1.ObjectMeta{Name: "sluice", Namespace: system}
	for _, o := range []k8s.Object{
		&corev1.ServiceAccount{ObjectMeta: inSystem}, &rbacv1.RoleBinding{ObjectMeta: inSystem},
		&rbacv1.Role{ObjectMeta: inSystem}, &rbacv1.ClusterRoleBinding{ObjectMeta: name},
		&rbacv1.ClusterRole{ObjectMeta: name},
	} {
		must(t, client(c).Delete(ctx, o))
	}
}

// nodeLosesLabel makes the DaemonSet select the node by a label, and then takes the label from the node.
func nodeLosesLabel(ctx context.Context, t *testing.T, c *envconf.Config) {
	n, err := getNode(ctx, c)
	must(t, err)
	must(t, client(c).Patch(ctx, n, mergePatch(`{"metadata":{"labels":{"nowhere":"x"}}}`)))
	placeDaemonSet(ctx, t, c, system, "sluice", false) // on nodes with that label
	waitForRollout(ctx, t, c, system, "sluice")
	must(t, client(c).Patch(ctx, n, mergePatch(`{"metadata":{"labels":{"nowhere":null}}}`)))
}

// removeWithoutAPIServer deletes the DaemonSet and leaves its pod. The pod ends when the API server is down.
func removeWithoutAPIServer(ctx context.Context, t *testing.T, c *envconf.Config) {
	kubectl(ctx, t, "delete", "-n", system, "daemonset/sluice", "--cascade=orphan")
	withStoppedAPIServer(ctx, t, c, func() {
		_, err := node(ctx, "pkill -TERM -f '^sluiced run'")
		must(t, err)
		// kubelet restarts the container of a pod that it has not been told to delete, and the daemon installs again.
		waitFor(ctx, t, "the daemon has removed sluice", func() (bool, error) {
			out, err := node(ctx, "cat "+daemonLogs)
			return strings.Contains(out, "sluice is removed from this node"), err
		})
	})
	var pods corev1.PodList
	must(t, client(c).WithNamespace(system).List(ctx, &pods, resources.WithLabelSelector(daemonPods)))
	for _, p := range pods.Items {
		must(t, client(c).Delete(ctx, &p))
	}
}

// withStoppedAPIServer calls do while the API server is down.
func withStoppedAPIServer(ctx context.Context, t *testing.T, c *envconf.Config, do func()) {
	t.Helper()
	stopServerAlone(ctx, t, c)
	started := false
	defer func() {
		if !started { // the test has failed
			_, _ = nodeNamed(context.WithoutCancel(ctx), apiServerNode, startAPIServer)
		}
	}()
	do()
	started = true
	startServerAlone(ctx, t, c)
	waitForControllers(ctx, t, c)
}

// staysInstalled ends daemons in ways that do not mean a removal: their logs say so, and a captured pod's connections
// wait or go through the proxy, and never around it.
func staysInstalled(ctx context.Context, t *testing.T, c *envconf.Config) {
	installSluice(ctx, t, c, false)
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	must(t, client(c).Create(ctx, newPod("stays", namespace, capture, "sleep 86400", "")))
	waitFor(ctx, t, "the pod is captured", func() (bool, error) {
		a, err := attachment(ctx, c, namespace+"/stays")
		return a.State == "captured" && running(ctx, c, "stays"), err
	})
	stopDaemon(ctx, t, c) // deletes its pod, as an eviction does
	out, err := node(ctx, "ls /opt/cni/bin/sluice; cat /etc/cni/net.d/*.conflist")
	if err != nil || !strings.Contains(out, `"type":"sluice"`) {
		t.Errorf("after the deletion of the daemon's pod, the node has: %v\n%s", err, out)
	}
	wantImageNeverPulled(ctx, t, c)
	startDaemon(ctx, t, c)
	checkRequests(ctx, t, c, "stays", true)
	withStoppedAPIServer(ctx, t, c, func() { // as a node that shuts down
		before, err := node(ctx, "pgrep -f '^sluiced run'")
		must(t, err)
		_, err = node(ctx, "pkill -TERM -f '^sluiced run'")
		must(t, err)
		waitFor(ctx, t, "kubelet has started another daemon", func() (bool, error) {
			now, err := node(ctx, "pgrep -f '^sluiced run' || true")
			return now != "" && now != before, err
		})
		out, err := node(ctx, "cat "+daemonLogs)
		must(t, err)
		removed := strings.Contains(out, "sluice is being removed from this node:")
		if removed || !strings.Contains(out, "it is not known whether sluice") {
			t.Errorf("the daemons of the pod have logged:\n%s", out)
		}
	})
	waitForRollout(ctx, t, c, system, "sluice")
	checkRequests(ctx, t, c, "stays", true)
	must(t, client(c).Delete(ctx, newPod("stays", namespace, nil, "", "")))
}

// wantImageNeverPulled checks that the status of a daemon's pod without its image says that kubelet pulls none.
func wantImageNeverPulled(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	waitFor(ctx, t, "the status of the pod names the image", func() (bool, error) {
		var pods corev1.PodList
		err := client(c).WithNamespace(system).List(ctx, &pods, resources.WithLabelSelector(daemonPods))
		for _, p := range pods.Items {
			for _, s := range p.Status.ContainerStatuses {
				w := s.State.Waiting
				if w != nil && w.Reason == "ErrImageNeverPull" && strings.Contains(w.Message, missingImage) {
					return true, nil
				}
			}
		}
		return false, err
	})
}

// foreignFolders gives the CNI folders to another user, as Kubespray does.
func foreignFolders(ctx context.Context, t *testing.T, c *envconf.Config) {
	const folders = "/etc/cni/net.d /opt/cni/bin"
	defer func() {
		_, err := node(context.WithoutCancel(ctx), "chown -R 0 "+folders)
		must(t, err)
	}()
	_, err := node(ctx, "chown -R 1000 "+folders+" && rm /opt/cni/bin/sluice") // the daemon would put it back at once
	must(t, err)
	must(t, apply(ctx, c, render(ctx, t, "config.trust.ca=off")))
	waitFor(ctx, t, "a daemon says why it does not install", func() (bool, error) {
		out, err := node(ctx, "cat "+daemonLogs)
		return strings.Contains(out, "belongs to user 1000, and sluiced may not write there"), err
	})
	must(t, apply(ctx, c, render(ctx, t, "config.trust.ca=off", "cni.otherOwner=true")))
	waitForRollout(ctx, t, c, system, "sluice")
	owners, err := node(ctx, "test -x /opt/cni/bin/sluice; grep -l sluice /etc/cni/net.d/* | xargs stat -c %u")
	if err != nil || owners != "1000\n" {
		t.Errorf("the owner of the network configuration: got %q, %v; want 1000", owners, err)
	}
	must(t, applyFile(ctx, c, "sluice.yaml"))
	waitForRollout(ctx, t, c, system, "sluice")
}

// kubectl runs kubectl in the repository. The node of integration/cluster has it beside the kubeconfig.
func kubectl(ctx context.Context, t *testing.T, args ...string) {
	t.Helper()
	path := filepath.Join(filepath.Dir(os.Getenv("KUBECONFIG")), "kubectl")
	if _, err := os.Stat(path); err != nil {
		path = "kubectl"
	}
	program(ctx, t, path, args...)
}

// program runs a program in the repository.
func program(ctx context.Context, t *testing.T, path string, args ...string) {
	t.Helper()
	command := exec.CommandContext(ctx, path, args...)
	command.Dir = filepath.Dir(deployed)
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", path, strings.Join(args, " "), err, out)
	}
}
