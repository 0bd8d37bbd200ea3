package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// policyBundle is the ConfigMap that the policy mounts, and fromPolicy the file in containers.
const (
	policyBundle = "sluice-ca-bundle"
	fromPolicy   = trustMount + "/bundle.crt"
)

// TestTrustPolicy is the story of a node whose container runtime has no NRI: a policy gives captured pods the CA.
func TestTrustPolicy(t *testing.T) {
	step(t, "sluice and the proxy run, and find no NRI", withoutNRI)
	step(t, "a captured pod waits for the ConfigMap, and then has the CA by its environment", trustedByPolicy)
	step(t, "the policy changes no other pods, and no variables that are there", changedByPolicy)
	step(t, "the policy is removed", policyRemoved)
}

// withoutNRI deploys sluice with the policy, and with a socket of NRI that is not there. TLS is always inspected.
func withoutNRI(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, apply(ctx, c, render(ctx, t, "trustPolicy=v1beta1", "config.trust.tls=inspect",
		"config.trust.nriSocket=/run/sluice/no-nri.sock")))
	waitForRollout(ctx, t, c, system, "sluice")
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	waitFor(ctx, t, "the API server uses the policy", func() (bool, error) {
		p, err := dryRun(ctx, c, newPod("dry-run", namespace, capture, "", ""))
		return isAdjusted(p.Spec.Containers[0]), err
	})
}

// dryRun returns a pod as admission makes it.
func dryRun(ctx context.Context, c *envconf.Config, p *corev1.Pod) (*corev1.Pod, error) {
	err := client(c).Create(ctx, p, func(o *metav1.CreateOptions) { o.DryRun = []string{metav1.DryRunAll} })
	return p, err
}

// isAdjusted reports whether a container has the mount of the policy.
func isAdjusted(c corev1.Container) bool {
	return slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == trustMount })
}

// policyVariables are the variables that the policy adds to containers without any.
var policyVariables = []string{"DENO_CERT", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"}

// adjusted are the names of the variables of a container that name the policy's file, in order.
func adjusted(c corev1.Container) (names []string) {
	for _, v := range c.Env {
		if v.Value == fromPolicy {
			names = append(names, v.Name)
		}
	}
	slices.Sort(names)
	return names
}

func trustedByPolicy(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, client(c).Create(ctx, newPod("by-policy", namespace, capture, "sleep 86400", "sleep 0")))
	waitFor(ctx, t, "an event names the ConfigMap that is missing", func() (bool, error) {
		return hasEvent(ctx, c, "by-policy", "FailedMount", policyBundle)
	})
	var published corev1.ConfigMap
	must(t, client(c).Get(ctx, caObject, system, &published))
	store, err := inPod(ctx, c, namespace, "server", "cat", imageStore)
	must(t, err)
	must(t, client(c).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: policyBundle, Namespace: namespace},
		Data:       map[string]string{"bundle.crt": store + published.Data["ca.crt"]},
	}))
	waitFor(ctx, t, "the pod runs", func() (bool, error) { return running(ctx, c, "by-policy"), nil })
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(published.Data["ca.crt"]))
	waitFor(ctx, t, "the proxy has an intermediate below the root of this installation", func() (bool, error) {
		_, err := handshakeFrom(ctx, c, "by-policy", serverAddress(ctx, t, c), &tls.Config{RootCAs: roots})
		return err == nil, nil
	})
	for _, name := range policyVariables {
		wantTrusted(ctx, t, c, "by-policy", "c", "$"+name)
	}
	a, err := attachment(ctx, c, namespace+"/by-policy")
	if err != nil || a.Trust != "unknown" || !strings.Contains(strings.Join(a.Notes, " "), "no NRI socket") {
		t.Errorf("got the status %+v, %v; want the trust unknown, because there is no NRI", a, err)
	}
	// The policy reaches no store of the image.
	if out, err := inPod(ctx, c, namespace, "by-policy", "cat", imageStore); err != nil || out != store {
		t.Errorf("the store of the image has changed, %v", err)
	}
}

func changedByPolicy(ctx context.Context, t *testing.T, c *envconf.Config) {
	optOut := map[string]string{"sluice.dev/capture": "false"}
	off := newPod("dry-run", namespace, capture, "", "")
	off.Annotations = map[string]string{"sluice.dev/ca": "off"}
	onHost := newPod("dry-run", namespace, capture, "", "")
	onHost.Spec.HostNetwork = true
	for name, pod := range map[string]*corev1.Pod{
		"a pod without the label":        newPod("dry-run", namespace, nil, "", "sleep 0"),
		"a pod that opts out of capture": newPod("dry-run", namespace, optOut, "", ""),
		"a pod that opts out of the CA":  off,
		"a pod on the host's network":    onHost,
		"a pod of an excluded namespace": newPod("dry-run", "kube-system", capture, "", ""),
	} {
		p, err := dryRun(ctx, c, pod)
		must(t, err)
		for _, container := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			if isAdjusted(container) || adjusted(container) != nil {
				t.Errorf("%s is changed: %+v", name, container)
			}
		}
	}
	for _, test := range []struct {
		has  []string
		want []string
	}{
		{nil, policyVariables},
		{[]string{"SSL_CERT_FILE", "OTHER"}, []string{"DENO_CERT", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE"}},
		{[]string{"SSL_CERT_DIR", "CURL_CA_BUNDLE"}, []string{"DENO_CERT", "NODE_EXTRA_CA_CERTS"}},
		{policyVariables, nil},
	} {
		pod := newPod("dry-run", namespace, capture, "", "sleep 0")
		for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for _, name := range test.has {
				list[0].Env = append(list[0].Env, corev1.EnvVar{Name: name, Value: "own"})
			}
		}
		p, err := dryRun(ctx, c, pod)
		must(t, err)
		for _, container := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			got := adjusted(container)
			if !slices.Equal(got, test.want) || !isAdjusted(container) || len(container.Env) != len(got)+len(test.has) {
				t.Errorf("a container with %q: got %q, want %q; %+v", test.has, got, test.want, container)
			}
		}
	}
}

func policyRemoved(ctx context.Context, t *testing.T, c *envconf.Config) {
	objects := strings.SplitAfter(render(ctx, t, "trustPolicy=v1beta1"), "---\n")
	objects = slices.DeleteFunc(objects, func(o string) bool { return !strings.Contains(o, "kind: MutatingAdmission") })
	if len(objects) != 2 {
		t.Fatalf("the policy and its binding are %d objects", len(objects))
	}
	must(t, remove(ctx, c, strings.Join(objects, "")))
	must(t, applyFile(ctx, c, "sluice.yaml"))
	must(t, client(c).Delete(ctx, newPod("by-policy", namespace, nil, "", "")))
	must(t, client(c).Delete(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: policyBundle, Namespace: namespace},
	}))
	must(t, deleteFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, deleteNamespace(ctx, c, proxies))
	waitForRollout(ctx, t, c, system, "sluice")
}
