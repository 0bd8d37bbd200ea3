// Package e2e tests sluice on the Kubernetes cluster that KUBECONFIG names: the node of integration/cluster, or kind.
// Its nodes must have the images sluice:e2e, mitmproxy:e2e and tools:e2e. Daemon and proxy run on all nodes, and the
// pods of the tests on the first node that takes ordinary pods, unless a test is about the others.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/e2e-framework/klient/decoder"
	"sigs.k8s.io/e2e-framework/klient/k8s"
	"sigs.k8s.io/e2e-framework/klient/k8s/resources"
	"sigs.k8s.io/e2e-framework/pkg/env"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

const (
	system    = "sluice-system"
	proxies   = "mitmproxy"
	namespace = "sluice-e2e"
)

var (
	suite    env.Environment
	deployed = filepath.Join("..", "..", "..", "deploy")
)

// flowFile is the file in which the proxy records its flows.
const flowFile = "/tmp/flows"

const addonArgument = "- --scripts=/etc/sluice/sluice.py"

// images replaces the images in the manifests by the ones that the tests have built, and makes the proxy record its
// flows.
var images = strings.NewReplacer(
	"image: localhost/sluice:0.1.0", "image: sluice:e2e",
	"image: mitmproxy/mitmproxy:12.3.1", "image: mitmproxy:e2e",
	"image: busybox:1.36", "image: tools:e2e",
	addonArgument, addonArgument+"\n            - --save-stream-file="+flowFile,
)

// fixtures are the pods server (an HTTP server that logs requests), older (a pod that is older than sluice) and node
// (gives access to files of the node).
const fixtures = `
apiVersion: v1
kind: Namespace
metadata: {name: sluice-e2e}
---
apiVersion: v1
kind: Pod
metadata: {name: server, namespace: sluice-e2e}
spec:
  nodeSelector: {kubernetes.io/hostname: HOME}
  terminationGracePeriodSeconds: 0
  containers:
    - name: c
      image: tools:e2e
      imagePullPolicy: IfNotPresent
      command:
        - sh
        - -c
        - |
          mkdir /w && cd /w
          echo hello | tee index.html \
            wait-init-container wait-init-container-proceed wait-post-start wait-native-sidecar
          exec httpd -f -vv -p 80
---
apiVersion: v1
kind: Pod
metadata: {name: older, namespace: sluice-e2e}
spec:
  nodeSelector: {kubernetes.io/hostname: HOME}
  terminationGracePeriodSeconds: 0
  containers:
    - {name: c, image: "tools:e2e", imagePullPolicy: IfNotPresent, command: [sleep, "86400"]}
---
apiVersion: v1
kind: Pod
metadata: {name: node, namespace: sluice-e2e}
spec:
  nodeSelector: {kubernetes.io/hostname: HOME}
  terminationGracePeriodSeconds: 0
  hostNetwork: true
  containers:
    - name: c
      image: tools:e2e
      imagePullPolicy: IfNotPresent
      command: [sleep, "86400"]
      volumeMounts:
        - {name: cni, mountPath: /cni}
        - {name: run, mountPath: /run/sluice}
        - {name: netns, mountPath: /run/netns, mountPropagation: HostToContainer}
  volumes:
    - {name: cni, hostPath: {path: /etc/cni/net.d}}
    - {name: run, hostPath: {path: /run/sluice, type: DirectoryOrCreate}}
    - {name: netns, hostPath: {path: /run/netns}}
`

// original is the network configuration before the installation of sluice.
var original string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	if os.Getenv("KUBECONFIG") == "" {
		fmt.Fprintln(os.Stderr, "KUBECONFIG is not set: run the tests with `make e2e`, which starts a node for them")
		return 1
	}
	suite = env.NewWithConfig(envconf.NewWithKubeConfig(os.Getenv("KUBECONFIG")))
	suite.Setup(func(ctx context.Context, c *envconf.Config) (context.Context, error) {
		if err := findNodes(ctx, c); err != nil {
			return ctx, err
		}
		if err := apply(ctx, c, strings.ReplaceAll(fixtures, "HOME", home)); err != nil {
			return ctx, err
		}
		if err := eventually(ctx, "the fixtures run", func() (bool, error) {
			return running(ctx, c, "server") && running(ctx, c, "node") && running(ctx, c, "older"), nil
		}); err != nil {
			return ctx, err
		}
		var err error
		if original, err = inPod(ctx, c, namespace, "node", "sh", "-c", "cat /cni/*.conflist"); err != nil {
			return ctx, err
		}
		if err := applyFile(ctx, c, "sluice.yaml"); err != nil {
			return ctx, err
		}
		return ctx, eventually(ctx, "sluice is ready", func() (bool, error) {
			return rolledOut(ctx, c, system, "sluice")
		})
	})
	suite.Finish(func(ctx context.Context, c *envconf.Config) (context.Context, error) {
		return ctx, errors.Join(
			setTaints(ctx, c),
			deleteFile(ctx, c, "mitmproxy/mitmproxy.yaml"),
			deleteFile(ctx, c, "sluice.yaml"),
			remove(ctx, c, fixtures),
		)
	})
	return suite.Run(m)
}

func applyFile(ctx context.Context, c *envconf.Config, name string) error {
	text, err := os.ReadFile(filepath.Join(deployed, name))
	if err != nil {
		return err
	}
	return apply(ctx, c, images.Replace(string(text)))
}

func deleteFile(ctx context.Context, c *envconf.Config, name string) error {
	text, err := os.ReadFile(filepath.Join(deployed, name))
	if err != nil {
		return err
	}
	return remove(ctx, c, string(text))
}

func client(c *envconf.Config) *resources.Resources { return c.Client().Resources() }

// mergePatch is a JSON merge patch.
func mergePatch(data string) k8s.Patch {
	return k8s.Patch{PatchType: types.MergePatchType, Data: []byte(data)}
}

// daemonSet names a DaemonSet, for a patch.
func daemonSet(namespace, name string) *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}}
}

// apply creates or changes objects, as `kubectl apply --server-side` does.
func apply(ctx context.Context, c *envconf.Config, manifest string, options ...decoder.DecodeOption) error {
	force := func(o *metav1.PatchOptions) { o.FieldManager, o.Force = "e2e", new(true) }
	return decoder.DecodeEach(ctx, strings.NewReader(manifest), func(ctx context.Context, o k8s.Object) error {
		data, err := json.Marshal(o)
		if err != nil {
			return err
		}
		return eventually(ctx, "apply "+o.GetName(), func() (bool, error) {
			err := client(c).Patch(ctx, o, k8s.Patch{PatchType: types.ApplyPatchType, Data: data}, force)
			if apierrors.IsForbidden(err) { // the service account of a new namespace does not exist yet
				return false, nil
			}
			return true, err
		})
	}, options...)
}

func remove(ctx context.Context, c *envconf.Config, manifest string, options ...decoder.DecodeOption) error {
	return decoder.DecodeEach(ctx, strings.NewReader(manifest), decoder.DeleteIgnoreNotFound(client(c)), options...)
}

// waitFor waits for cond, and ends the test if cond fails or does not become true. wanted describes it.
func waitFor(ctx context.Context, t *testing.T, wanted string, cond func() (bool, error)) {
	t.Helper()
	must(t, eventually(ctx, wanted, cond))
}

// waitForRollout waits until all pods of a DaemonSet are current and ready.
func waitForRollout(ctx context.Context, t *testing.T, c *envconf.Config, namespace, name string) {
	t.Helper()
	waitFor(ctx, t, "the DaemonSet "+name+" is rolled out", func() (bool, error) {
		return rolledOut(ctx, c, namespace, name)
	})
}

// eventually waits for cond, with a timeout that is long enough for every test here.
func eventually(ctx context.Context, wanted string, cond func() (bool, error)) error {
	return within(ctx, 3*time.Minute, wanted, cond)
}

// within waits for cond with a timeout. An error of cond ends it at once.
func within(ctx context.Context, timeout time.Duration, wanted string, cond func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := cond()
		if ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("timed out waiting for: %s", wanted)
		}
	}
}

func running(ctx context.Context, c *envconf.Config, name string) bool {
	var p corev1.Pod
	return client(c).Get(ctx, name, namespace, &p) == nil && p.Status.Phase == corev1.PodRunning
}

func rolledOut(ctx context.Context, c *envconf.Config, namespace, name string) (bool, error) {
	var d appsv1.DaemonSet
	if err := client(c).Get(ctx, name, namespace, &d); err != nil {
		return false, err
	}
	s := d.Status
	return s.ObservedGeneration == d.Generation && s.DesiredNumberScheduled > 0 &&
		s.UpdatedNumberScheduled == s.DesiredNumberScheduled && s.NumberReady == s.DesiredNumberScheduled, nil
}

func inPod(ctx context.Context, c *envconf.Config, namespace, pod string, command ...string) (string, error) {
	var out, errs bytes.Buffer
	if err := client(c).ExecInPod(ctx, namespace, pod, "", command, &out, &errs); err != nil {
		return "", fmt.Errorf("%s in %s/%s: %w\n%s%s", command, namespace, pod, err, out.String(), errs.String())
	}
	return out.String(), nil
}

// only returns the name of the running pod on the node home that a label selector selects.
func only(ctx context.Context, c *envconf.Config, namespace, selector string) (string, error) {
	return onlyOn(ctx, c, home, namespace, selector)
}

// onlyOn does the same on any node.
func onlyOn(ctx context.Context, c *envconf.Config, node, namespace, selector string) (string, error) {
	var pods corev1.PodList
	if err := client(c).WithNamespace(namespace).List(ctx, &pods, resources.WithLabelSelector(selector)); err != nil {
		return "", err
	}
	for _, p := range pods.Items {
		if p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning && p.Spec.NodeName == node {
			return p.Name, nil
		}
	}
	return "", fmt.Errorf("no pod %s of %s runs on %s", selector, namespace, node)
}

// newPod creates a pod for the node home that runs the shell script script and, if init is not empty, an init container
// that runs init.
func newPod(name, namespace string, labels map[string]string, script string, init string) *corev1.Pod {
	zero := int64(0)
	container := func(name, script string) corev1.Container {
		return corev1.Container{
			Name: name, Image: "tools:e2e", ImagePullPolicy: corev1.PullIfNotPresent,
			Command: []string{"sh", "-c", script},
		}
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: labels},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &zero, Containers: []corev1.Container{container("c", script)},
			NodeSelector: map[string]string{corev1.LabelHostname: home},
		},
	}
	if init != "" {
		p.Spec.InitContainers = []corev1.Container{container("init", init)}
	}
	return p
}
