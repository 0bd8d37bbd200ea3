package kube

import (
	"log/slog"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// owned is the view of a node "here" whose daemon belongs to the DaemonSet sluice-system/sluice. It selects nodes with
// the label pool=a.
func owned(t *testing.T, objects ...runtime.Object) (*Node, *fake.Clientset) {
	t.Helper()
	client := fake.NewClientset(objects...)
	n, err := New(client, "here", config.Config{Upstream: address}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	n.FollowDaemonSet(config.Name{Namespace: "sluice-system", Name: "sluice"})
	start(t, n)
	return n, client
}

func daemonSet(change func(*appsv1.DaemonSet)) *appsv1.DaemonSet {
	ds := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "sluice-system", Name: "sluice"}}
	ds.Spec.Template.Spec.NodeSelector = map[string]string{"pool": "a"}
	if change != nil {
		change(ds)
	}
	return ds
}

func nodeIn(pool string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here", Labels: map[string]string{"pool": pool}}}
}

const noExecute = corev1.TaintEffectNoExecute

func taintedBy(key string, effect corev1.TaintEffect) *corev1.Node {
	n := nodeIn("a")
	n.Spec.Taints = []corev1.Taint{{Key: key, Effect: effect}}
	return n
}

// daemonOf is a pod of a DaemonSet on the node that tolerates these taints; "" is all of them.
func daemonOf(set string, tolerated ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "sluice-system", Name: set + "-x", UID: "1",
		OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: set, Controller: new(true)}},
	}}
	for _, key := range tolerated {
		p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{
			Key: key, Operator: corev1.TolerationOpExists,
		})
	}
	return p
}

// notIn is the affinity to nodes that are not in a pool.
func notIn(pool string) *corev1.Affinity {
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: "pool", Operator: corev1.NodeSelectorOpNotIn, Values: []string{pool}},
			}}},
		},
	}}
}

func TestRemoved(t *testing.T) {
	t.Parallel()
	now := metav1.Now()
	system := namespace("sluice-system", nil)
	ending := namespace("sluice-system", nil)
	ending.DeletionTimestamp, ending.Finalizers = &now, []string{"kubernetes"}
	for _, tc := range []struct {
		name    string
		objects []runtime.Object
		want    string // a part of the reason; empty: sluice stays
	}{
		{"all is as it was", []runtime.Object{system, daemonSet(nil), nodeIn("a")}, ""},
		{"the namespace is being deleted", []runtime.Object{ending, daemonSet(nil), nodeIn("a")}, "namespace"},
		{"the namespace is gone", []runtime.Object{daemonSet(nil), nodeIn("a")}, "namespace"},
		{"the DaemonSet is gone", []runtime.Object{system, nodeIn("a")}, "is being deleted"},
		{"the DaemonSet is deleted in the foreground", []runtime.Object{system, daemonSet(func(d *appsv1.DaemonSet) {
			d.DeletionTimestamp, d.Finalizers = &now, []string{metav1.FinalizerDeleteDependents}
		}), nodeIn("a")}, "is being deleted"},
		{
			"the node has left the nodeSelector", []runtime.Object{system, daemonSet(nil), nodeIn("b")},
			"does not select",
		},
		{"the affinity excludes the node", []runtime.Object{system, daemonSet(func(d *appsv1.DaemonSet) {
			d.Spec.Template.Spec.Affinity = notIn("a")
		}), nodeIn("a")}, "does not select"},
		{"the affinity excludes other nodes", []runtime.Object{system, daemonSet(func(d *appsv1.DaemonSet) {
			d.Spec.Template.Spec.Affinity = notIn("b")
		}), nodeIn("a")}, ""},
		{"the node is gone", []runtime.Object{system, daemonSet(nil)}, ""},
		{"the node has a taint that was never tolerated", []runtime.Object{
			system, daemonSet(nil), taintedBy("k", noExecute), daemonOf("sluice"),
		}, ""},
		{"a taint is not tolerated any more", []runtime.Object{
			system, daemonSet(nil), taintedBy("k", noExecute), daemonOf("sluice", "k"),
		}, "does not tolerate taint k"},
		{"a taint that does not evict is not tolerated any more", []runtime.Object{
			system, daemonSet(nil), taintedBy("k", corev1.TaintEffectNoSchedule), daemonOf("sluice", ""),
		}, "does not tolerate taint k"},
		{"a taint that keeps no pod off is not tolerated any more", []runtime.Object{
			system, daemonSet(nil), taintedBy("k", corev1.TaintEffectPreferNoSchedule), daemonOf("sluice", ""),
		}, ""},
		{"a taint is still tolerated", []runtime.Object{system, daemonSet(func(d *appsv1.DaemonSet) {
			d.Spec.Template.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		}), taintedBy("k", noExecute), daemonOf("sluice", "k")}, ""},
		{"the node is cordoned, which the DaemonSet controller lets its pods tolerate", []runtime.Object{
			system, daemonSet(nil), taintedBy(corev1.TaintNodeUnschedulable, corev1.TaintEffectNoSchedule),
			daemonOf("sluice", corev1.TaintNodeUnschedulable),
		}, ""},
		{"a pod of another DaemonSet tolerates a taint", []runtime.Object{
			system, daemonSet(nil), taintedBy("k", noExecute), daemonOf("other", "k"),
		}, ""},
		{"the pod template is another one", []runtime.Object{system, daemonSet(func(d *appsv1.DaemonSet) {
			d.Generation, d.Spec.Template.Annotations = 7, map[string]string{"checksum/config": "x"}
		}), nodeIn("a")}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n, _ := owned(t, tc.objects...)
			got, err := n.Removed(t.Context())
			if err != nil || (got == "") != (tc.want == "") || !strings.Contains(got, tc.want) {
				t.Errorf("got %q, %v; want a reason with %q", got, err, tc.want)
			}
		})
	}
}

// TestRemovedWithoutAnswers: the watches have shown the end of the DaemonSet, or not, and the API server answers
// nothing by now, as after the ServiceAccount has been deleted.
func TestRemovedWithoutAnswers(t *testing.T) {
	t.Parallel()
	for _, deleted := range []bool{false, true} {
		n, client := owned(t, namespace("sluice-system", nil), daemonSet(nil), nodeIn("a"))
		sets := client.AppsV1().DaemonSets("sluice-system")
		if deleted {
			if err := sets.Delete(t.Context(), "sluice", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			testbed.Eventually(t, "the watch shows it", func() bool { return n.ownerSeen() != "" })
		}
		client.PrependReactor("list", "*", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewUnauthorized("the ServiceAccount is gone")
		})
		got, err := n.Removed(t.Context())
		if (got != "") != deleted || (err != nil) == deleted {
			t.Errorf("the DaemonSet was deleted before: %t: got %q, %v", deleted, got, err)
		}
	}
}

// TestRemovedBeforeTheWatch: the watch lags behind, and the API server knows better.
func TestRemovedBeforeTheWatch(t *testing.T) {
	t.Parallel()
	n, client := owned(t, namespace("sluice-system", nil), daemonSet(nil), nodeIn("a"))
	client.PrependReactor("list", "daemonsets", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, &appsv1.DaemonSetList{}, nil
	})
	if got, err := n.Removed(t.Context()); err != nil || !strings.Contains(got, "DaemonSet sluice-system/sluice") {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestRemovedOutsideOfADaemonSet: a daemon that belongs to none never removes itself.
func TestRemovedOutsideOfADaemonSet(t *testing.T) {
	t.Parallel()
	n, _ := newNode(t, address)
	if got, err := n.Removed(t.Context()); got != "" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}
