// Package kube is what the API server says about one node: its pods, their namespaces, the upstream among them, and
// whether the node takes pods. It watches; it asks only for what the watches have not shown yet.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
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

// patience bounds one question to the API server. The plugin's own patience is longer (attach.Timeout).
const patience = 3 * time.Second

// Node is one node's view.
type Node struct {
	name      string
	client    kubernetes.Interface
	upstream  config.Upstream
	log       *slog.Logger
	factories []informers.SharedInformerFactory
	synced    []cache.InformerSynced
	changed   chan struct{}

	pods       listers.PodLister
	namespaces listers.NamespaceLister
	services   listers.ServiceLister // the upstream's alone
	nodes      listers.NodeLister    // this one alone

	broadcaster record.EventBroadcaster
	events      record.EventRecorder
}

// New makes the view of a node. It knows nothing until Run.
func New(client kubernetes.Interface, node string, up config.Upstream, log *slog.Logger) (*Node, error) {
	n := &Node{name: node, client: client, upstream: up, log: log, changed: make(chan struct{}, 1)}
	// Of the node itself nobody is told, and nobody waits for it: capture does not need it.
	n.nodes = n.watch(metav1.NamespaceAll, "metadata.name", node).Nodes().Lister()
	pods := n.watch(metav1.NamespaceAll, "spec.nodeName", node).Pods()
	namespaces := n.watch(metav1.NamespaceAll, "", "").Namespaces()
	n.pods, n.namespaces = pods.Lister(), namespaces.Lister()
	all := []cache.SharedIndexInformer{pods.Informer(), namespaces.Informer()}
	if up.Service.Name != "" {
		services := n.watch(up.Service.Namespace, "metadata.name", up.Service.Name).Services()
		n.services = services.Lister()
		all = append(all, services.Informer())
	}
	for _, i := range all {
		n.synced = append(n.synced, i.HasSynced)
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { n.note() },
			UpdateFunc: func(any, any) { n.note() },
			DeleteFunc: func(any) { n.note() },
		}); err != nil {
			return nil, fmt.Errorf("watching the API server: %w", err)
		}
	}
	n.broadcaster = record.NewBroadcaster()
	n.events = n.broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "sluiced", Host: node})
	return n, nil
}

// watch makes a factory of its own for each list: what chooses the objects of one fits no other.
func (n *Node) watch(namespace, field, value string) core.Interface {
	options := []informers.SharedInformerOption{informers.WithNamespace(namespace), informers.WithTransform(strip)}
	if field != "" {
		options = append(options, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(field, value).String()
		}))
	}
	f := informers.NewSharedInformerFactoryWithOptions(n.client, 0, options...)
	n.factories = append(n.factories, f)
	return f.Core().V1()
}

// strip drops what nobody here reads, and what may be large.
func strip(o any) (any, error) {
	if node, ok := o.(*corev1.Node); ok {
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion},
			Spec:       corev1.NodeSpec{Taints: node.Spec.Taints},
		}, nil
	}
	if m, err := meta.Accessor(o); err == nil {
		m.SetManagedFields(nil)
	}
	return o, nil
}

// note tells who listens on Changed; several changes may be one.
func (n *Node) note() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// Run watches until ctx ends.
func (n *Node) Run(ctx context.Context) error {
	n.broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: n.client.CoreV1().Events(metav1.NamespaceAll)})
	defer n.broadcaster.Shutdown()
	for _, f := range n.factories {
		f.Start(ctx.Done())
	}
	if cache.WaitForCacheSync(ctx.Done(), n.synced...) {
		n.log.Info("the API server's view of this node is here", "node", n.name, "pods", len(n.all()))
		n.note()
	}
	<-ctx.Done()
	for _, f := range n.factories {
		f.Shutdown()
	}
	return nil
}

// Synced tells whether everything that is watched has been seen once.
func (n *Node) Synced() bool {
	for _, synced := range n.synced {
		if !synced() {
			return false
		}
	}
	return true
}

// Ready reports that something has not been seen yet.
func (n *Node) Ready() error {
	if !n.Synced() {
		return errors.New("the API server has not shown this node's pods yet")
	}
	return nil
}

// Changed receives after something changed.
func (n *Node) Changed() <-chan struct{} { return n.changed }

// Cached is what the watches have shown of a pod.
func (n *Node) Cached(who attach.Pod) (optin.Pod, error) {
	p, err := n.pods.Pods(who.Namespace).Get(who.Name)
	if err != nil || !is(p, who.UID) {
		return optin.Pod{}, fmt.Errorf("%w: %s is not among the pods of node %s", optin.ErrUnknown, who, n.name)
	}
	ns, err := n.namespaces.Get(who.Namespace)
	if err != nil {
		return optin.Pod{}, fmt.Errorf("%w: namespace %s has not been seen", optin.ErrUnknown, who.Namespace)
	}
	return n.facts(p, ns)
}

// Pod is what is known of a pod; the API server is asked for what the watches have not shown yet.
func (n *Node) Pod(ctx context.Context, who attach.Pod) (optin.Pod, error) {
	if facts, err := n.Cached(who); err == nil {
		return facts, nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	p, err := n.client.CoreV1().Pods(who.Namespace).Get(ctx, who.Name, metav1.GetOptions{})
	if err != nil {
		return optin.Pod{}, fmt.Errorf("%w: asking for pod %s: %w", optin.ErrUnknown, who, err)
	}
	if !is(p, who.UID) {
		return optin.Pod{}, fmt.Errorf("%w: pod %s has the UID %s by now, not %s", optin.ErrUnknown, who, p.UID, who.UID)
	}
	ns, err := n.namespaces.Get(who.Namespace)
	if err != nil {
		if ns, err = n.client.CoreV1().Namespaces().Get(ctx, who.Namespace, metav1.GetOptions{}); err != nil {
			return optin.Pod{}, fmt.Errorf("%w: asking for namespace %s: %w", optin.ErrUnknown, who.Namespace, err)
		}
	}
	return n.facts(p, ns)
}

// is tells whether p is the pod with that UID. Of a static pod, kubelet tells the plugin the UID that it made
// itself; the mirror pod has another, and that one in an annotation.
func is(p *corev1.Pod, uid string) bool {
	return uid == "" || string(p.UID) == uid || p.Annotations[corev1.MirrorPodAnnotationKey] == uid
}

func (n *Node) facts(p *corev1.Pod, ns *corev1.Namespace) (f optin.Pod, err error) {
	f = optin.Pod{Labels: p.Labels, NamespaceLabels: ns.Labels, Annotations: p.Annotations}
	if optin.Wanted(f) { // of the others it does not matter
		f.Upstream, err = n.runsUpstream(p)
	}
	return f, err
}

// Labels are those of a pod, as far as the watches have shown it.
func (n *Node) Labels(who attach.Pod) map[string]string {
	facts, err := n.Cached(who)
	if err != nil {
		return nil
	}
	return facts.Labels
}

// Running lists the pods that run on this node.
func (n *Node) Running() []optin.Running {
	var running []optin.Running
	for _, p := range n.all() {
		if p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil {
			continue
		}
		r := optin.Running{Pod: attach.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}, HostNetwork: p.Spec.HostNetwork}
		var err error
		if r.Facts, err = n.Cached(r.Pod); err != nil {
			continue // its namespace will be seen
		}
		r.IPs = addresses(p)
		running = append(running, r)
	}
	return running
}

func addresses(p *corev1.Pod) []netip.Addr {
	var all []netip.Addr
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			all = append(all, a)
		}
	}
	return all
}

// all is every pod that was scheduled to this node.
func (n *Node) all() []*corev1.Pod {
	pods, _ := n.pods.List(labels.Everything()) // a list from the cache cannot fail
	return pods
}

// Report makes an event on the pod.
func (n *Node) Report(who attach.Pod, warning bool, reason, message string) {
	if who.Name == "" {
		return
	}
	kind := corev1.EventTypeNormal
	if warning {
		kind = corev1.EventTypeWarning
	}
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: who.Namespace, Name: who.Name, UID: types.UID(who.UID)}
	n.events.Event(ref, kind, reason, message)
}
