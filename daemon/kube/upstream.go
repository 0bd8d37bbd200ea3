package kube

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/sluice-cni/sluice/daemon/optin"
)

// Locate is where the upstream is dialled: its address, or its ready pod on this node. A service is not dialled
// by its own address, which would lead to any node's.
func (n *Node) Locate() (string, error) {
	if n.upstream.Address != "" {
		return n.upstream.Address, nil
	}
	s, err := n.selector()
	if err != nil {
		return "", err
	}
	var chosen *corev1.Pod
	for _, p := range n.all() {
		// While one replaces the other, the younger one stays.
		if s.matches(p) && ready(p) && (chosen == nil || chosen.CreationTimestamp.Before(&p.CreationTimestamp)) {
			chosen = p
		}
	}
	if chosen == nil {
		return "", fmt.Errorf("no ready pod on node %s is the %s", n.name, n.upstream)
	}
	port, err := s.portOf(chosen)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(chosen.Status.PodIP, strconv.Itoa(port)), nil
}

// selector chooses the pods that the upstream runs in.
type selector struct {
	namespace string
	labels    labels.Selector
	port      intstr.IntOrString
}

var errNoService = errors.New("the API server has not shown it")

func (n *Node) selector() (selector, error) {
	u := n.upstream
	if u.Service.Name == "" {
		return selector{u.Pods.Namespace, labels.SelectorFromSet(u.Pods.Labels), intstr.FromInt32(int32(u.Port))}, nil
	}
	svc, err := n.services.Services(u.Service.Namespace).Get(u.Service.Name)
	if err != nil {
		return selector{}, fmt.Errorf("%s: %w", u, errNoService)
	}
	if len(svc.Spec.Selector) == 0 {
		return selector{}, fmt.Errorf("%s: it selects no pods", u)
	}
	i := slices.IndexFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool {
		return p.Port == int32(u.Port) && (p.Protocol == corev1.ProtocolTCP || p.Protocol == "")
	})
	if i < 0 {
		return selector{}, fmt.Errorf("%s: it has no such port", u)
	}
	return selector{svc.Namespace, labels.SelectorFromSet(svc.Spec.Selector), svc.Spec.Ports[i].TargetPort}, nil
}

func (s selector) matches(p *corev1.Pod) bool {
	return p.Namespace == s.namespace && s.labels.Matches(labels.Set(p.Labels))
}

func (s selector) portOf(p *corev1.Pod) (int, error) {
	if s.port.Type == intstr.Int {
		return s.port.IntValue(), nil
	}
	for port := range containerPorts(p) {
		if port.Name == s.port.StrVal {
			return int(port.ContainerPort), nil
		}
	}
	return 0, fmt.Errorf("pod %s/%s has no port named %s", p.Namespace, p.Name, s.port.StrVal)
}

// containerPorts are those of all containers, sidecars included.
func containerPorts(p *corev1.Pod) func(yield func(corev1.ContainerPort) bool) {
	return func(yield func(corev1.ContainerPort) bool) {
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			for _, port := range c.Ports {
				if !yield(port) {
					return
				}
			}
		}
	}
}

func ready(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && p.Status.PodIP != "" && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// runsUpstream tells whether the upstream runs in p: to capture what it sends would lead back to it. By an address
// it is known if that is the pod's own, or a port of the node that leads to the pod.
func (n *Node) runsUpstream(p *corev1.Pod) (bool, error) {
	if n.upstream.Address == "" {
		if n.upstream.Pods.Labels == nil && n.upstream.Service.Name == "" {
			return false, nil // one that comes by itself, and has not been described
		}
		s, err := n.selector()
		if err != nil {
			return false, fmt.Errorf("%w: whether it is the upstream's: %w", optin.ErrUnknown, err)
		}
		return s.matches(p), nil
	}
	host, port, err := net.SplitHostPort(n.upstream.Address)
	if err != nil {
		return false, err
	}
	for _, ip := range p.Status.PodIPs {
		if ip.IP == host {
			return true, nil
		}
	}
	for c := range containerPorts(p) {
		if c.HostPort != 0 && strconv.Itoa(int(c.HostPort)) == port {
			return true, nil
		}
	}
	return false, nil
}

// Proxies are the addresses of the pods on this node that the upstream runs in, as far as they are known.
func (n *Node) Proxies() []netip.Addr {
	var all []netip.Addr
	for _, p := range n.all() {
		if is, err := n.runsUpstream(p); err == nil && is {
			all = append(all, addresses(p)...)
		}
	}
	return all
}
