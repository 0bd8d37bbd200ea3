// Package e2e holds the tests of sluice on a Kubernetes cluster, whichever the kubeconfig names: the node that
// integration/cluster brings up, or kind. The images sluice:e2e, mitmproxy:e2e and tools:e2e must be on its nodes,
// of which there is one.
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

// flowFile is where the proxy records its flows.
const flowFile = "/tmp/flows"

// images replaces those of the manifests by those that were built here, and lets the proxy record its flows.
var images = strings.NewReplacer("image: sluice:0.1.0", "image: sluice:e2e", "image: mitmproxy/mitmproxy:8.1.1", "image: mitmproxy:e2e",
	"image: busybox:1.36", "image: tools:e2e",
	"- --scripts=/etc/sluice/sluice.py", "- --scripts=/etc/sluice/sluice.py\n            - --save-stream-file="+flowFile)

// fixtures are a server, which logs who asks, a look at the node's own files, and a pod that is older than sluice.
const fixtures = `
apiVersion: v1
kind: Namespace
metadata: {name: sluice-e2e}
---
apiVersion: v1
kind: Pod
metadata: {name: server, namespace: sluice-e2e}
spec:
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
          echo hello | tee index.html wait-init-container wait-init-container-proceed wait-post-start wait-native-sidecar
          exec httpd -f -vv -p 80
---
apiVersion: v1
kind: Pod
metadata: {name: older, namespace: sluice-e2e}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - {name: c, image: "tools:e2e", imagePullPolicy: IfNotPresent, command: [sleep, "86400"]}
---
apiVersion: v1
kind: Pod
metadata: {name: node, namespace: sluice-e2e}
spec:
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

// original is the network configuration before sluice came.
var original string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	if os.Getenv("KUBECONFIG") == "" {
		fmt.Fprintln(os.Stderr, "KUBECONFIG names no cluster: `make e2e` brings one up")
		return 1
	}
	suite = env.NewWithConfig(envconf.NewWithKubeConfig(os.Getenv("KUBECONFIG")))
	suite.Setup(func(ctx context.Context, c *envconf.Config) (context.Context, error) {
		if err := apply(ctx, c, fixtures); err != nil {
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
		return ctx, eventually(ctx, "sluice is ready", func() (bool, error) { return rolledOut(ctx, c, system, "sluice") })
	})
	suite.Finish(func(ctx context.Context, c *envconf.Config) (context.Context, error) {
		return ctx, errors.Join(setTaints(ctx, c), deleteFile(ctx, c, "mitmproxy/mitmproxy.yaml"), deleteFile(ctx, c, "sluice.yaml"), remove(ctx, c, fixtures))
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

// apply makes objects, or changes them, as kubectl apply --server-side does.
func apply(ctx context.Context, c *envconf.Config, manifest string, options ...decoder.DecodeOption) error {
	force := func(o *metav1.PatchOptions) { o.FieldManager, o.Force = "e2e", new(true) }
	return decoder.DecodeEach(ctx, strings.NewReader(manifest), func(ctx context.Context, o k8s.Object) error {
		data, err := json.Marshal(o)
		if err != nil {
			return err
		}
		return eventually(ctx, "apply "+o.GetName(), func() (bool, error) {
			err := client(c).Patch(ctx, o, k8s.Patch{PatchType: types.ApplyPatchType, Data: data}, force)
			if apierrors.IsForbidden(err) { // its namespace's service account is on its way
				return false, nil
			}
			return true, err
		})
	}, options...)
}

func remove(ctx context.Context, c *envconf.Config, manifest string, options ...decoder.DecodeOption) error {
	return decoder.DecodeEach(ctx, strings.NewReader(manifest), decoder.DeleteIgnoreNotFound(client(c)), options...)
}

// eventually waits for cond, as long as anything here takes.
func eventually(ctx context.Context, what string, cond func() (bool, error)) error {
	return within(ctx, 3*time.Minute, what, cond)
}

func within(ctx context.Context, patience time.Duration, what string, cond func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
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
			return fmt.Errorf("it never happened: %s", what)
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

// only is the one pod of a DaemonSet.
func only(ctx context.Context, c *envconf.Config, namespace, selector string) (string, error) {
	var pods corev1.PodList
	if err := client(c).WithNamespace(namespace).List(ctx, &pods, resources.WithLabelSelector(selector)); err != nil {
		return "", err
	}
	for _, p := range pods.Items {
		if p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning {
			return p.Name, nil
		}
	}
	return "", fmt.Errorf("no pod %s runs in %s", selector, namespace)
}

// newPod is a pod that runs a script, in its first init container if it has one.
func newPod(name, namespace string, labels map[string]string, script string, init string) *corev1.Pod {
	zero := int64(0)
	container := func(name, script string) corev1.Container {
		return corev1.Container{Name: name, Image: "tools:e2e", ImagePullPolicy: corev1.PullIfNotPresent, Command: []string{"sh", "-c", script}}
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: labels},
		Spec:       corev1.PodSpec{TerminationGracePeriodSeconds: &zero, Containers: []corev1.Container{container("c", script)}},
	}
	if init != "" {
		p.Spec.InitContainers = []corev1.Container{container("init", init)}
	}
	return p
}
