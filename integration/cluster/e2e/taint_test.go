package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

var (
	sluiceTaint  = corev1.Taint{Key: "sluice.dev/not-ready", Effect: corev1.TaintEffectNoSchedule}
	foreignTaint = corev1.Taint{Key: "example.com/foreign", Value: "x", Effect: corev1.TaintEffectPreferNoSchedule}
)

// taintPatch returns a merge patch that gives a node exactly these taints.
func taintPatch(taints ...corev1.Taint) string {
	patch, _ := json.Marshal(map[string]any{"spec": map[string]any{"taints": taints}}) // taints have a JSON form
	return string(patch)
}

// setTaints gives each node these taints, after those of its own.
func setTaints(ctx context.Context, c *envconf.Config, taints ...corev1.Taint) error {
	for name, own := range ownTaints {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := client(c).Patch(ctx, n, mergePatch(taintPatch(slices.Concat(own, taints)...))); err != nil {
			return err
		}
	}
	return nil
}

// hasTaints tells whether each node has these taints, after those of its own, and no others.
func hasTaints(ctx context.Context, c *envconf.Config, want ...corev1.Taint) (bool, error) {
	for name, own := range ownTaints {
		var n corev1.Node
		err := client(c).Get(ctx, name, "", &n)
		if err != nil || !slices.Equal(n.Spec.Taints, slices.Concat(own, want)) {
			return false, err
		}
	}
	return true, nil
}

// countTainted counts the nodes that have the taint of sluice, whatever others they have.
func countTainted(ctx context.Context, c *envconf.Config) (count int, err error) {
	for name := range ownTaints {
		var n corev1.Node
		if err := client(c).Get(ctx, name, "", &n); err != nil {
			return 0, err
		}
		if slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == sluiceTaint.Key }) {
			count++
		}
	}
	return count, nil
}

// createPodKeptOff creates a pod that the taint keeps off its node.
func createPodKeptOff(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	must(t, client(c).Create(ctx, newPod("kept-off", namespace, nil, "sleep 86400", "")))
	waitFor(ctx, t, "the scheduler finds no node for the pod because of a taint", func() (bool, error) {
		var p corev1.Pod
		err := client(c).Get(ctx, "kept-off", namespace, &p)
		return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse &&
				strings.Contains(c.Message, "untolerated taint")
		}), err
	})
}

// wantPodAdmitted checks that the daemon removes its taint and no other. Then the pod of createPodKeptOff must run.
func wantPodAdmitted(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	waitFor(ctx, t, "no node has the taint of sluice, and each has the foreign one", func() (bool, error) {
		return hasTaints(ctx, c, foreignTaint)
	})
	waitFor(ctx, t, "the pod that was kept off runs", func() (bool, error) { return running(ctx, c, "kept-off"), nil })
	must(t, client(c).Delete(ctx, newPod("kept-off", namespace, nil, "", "")))
}

// placeDaemonSet makes a DaemonSet run its pods on all nodes, or on no node.
func placeDaemonSet(ctx context.Context, t *testing.T, c *envconf.Config, namespace, name string, onNodes bool) {
	t.Helper()
	value := `"x"`
	if onNodes {
		value = "null"
	}
	placed := fmt.Sprintf(`{"spec":{"template":{"spec":{"nodeSelector":{"nowhere":%s}}}}}`, value)
	must(t, client(c).Patch(ctx, daemonSet(namespace, name), mergePatch(placed)))
}

// taintReturns renders the manifests with late.taintAfter, and leaves sluice with them.
func taintReturns(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, apply(ctx, c, render(ctx, t, "config.late.taintAfter=2s")))
	waitForRollout(ctx, t, c, system, "sluice")
	placeDaemonSet(ctx, t, c, proxies, "mitmproxy", false)
	waitFor(ctx, t, "each node has the taint of sluice again, after the foreign one", func() (bool, error) {
		return hasTaints(ctx, c, foreignTaint, sluiceTaint)
	})
	n, err := getNode(ctx, c)
	must(t, err)
	waitFor(ctx, t, "an event on the node gives the reason", func() (bool, error) {
		return hasEventIn(ctx, c, metav1.NamespaceDefault, n.Name, "SluiceNodeTainted", "no proxy is connected")
	})
	createPodKeptOff(ctx, t, c)
	placeDaemonSet(ctx, t, c, proxies, "mitmproxy", true)
	wantPodAdmitted(ctx, t, c)
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
}

// ownNodeOnly patches nodes with tokens of the daemon's service account, as an attacker would with a stolen token.
func ownNodeOnly(ctx context.Context, t *testing.T, c *envconf.Config) {
	admin, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	must(t, err)
	as := func(bound *authenticationv1.BoundObjectReference) kubernetes.Interface {
		token, err := admin.CoreV1().ServiceAccounts(system).CreateToken(ctx, "sluice", &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound},
		}, metav1.CreateOptions{})
		must(t, err)
		config := rest.AnonymousClientConfig(c.Client().RESTConfig())
		config.BearerToken = token.Status.Token
		k, err := kubernetes.NewForConfig(config)
		must(t, err)
		return k
	}
	name, err := only(ctx, c, system, daemonPods)
	must(t, err)
	var pod corev1.Pod
	must(t, client(c).Get(ctx, name, system, &pod))
	bound := as(&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: name, UID: pod.UID})
	unbound := as(nil)
	own, other := pod.Spec.NodeName, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	must(t, client(c).Create(ctx, other))
	defer func() { must(t, client(c).Delete(context.WithoutCancel(ctx), other)) }()
	tainted := func(taints ...corev1.Taint) string { return taintPatch(slices.Concat(ownTaints[own], taints)...) }
	evicting := corev1.Taint{Key: sluiceTaint.Key, Effect: corev1.TaintEffectNoExecute}
	another := corev1.Taint{Key: "a", Effect: corev1.TaintEffectNoSchedule}
	type attempt struct {
		name    string
		by      kubernetes.Interface
		node    string
		patch   string
		refusal string // empty: the patch is allowed
	}
	attempts := []attempt{
		{"pod's token, taint of its node", bound, own, tainted(foreignTaint, sluiceTaint), ""},
		{
			"pod's token, taint of another node", bound, other.Name, taintPatch(sluiceTaint),
			"its pod runs on, and no other",
		},
		{
			"token without a pod, taint of the node", unbound, own, tainted(foreignTaint, sluiceTaint),
			"the token names no node",
		},
		{
			"token without a pod, taint of another node", unbound, other.Name, taintPatch(sluiceTaint),
			"the token names no node",
		},
		{"taint that evicts", bound, own, tainted(foreignTaint, evicting), "no other effect than NoSchedule"},
		{"another taint", bound, own, tainted(foreignTaint, another), "not-ready, and no other"},
		{"removal of the foreign taint", bound, own, tainted(), "not-ready, and no other"},
		{"cordon", bound, own, `{"spec":{"unschedulable":true}}`, "no more of a node's spec"},
		{"new label", bound, own, `{"metadata":{"labels":{"a":"b"}}}`, "no label"},
		{"removal of a label", bound, own, `{"metadata":{"labels":{"kubernetes.io/os":null}}}`, "no label"},
		{"removal of all annotations", bound, own, `{"metadata":{"annotations":null}}`, "no annotation"},
		{
			"finalizer", bound, own, `{"metadata":{"finalizers":["a.example/b"]}}`,
			"nothing else of a node's metadata",
		},
	}
	n, err := getNode(ctx, c)
	must(t, err)
	if n.Spec.ProviderID == "" { // a cloud's provider ID is protected by the API server, before any policy
		const patch = `{"spec":{"providerID":"a"}}`
		attempts = append(attempts, attempt{"provider ID", bound, own, patch, "no more of a node's spec"})
	}
	for _, tc := range attempts {
		nodes := tc.by.CoreV1().Nodes()
		_, err := nodes.Patch(ctx, tc.node, types.MergePatchType, []byte(tc.patch), metav1.PatchOptions{})
		if tc.refusal == "" {
			if err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
		} else if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), tc.refusal) {
			t.Errorf("%s: got %v, want it forbidden with %q", tc.name, err, tc.refusal)
		}
	}
	waitFor(ctx, t, "the daemon has removed its taint again", func() (bool, error) {
		return hasTaints(ctx, c, foreignTaint)
	})
}
