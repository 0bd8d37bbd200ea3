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
	"github.com/sluice-cni/sluice/daemon/kube"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// newOrchestrator makes the orchestrator of `sluiced run`. proxies returns the addresses of proxies that connect to the
// proxy socket and have a network of their own.
func newOrchestrator(conf config.Config, node *kube.Node, excluded func(string) bool, proxies func() []netip.Addr) (
	o agent.Orchestrator,
) {
	if node == nil {
		return standalone{conf, proxies}
	}
	return labelled{node, conf, excluded, func() []netip.Addr { return append(node.Proxies(), proxies()...) }}
}

// decision decides about an attachment of a pod with those facts.
func decision(conf config.Config, facts optin.Facts, at attach.Attachment, interfaces []string,
	proxies func() []netip.Addr,
) (attach.Decision, error) {
	d, err := optin.Decide(conf, facts, interfaces)
	if err != nil || d.Ruleset == nil || len(d.Ruleset.InboundPorts) == 0 {
		return d, err
	}
	return d, optin.ExcludeNode(d.Ruleset, at.IPs, proxies())
}

// standalone captures every attachment that the plugin asks about. Annotations are those that the runtime passes on.
type standalone struct {
	conf    config.Config
	proxies func() []netip.Addr
}

// Decision implements agent.Orchestrator.
func (s standalone) Decision(_ context.Context, at attach.Attachment, interfaces []string, _ bool) (
	attach.Decision, error,
) {
	return decision(s.conf, optin.Facts{Annotations: at.Annotations}, at, interfaces, s.proxies)
}

// Running implements agent.Orchestrator: pods that were not attached are not known.
func (standalone) Running() []optin.Running { return nil }

// Changed implements agent.Orchestrator: a decision does not change.
func (standalone) Changed() <-chan struct{} { return nil }

// Report implements agent.Orchestrator: there are no events.
func (standalone) Report(attach.Pod, bool, string, string) {}

// labelled captures the pods that labels opt in. It reports by events on the pods.
type labelled struct {
	*kube.Node
	conf     config.Config
	excluded func(namespace string) bool
	proxies  func() []netip.Addr
}

// Running implements agent.Orchestrator, without the namespaces that the plugin excludes.
func (l labelled) Running() []optin.Running {
	return slices.DeleteFunc(l.Node.Running(), func(r optin.Running) bool { return l.excluded(r.Pod.Namespace) })
}

// Decision implements agent.Orchestrator.
func (l labelled) Decision(ctx context.Context, at attach.Attachment, interfaces []string, live bool) (
	attach.Decision, error,
) {
	facts, err := l.Cached(at.Pod)
	if err != nil && live {
		facts, err = l.Pod(ctx, at.Pod)
	}
	if err != nil {
		return attach.Decision{}, err
	}
	return decision(l.conf, facts, at, interfaces, l.proxies)
}

// newNode connects to the API server: in a pod as its service account, elsewhere by a kubeconfig.
func newNode(kubeconfig string, conf config.Config, log *slog.Logger) (*kube.Node, error) {
	name := os.Getenv("NODE_NAME")
	if name == "" {
		return nil, fmt.Errorf("capture.source is %s: the environment variable NODE_NAME must name this node as the "+
			"API server does", config.Kubernetes)
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
