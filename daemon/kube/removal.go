package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	appslisters "k8s.io/client-go/listers/apps/v1"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/sluice-cni/sluice/daemon/config"
)

// longWatch is the time in seconds for which the API server is asked to keep a watch open. It checks the rights of a
// watch when the watch begins. So this one still shows the end of the DaemonSet when the ServiceAccount and its role
// have been deleted before. Without a wish the API server ends a watch after five to ten minutes.
var longWatch int64 = 365 * 24 * 60 * 60

// owner is the view of the DaemonSet of this daemon's pod.
type owner struct {
	config.Name
	daemonSets appslisters.DaemonSetLister
	namespaces listers.NamespaceLister
	synced     []cache.InformerSynced
}

// FollowDaemonSet keeps the view of the DaemonSet of this daemon's pod, for Removed. The caller calls it before Run.
func (n *Node) FollowDaemonSet(name config.Name) {
	factory := func(namespace, name string) informers.SharedInformerFactory {
		return n.factory(namespace, func(o *metav1.ListOptions) {
			o.FieldSelector = selectName(name)
			o.TimeoutSeconds = &longWatch
		})
	}
	sets := factory(name.Namespace, name.Name).Apps().V1().DaemonSets()
	namespaces := factory(metav1.NamespaceAll, name.Namespace).Core().V1().Namespaces()
	n.owner = &owner{
		Name: name, daemonSets: sets.Lister(), namespaces: namespaces.Lister(),
		synced: []cache.InformerSynced{sets.Informer().HasSynced, namespaces.Informer().HasSynced},
	}
}

func selectName(name string) string {
	return fields.OneTermEqualSelector("metadata.name", name).String()
}

// named lists the object of that name.
func named(name string) metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: selectName(name)}
}

// Removed returns the reason for which sluice is being removed from this node for good: its namespace or its DaemonSet
// is being deleted, or the DaemonSet does not select the node, or tolerate its taints, any more. The reason is empty if
// sluice stays: the DaemonSet makes a new pod for the node. First it looks at the watches, which know the answer while
// the API server is away, and after the daemon has lost its rights. If these say that sluice stays it asks the API
// server, because a watch may lag behind kubelet. The error means that it is not known.
func (n *Node) Removed(ctx context.Context) (reason string, err error) {
	if n.owner == nil {
		return "", nil
	}
	if reason := n.ownerSeen(); reason != "" {
		return reason, nil
	}
	if reason, err = n.askOwner(ctx); err != nil {
		return "", fmt.Errorf("asking whether DaemonSet %s/%s remains: %w", n.owner.Namespace, n.owner.Name.Name, err)
	}
	return reason, nil
}

// ownerSeen returns the reason for the removal as the watches show it.
func (n *Node) ownerSeen() string {
	for _, synced := range n.owner.synced {
		if !synced() {
			return ""
		}
	}
	ns, _ := n.owner.namespaces.Get(n.owner.Namespace)                               // nil if it is gone
	ds, _ := n.owner.daemonSets.DaemonSets(n.owner.Namespace).Get(n.owner.Name.Name) // the same
	node, _ := n.nodes.Get(n.name)                                                   // nil if not known yet, too
	return n.removal(ns, ds, node)
}

// askOwner returns the reason for the removal as the API server knows it. It lists instead of getting: an empty list
// says that an object is gone, and "not found" may come from a server that does not know the resource yet.
func (n *Node) askOwner(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	namespaces, err := n.client.CoreV1().Namespaces().List(ctx, named(n.owner.Namespace))
	if err != nil {
		return "", err
	}
	sets, err := n.client.AppsV1().DaemonSets(n.owner.Namespace).List(ctx, named(n.owner.Name.Name))
	if err != nil {
		return "", err
	}
	node, err := n.askNode(ctx)
	if err != nil {
		return "", err
	}
	return n.removal(first(namespaces.Items), first(sets.Items), node), nil
}

func first[T any](items []T) *T {
	if len(items) == 0 {
		return nil
	}
	return &items[0]
}

// removal judges the state of the API server's objects; nil is an object that is gone. A node that is gone is no
// reason: kubelet registers it again.
func (n *Node) removal(ns *corev1.Namespace, ds *appsv1.DaemonSet, node *corev1.Node) string {
	switch {
	case ns == nil || ns.DeletionTimestamp != nil:
		return fmt.Sprintf("namespace %s is being deleted", n.owner.Namespace)
	case ds == nil || ds.DeletionTimestamp != nil:
		return fmt.Sprintf("DaemonSet %s/%s is being deleted", n.owner.Namespace, n.owner.Name.Name)
	case node != nil && !selects(ds, node):
		return fmt.Sprintf("DaemonSet %s/%s does not select node %s any more", ds.Namespace, ds.Name, node.Name)
	case node != nil:
		if taint := n.newlyUntolerated(ds, node); taint != "" {
			return fmt.Sprintf("DaemonSet %s/%s does not tolerate taint %s of node %s any more",
				ds.Namespace, ds.Name, taint, node.Name)
		}
	}
	return ""
}

// newlyUntolerated returns the key of a taint of node that a pod of ds on this node tolerates, and the pods that ds
// makes now do not. Taints that this daemon's own pod does not tolerate do not count, since most come and go by
// themselves. Those of Kubernetes itself do not either: the DaemonSet controller adds tolerations for them to its pods.
func (n *Node) newlyUntolerated(ds *appsv1.DaemonSet, node *corev1.Node) (key string) {
	pods, _ := n.pods.Pods(ds.Namespace).List(labels.Everything()) // a list from the cache cannot fail
	for _, t := range node.Spec.Taints {
		isOfKubernetes := strings.HasPrefix(t.Key, "node.kubernetes.io/")
		if t.Effect == corev1.TaintEffectPreferNoSchedule || isOfKubernetes ||
			tolerates(ds.Spec.Template.Spec, &t) {
			continue
		}
		if slices.ContainsFunc(pods, func(p *corev1.Pod) bool {
			by := metav1.GetControllerOf(p)
			return by != nil && by.Kind == "DaemonSet" && by.Name == ds.Name && tolerates(p.Spec, &t)
		}) {
			return t.Key
		}
	}
	return ""
}

func tolerates(spec corev1.PodSpec, t *corev1.Taint) bool {
	const compare = true // the operators Lt and Gt; API servers without them accept none
	return corev1helpers.TolerationsTolerateTaint(klog.Background(), spec.Tolerations, t, compare)
}

// selects reports whether the nodeSelector and the affinity of ds admit node. An affinity that cannot be parsed admits
// it.
func selects(ds *appsv1.DaemonSet, node *corev1.Node) bool {
	pod := &corev1.Pod{Spec: ds.Spec.Template.Spec}
	matches, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
	return err != nil || matches
}

// Runtime returns the name of the node's container runtime, such as containerd, or "" if it is not known.
func (n *Node) Runtime() string {
	node, err := n.nodes.Get(n.name)
	if err != nil {
		return ""
	}
	name, _, _ := strings.Cut(node.Status.NodeInfo.ContainerRuntimeVersion, "://")
	return name
}
