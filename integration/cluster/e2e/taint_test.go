package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/e2e-framework/klient/k8s"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

var (
	ours   = corev1.Taint{Key: "sluice.dev/not-ready", Effect: corev1.TaintEffectNoSchedule}
	theirs = corev1.Taint{Key: "example.com/theirs", Value: "x", Effect: corev1.TaintEffectPreferNoSchedule}
)

// theNode is the one that all of this runs on.
func theNode(ctx context.Context, c *envconf.Config) (*corev1.Node, error) {
	var p corev1.Pod
	if err := client(c).Get(ctx, "node", namespace, &p); err != nil {
		return nil, err
	}
	var n corev1.Node
	return &n, client(c).Get(ctx, p.Spec.NodeName, "", &n)
}

func tainting(taints ...corev1.Taint) []byte {
	patch, _ := json.Marshal(map[string]any{"spec": map[string]any{"taints": taints}}) // taints can always be written
	return patch
}

func setTaints(ctx context.Context, c *envconf.Config, taints ...corev1.Taint) error {
	n, err := theNode(ctx, c)
	if err != nil {
		return err
	}
	return client(c).Patch(ctx, n, k8s.Patch{PatchType: types.MergePatchType, Data: tainting(taints...)})
}

func hasTaints(ctx context.Context, c *envconf.Config, want ...corev1.Taint) (bool, error) {
	n, err := theNode(ctx, c)
	return err == nil && slices.Equal(n.Spec.Taints, want), err
}

// createKeptOff makes a pod that the taint keeps off the node.
func createKeptOff(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	must(t, client(c).Create(ctx, newPod("kept-off", namespace, nil, "sleep 86400", "")))
	must(t, eventually(ctx, "the scheduler has tried", func() (bool, error) {
		var p corev1.Pod
		err := client(c).Get(ctx, "kept-off", namespace, &p)
		return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, "untolerated taint")
		}), err
	}))
}

// wantLetIn wants that pod to run, because the daemon has taken the taint off and left theirs.
func wantLetIn(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	must(t, eventually(ctx, "the taint is taken off, and that alone", func() (bool, error) { return hasTaints(ctx, c, theirs) }))
	must(t, eventually(ctx, "the pod that it kept off runs", func() (bool, error) { return running(ctx, c, "kept-off"), nil }))
	must(t, client(c).Delete(ctx, newPod("kept-off", namespace, nil, "", "")))
}

// place lets a DaemonSet have its pods on the node, or nowhere.
func place(ctx context.Context, t *testing.T, c *envconf.Config, namespace, name string, there bool) {
	t.Helper()
	value := `"x"`
	if there {
		value = "null"
	}
	must(t, client(c).Patch(ctx, &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}}, k8s.Patch{
		PatchType: types.MergePatchType, Data: fmt.Appendf(nil, `{"spec":{"template":{"spec":{"nodeSelector":{"nowhere":%s}}}}}`, value),
	}))
}

// putBack leaves sluice with the manifests that it has made for this.
func putBack(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, apply(ctx, c, render(ctx, t, "config.late.taintAfter=2s")))
	must(t, eventually(ctx, "sluice is rolled out", func() (bool, error) { return rolledOut(ctx, c, system, "sluice") }))
	place(ctx, t, c, proxies, "mitmproxy", false)
	must(t, eventually(ctx, "the taint is back, behind theirs", func() (bool, error) { return hasTaints(ctx, c, theirs, ours) }))
	n, err := theNode(ctx, c)
	must(t, err)
	must(t, eventually(ctx, "an event on the node says why", func() (bool, error) {
		return toldIn(ctx, c, metav1.NamespaceDefault, n.Name, "SluiceNodeTainted", "no proxy is connected")
	}))
	createKeptOff(ctx, t, c)
	place(ctx, t, c, proxies, "mitmproxy", true)
	wantLetIn(ctx, t, c)
	must(t, eventually(ctx, "the proxy is back", func() (bool, error) { return rolledOut(ctx, c, proxies, "mitmproxy") }))
}

// ownNodeOnly uses tokens of the daemon's service account as somebody would who has stolen them.
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
	name, err := only(ctx, c, system, "app.kubernetes.io/name=sluice")
	must(t, err)
	var pod corev1.Pod
	must(t, client(c).Get(ctx, name, system, &pod))
	bound := as(&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: name, UID: pod.UID})
	unbound := as(nil)
	own, other := pod.Spec.NodeName, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	must(t, client(c).Create(ctx, other))
	defer func() { must(t, client(c).Delete(context.WithoutCancel(ctx), other)) }()
	evicting := corev1.Taint{Key: ours.Key, Effect: corev1.TaintEffectNoExecute}
	for _, tc := range []struct {
		says    string
		by      kubernetes.Interface
		node    string
		patch   []byte
		refusal string // "" for none
	}{
		{"a pod's token, the taint of its node", bound, own, tainting(theirs, ours), ""},
		{"a pod's token, the taint of another node", bound, other.Name, tainting(ours), "its pod runs on, and no other"},
		{"no pod's token, the taint of the node", unbound, own, tainting(theirs, ours), "the token names no node"},
		{"no pod's token, the taint of another node", unbound, other.Name, tainting(ours), "the token names no node"},
		{"a taint that evicts", bound, own, tainting(theirs, evicting), "no other effect than NoSchedule"},
		{"another taint", bound, own, tainting(theirs, corev1.Taint{Key: "a", Effect: corev1.TaintEffectNoSchedule}), "not-ready, and no other"},
		{"their taint away", bound, own, tainting(), "not-ready, and no other"},
		{"cordon", bound, own, []byte(`{"spec":{"unschedulable":true}}`), "no more of a node's spec"},
		{"the provider's ID", bound, own, []byte(`{"spec":{"providerID":"a"}}`), "no more of a node's spec"},
		{"a label", bound, own, []byte(`{"metadata":{"labels":{"a":"b"}}}`), "no label"},
		{"a label away", bound, own, []byte(`{"metadata":{"labels":{"kubernetes.io/os":null}}}`), "no label"},
		{"all annotations away", bound, own, []byte(`{"metadata":{"annotations":null}}`), "no annotation"},
		{"a finalizer", bound, own, []byte(`{"metadata":{"finalizers":["a.example/b"]}}`), "nothing else of a node's metadata"},
	} {
		_, err := tc.by.CoreV1().Nodes().Patch(ctx, tc.node, types.MergePatchType, tc.patch, metav1.PatchOptions{})
		if tc.refusal == "" {
			if err != nil {
				t.Errorf("%s: %v", tc.says, err)
			}
		} else if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), tc.refusal) {
			t.Errorf("%s: got %v, want it forbidden with %q", tc.says, err, tc.refusal)
		}
	}
	must(t, eventually(ctx, "the daemon has taken the taint off again", func() (bool, error) { return hasTaints(ctx, c, theirs) }))
}
