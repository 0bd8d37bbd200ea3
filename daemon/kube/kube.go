// Package kube is the API server's view of one node: the node's pods, their namespaces, the pods of the upstream, and
// the node's taint. It keeps the view by watches, and sends a request of its own only for a pod that they have not
// shown yet.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	core "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// apiTimeout bounds one lookup or patch at the API server. It is shorter than the time that the plugin waits for the
// daemon's answer (attach.Timeout).
const apiTimeout = 3 * time.Second

// Node is the view of one node.
type Node struct {
	name      string
	client    kubernetes.Interface
	upstream  config.Upstream
	selected  config.Namespaces
	log       *slog.Logger
	factories []informers.SharedInformerFactory
	synced    []cache.InformerSynced
	changed   chan struct{}
	relabeled chan struct{} // as changed, for KeepOptedIn

	pods       listers.PodLister
	namespaces listers.NamespaceLister
	services   listers.ServiceLister // the upstream's service only; nil unless the configuration names one
	nodes      listers.NodeLister    // this node only
	owner      *owner                // nil unless FollowDaemonSet was called
	taint      taintState

	broadcaster record.EventBroadcaster
	events      record.EventRecorder
}

// New makes the view of the node with that name. It is empty until Run.
func New(client kubernetes.Interface, node string, conf config.Config, log *slog.Logger) (*Node, error) {
	up := conf.Upstream
	n := &Node{name: node, client: client, upstream: up, selected: conf.Capture.Namespaces, log: log}
	n.changed, n.relabeled = make(chan struct{}, 1), make(chan struct{}, 1)
	// The node object is not part of Synced and Changed: decisions do not depend on it.
	n.nodes = n.watch(metav1.NamespaceAll, "metadata.name", node).Nodes().Lister()
	pods := n.watch(metav1.NamespaceAll, "spec.nodeName", node).Pods()
	namespaces := n.watch(metav1.NamespaceAll, "", "").Namespaces()
	n.pods, n.namespaces = pods.Lister(), namespaces.Lister()
	informed := []cache.SharedIndexInformer{pods.Informer(), namespaces.Informer()}
	if up.Service.Name != "" {
		services := n.watch(up.Service.Namespace, "metadata.name", up.Service.Name).Services()
		n.services = services.Lister()
		informed = append(informed, services.Informer())
	}
	for _, i := range informed {
		n.synced = append(n.synced, i.HasSynced)
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { n.notifyChanged() },
			UpdateFunc: func(any, any) { n.notifyChanged() },
			DeleteFunc: func(any) { n.notifyChanged() },
		}); err != nil {
			return nil, fmt.Errorf("watching the API server: %w", err)
		}
	}
	n.broadcaster = record.NewBroadcaster()
	n.events = n.broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "sluiced", Host: node})
	return n, nil
}

// watch makes an informer factory for the objects in namespace that have the value in field; an empty field matches
// all. Each kind of object has its own factory, because a factory applies one field selector to everything.
func (n *Node) watch(namespace, field, value string) core.Interface {
	return n.factory(namespace, func(o *metav1.ListOptions) {
		if field != "" {
			o.FieldSelector = fields.OneTermEqualSelector(field, value).String()
		}
	}).Core().V1()
}

// factory makes an informer factory that Run starts.
func (n *Node) factory(namespace string, tweak func(*metav1.ListOptions)) informers.SharedInformerFactory {
	f := informers.NewSharedInformerFactoryWithOptions(n.client, 0, // no resync
		informers.WithNamespace(namespace), informers.WithTransform(strip), informers.WithTweakListOptions(tweak))
	n.factories = append(n.factories, f)
	return f
}

// strip saves memory: it keeps only the identity, the labels, the taints and the runtime of a node, and drops
// managedFields of other objects.
func strip(o any) (any, error) {
	if node, ok := o.(*corev1.Node); ok {
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{
				Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, Labels: node.Labels,
			},
			Spec: corev1.NodeSpec{Taints: node.Spec.Taints},
			Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{
				ContainerRuntimeVersion: node.Status.NodeInfo.ContainerRuntimeVersion,
			}},
		}, nil
	}
	if m, err := meta.Accessor(o); err == nil {
		m.SetManagedFields(nil)
	}
	return o, nil
}

// notifyChanged makes Changed and KeepOptedIn receive. Changes before the next receive become one.
func (n *Node) notifyChanged() {
	for _, to := range []chan struct{}{n.changed, n.relabeled} {
		select {
		case to <- struct{}{}:
		default:
		}
	}
}

// Run keeps the view up to date, and sends events, until ctx ends. It always returns nil.
func (n *Node) Run(ctx context.Context) error {
	events := n.client.CoreV1().Events(metav1.NamespaceAll)
	n.broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: events})
	defer n.broadcaster.Shutdown()
	for _, f := range n.factories {
		f.Start(ctx.Done())
	}
	if cache.WaitForCacheSync(ctx.Done(), n.synced...) {
		n.log.Info("the API server has listed the pods of this node", "node", n.name, "pods", len(n.scheduled()))
		n.notifyChanged()
	}
	<-ctx.Done()
	for _, f := range n.factories {
		f.Shutdown()
	}
	return nil
}

// Synced tells whether every watch, except that of the node itself, has shown its first list.
func (n *Node) Synced() bool {
	for _, synced := range n.synced {
		if !synced() {
			return false
		}
	}
	return true
}

// Ready returns an error, for the user, until the view is complete.
func (n *Node) Ready() error {
	if !n.Synced() {
		return errors.New("waiting for the API server to list the pods of this node")
	}
	return nil
}

// Changed receives after pods, namespaces or the upstream's service have changed.
func (n *Node) Changed() <-chan struct{} { return n.changed }

// Cached returns the facts of a pod as the watches have shown them. The error is optin.ErrUnknown if they have not
// shown the pod or its namespace yet.
func (n *Node) Cached(pod attach.Pod) (optin.Facts, error) {
	p, err := n.pods.Pods(pod.Namespace).Get(pod.Name)
	if err != nil || !hasUID(p, pod.UID) {
		return optin.Facts{}, fmt.Errorf("%w: the API server has not listed pod %s on node %s",
			optin.ErrUnknown, pod, n.name)
	}
	ns, err := n.namespaces.Get(pod.Namespace)
	if err != nil {
		return optin.Facts{}, fmt.Errorf("%w: the API server has not listed namespace %s",
			optin.ErrUnknown, pod.Namespace)
	}
	return n.facts(p, ns)
}

// Pod returns the facts of a pod. If the watches have not shown them yet it gets the pod and its namespace from the API
// server, within apiTimeout: a new pod's sandbox can be ready before the watch shows the pod. The error is
// optin.ErrUnknown if that fails too.
func (n *Node) Pod(ctx context.Context, pod attach.Pod) (optin.Facts, error) {
	if facts, err := n.Cached(pod); err == nil {
		return facts, nil
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	p, err := n.client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil {
		return optin.Facts{}, fmt.Errorf("%w: getting pod %s: %w", optin.ErrUnknown, pod, err)
	}
	if !hasUID(p, pod.UID) {
		return optin.Facts{}, fmt.Errorf("%w: pod %s has been replaced: its UID is %s, not %s",
			optin.ErrUnknown, pod, p.UID, pod.UID)
	}
	ns, err := n.namespaces.Get(pod.Namespace)
	if err != nil {
		if ns, err = n.client.CoreV1().Namespaces().Get(ctx, pod.Namespace, metav1.GetOptions{}); err != nil {
			return optin.Facts{}, fmt.Errorf("%w: getting namespace %s: %w", optin.ErrUnknown, pod.Namespace, err)
		}
	}
	return n.facts(p, ns)
}

// hasUID tells whether p is the pod with that UID; an empty UID matches any pod, because not every runtime tells it.
// For a static pod kubelet gives the plugin a UID of its own making. The mirror pod at the API server has another UID,
// and kubelet's in an annotation.
func hasUID(p *corev1.Pod, uid string) bool {
	return uid == "" || string(p.UID) == uid || p.Annotations[corev1.MirrorPodAnnotationKey] == uid
}

func (n *Node) facts(p *corev1.Pod, ns *corev1.Namespace) (f optin.Facts, err error) {
	f = optin.Facts{
		Labels: p.Labels, Annotations: p.Annotations, Namespace: optin.NamespaceOf(n.selected, ns.Labels),
		Containers: containers(p),
	}
	if p.Spec.DNSConfig != nil {
		f.Resolvers = optin.ParseResolvers(p.Spec.DNSConfig.Nameservers)
	}
	if optin.Wanted(f) { // other pods are not captured anyway, and must not depend on the upstream's service
		f.Upstream, err = n.runsUpstream(p)
	}
	return f, err
}

// containers are the names of a pod's init containers and containers. A sidecar can be either.
func containers(p *corev1.Pod) []string {
	var names []string
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		names = append(names, c.Name)
	}
	return names
}

// Labels returns the labels of a pod, or nil if the watches have not shown it.
func (n *Node) Labels(pod attach.Pod) map[string]string {
	facts, err := n.Cached(pod)
	if err != nil {
		return nil
	}
	return facts.Labels
}

// Running lists the pods that run on this node, also while only their init containers do: their phase is Pending then,
// and they have an address. A pod is left out while its facts are not known yet.
func (n *Node) Running() []optin.Running {
	var running []optin.Running
	for _, p := range n.scheduled() {
		initializes := p.Status.Phase == corev1.PodPending && len(p.Status.PodIPs) > 0
		if p.Status.Phase != corev1.PodRunning && !initializes || p.DeletionTimestamp != nil {
			continue
		}
		pod := attach.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}
		facts, err := n.Cached(pod)
		if err != nil {
			continue
		}
		r := optin.Running{Pod: pod, IPs: addresses(p), HostNetwork: p.Spec.HostNetwork, Facts: facts}
		if p.Spec.RuntimeClassName != nil {
			r.RuntimeClass = *p.Spec.RuntimeClassName
		}
		running = append(running, r)
	}
	return running
}

// Terminating reports whether a pod of this node is being deleted and may still have containers.
func (n *Node) Terminating() bool {
	return slices.ContainsFunc(n.scheduled(), func(p *corev1.Pod) bool {
		ended := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
		return p.DeletionTimestamp != nil && !ended
	})
}

// RunningContainers returns the IDs of the containers of a pod that run, of any kind, by the pod's status.
func (n *Node) RunningContainers(podUID string) []string {
	var ids []string
	for _, p := range n.scheduled() {
		if !hasUID(p, podUID) {
			continue
		}
		s := p.Status
		for _, c := range slices.Concat(s.InitContainerStatuses, s.ContainerStatuses, s.EphemeralContainerStatuses) {
			if _, id, ok := strings.Cut(c.ContainerID, "://"); ok && c.State.Running != nil {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// addresses are the IP addresses of a pod.
func addresses(p *corev1.Pod) []netip.Addr {
	var all []netip.Addr
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			all = append(all, a)
		}
	}
	return all
}

// scheduled lists all pods that were scheduled to this node, in any phase.
func (n *Node) scheduled() []*corev1.Pod {
	pods, _ := n.pods.List(labels.Everything()) // a list from the cache cannot fail
	return pods
}

// Report makes an event on the pod, a warning or a normal one. It does nothing for a pod without a name.
func (n *Node) Report(pod attach.Pod, warning bool, reason, message string) {
	if pod.Name == "" {
		return
	}
	ref := &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID),
	}
	n.events.Event(ref, eventType(warning), reason, message)
}

func eventType(warning bool) string {
	if warning {
		return corev1.EventTypeWarning
	}
	return corev1.EventTypeNormal
}
