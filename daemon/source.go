package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/sluice-cni/sluice/daemon/agent"
	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/kube"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// everything is the source that captures whatever the plugin asks about; annotations are the runtime's.
func everything(conf config.Config, proxies func() []netip.Addr) agent.Source {
	return agent.Decide(func(a attach.Attachment, interfaces []string) (attach.Decision, error) {
		return decide(conf, optin.Facts{Annotations: a.Annotations}, a, interfaces, proxies)
	})
}

// decide says what becomes of an attachment of pod, on a node with these proxies.
func decide(conf config.Config, pod optin.Facts, a attach.Attachment, interfaces []string, proxies func() []netip.Addr) (attach.Decision, error) {
	d, err := optin.Decide(conf, pod, interfaces)
	if err != nil {
		return d, err
	}
	return d, exempt(d.Ruleset, a.IPs, proxies)
}

// exempt leaves out of inbound capture what this node and its proxies, at their addresses, connect to a pod for:
// kubelet's probes, and what the proxy has captured and passes on.
func exempt(r *ruleset.Ruleset, pod []netip.Addr, proxies func() []netip.Addr) error {
	if r == nil || len(r.InboundPorts) == 0 {
		return nil
	}
	from := proxies()
	if r.Upstream.IsValid() {
		from = append(from, r.Upstream.Addr())
	}
	for _, a := range pod {
		node, err := gate.SourceTo(a)
		if err != nil {
			return fmt.Errorf("%w: the way from this node to %s: %w", optin.ErrUnknown, a, err)
		}
		if node.IsValid() {
			from = append(from, node)
		}
	}
	slices.SortFunc(from, netip.Addr.Compare) // rulesets are compared
	for _, a := range slices.Compact(from) {
		r.ExcludeSources = append(r.ExcludeSources, netip.PrefixFrom(a, a.BitLen()))
	}
	return nil
}

// labelled is the source that captures what labels opt in.
type labelled struct {
	*kube.Node
	conf     config.Config
	excluded func(namespace string) bool
	proxies  func() []netip.Addr // where proxies that have a network of their own connect from
}

// Running implements agent.Source: pods that the plugin passes untouched are nobody's business here either.
func (l labelled) Running() []optin.Running {
	return slices.DeleteFunc(l.Node.Running(), func(r optin.Running) bool { return l.excluded(r.Pod.Namespace) })
}

// Decide implements agent.Source.
func (l labelled) Decide(ctx context.Context, a attach.Attachment, interfaces []string, live bool) (attach.Decision, error) {
	pod, err := l.Cached(a.Pod)
	if err != nil && live {
		pod, err = l.Pod(ctx, a.Pod)
	}
	if err != nil {
		return attach.Decision{}, err
	}
	return decide(l.conf, pod, a, interfaces, l.proxies)
}

// newNode connects to the API server: in a pod as its service account, elsewhere by a kubeconfig.
func newNode(kubeconfig string, conf config.Config, log *slog.Logger) (*kube.Node, error) {
	name := os.Getenv("NODE_NAME")
	if name == "" {
		return nil, fmt.Errorf("capture.source is %s: the environment variable NODE_NAME must name this node, as the API server does", config.Kubernetes)
	}
	client, err := newClient(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	return kube.New(client, name, conf.Upstream, log)
}

func newClient(kubeconfig string) (kubernetes.Interface, error) {
	rest, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	// A node may get all its pods at once, each of which may have to be asked for.
	rest.QPS, rest.Burst = 100, 200
	rest.UserAgent = "sluiced/" + gitVersion
	return kubernetes.NewForConfig(rest)
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags("", kubeconfig)
}
