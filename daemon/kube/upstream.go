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

// Locate returns the host:port at which the daemon dials the upstream: the configured address, or that of the
// upstream's ready pod on this node. The cluster IP of a service is not used, because it leads to pods on other nodes
// too.
func (n *Node) Locate() (string, error) {
	if n.upstream.Address != "" {
		return n.upstream.Address, nil
	}
	s, err := n.selector()
	if err != nil {
		return "", err
	}
	var chosen *corev1.Pod
	for _, p := range n.scheduled() {
		// During a rollout two pods are ready: the younger one will stay.
		if s.matches(p) && ready(p) && (chosen == nil || chosen.CreationTimestamp.Before(&p.CreationTimestamp)) {
			chosen = p
		}
	}
	if chosen == nil {
		return "", fmt.Errorf("no ready pod on %s matches %s", n.name, s)
	}
	port, err := s.portOf(chosen)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(chosen.Status.PodIP, strconv.Itoa(port)), nil
}

// selector selects the pods in which the upstream runs, and the port to dial there.
type selector struct {
	namespace string
	labels    labels.Selector
	port      intstr.IntOrString // a number, or the name of a container port
	service   string             // namespace/name of the service that it belongs to; empty if there is none
}

func (s selector) String() string {
	text := fmt.Sprintf("%s in namespace %s", s.labels, s.namespace)
	if s.service != "" {
		text += fmt.Sprintf(" (the selector of service %s)", s.service)
	}
	return text
}

var errServiceUnknown = errors.New("the API server has not listed this service; does it exist?")

func (n *Node) selector() (selector, error) {
	u := n.upstream
	if u.Service.Name == "" {
		byLabels := labels.SelectorFromSet(u.Pods.Labels)
		return selector{namespace: u.Pods.Namespace, labels: byLabels, port: intstr.FromInt32(int32(u.Port))}, nil
	}
	svc, err := n.services.Services(u.Service.Namespace).Get(u.Service.Name)
	if err != nil {
		return selector{}, fmt.Errorf("%s: %w", u, errServiceUnknown)
	}
	if len(svc.Spec.Selector) == 0 {
		return selector{}, fmt.Errorf("%s: the service has no selector", u)
	}
	i := slices.IndexFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool {
		return p.Port == int32(u.Port) && (p.Protocol == corev1.ProtocolTCP || p.Protocol == "")
	})
	if i < 0 {
		return selector{}, fmt.Errorf("%s: the service has no such TCP port", u)
	}
	return selector{
		namespace: svc.Namespace, labels: labels.SelectorFromSet(svc.Spec.Selector),
		port: svc.Spec.Ports[i].TargetPort, service: svc.Namespace + "/" + svc.Name,
	}, nil
}

func (s selector) matches(p *corev1.Pod) bool {
	return p.Namespace == s.namespace && s.labels.Matches(labels.Set(p.Labels))
}

// portOf returns the number of the port to dial in p.
func (s selector) portOf(p *corev1.Pod) (int, error) {
	if s.port.Type == intstr.Int {
		return s.port.IntValue(), nil
	}
	for port := range containerPorts(p) {
		if port.Name == s.port.StrVal {
			return int(port.ContainerPort), nil
		}
	}
	return 0, fmt.Errorf("pod %s/%s has no container port named %s", p.Namespace, p.Name, s.port.StrVal)
}

// containerPorts yields the ports of all containers of p. Init containers are included, because sidecars are such.
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

// ready tells whether p is ready, has an address, and is not being deleted.
func ready(p *corev1.Pod) bool {
	isReady := func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	}
	return p.DeletionTimestamp == nil && p.Status.PodIP != "" && slices.ContainsFunc(p.Status.Conditions, isReady)
}

// runsUpstream tells whether the upstream runs in p. Captured, its own connections would lead back to it. An upstream
// that is configured by its address runs in p if the address has the IP address of p, or the number of a hostPort of p.
func (n *Node) runsUpstream(p *corev1.Pod) (bool, error) {
	if n.upstream.Address == "" {
		if n.upstream.Pods.Labels == nil && n.upstream.Service.Name == "" {
			return false, nil // protocol sockets, without a description of the proxy
		}
		s, err := n.selector()
		if err != nil {
			return false, fmt.Errorf("%w: finding out whether the upstream runs in pod %s/%s: %w",
				optin.ErrUnknown, p.Namespace, p.Name, err)
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

// Proxies returns the addresses of the pods on this node in which the upstream runs, as far as they are known.
func (n *Node) Proxies() []netip.Addr {
	var all []netip.Addr
	for _, p := range n.scheduled() {
		if runs, err := n.runsUpstream(p); err == nil && runs {
			all = append(all, addresses(p)...)
		}
	}
	return all
}
