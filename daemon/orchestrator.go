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

// newOrchestrator makes the orchestrator of `sluiced run`. With a node it is that node's.
func newOrchestrator(d decider, node *kube.Node, excluded func(string) bool) agent.Orchestrator {
	if node == nil {
		return standalone{d}
	}
	external := d.proxies
	d.proxies = func() []netip.Addr { return append(node.Proxies(), external()...) }
	return labelled{node, d, excluded}
}

// decider decides by facts about a pod, and by what it knows of the node.
type decider struct {
	conf      config.Config
	resolvers []netip.Addr        // the name servers that most pods of this node use
	proxies   func() []netip.Addr // the addresses of proxies that have a network of their own
}

// decide decides about an attachment of a pod with those facts.
func (d decider) decide(facts optin.Facts, at attach.Attachment, interfaces []string) (attach.Decision, error) {
	facts.Resolvers = slices.Concat(facts.Resolvers, d.resolvers)
	decision, err := optin.Decide(d.conf, facts, interfaces)
	if err != nil || decision.Ruleset == nil || len(decision.Ruleset.InboundPorts) == 0 {
		return decision, err
	}
	return decision, optin.ExcludeNode(decision.Ruleset, at.IPs, d.proxies())
}

// standalone captures every attachment that the plugin asks about. Annotations are those that the runtime passes on.
type standalone struct{ decider }

// Decision implements agent.Orchestrator.
func (s standalone) Decision(_ context.Context, at attach.Attachment, interfaces []string, _ bool) (
	attach.Decision, error,
) {
	return s.decide(optin.Facts{Annotations: at.Annotations}, at, interfaces)
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
	decider
	excluded func(namespace string) bool
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
	return l.decide(facts, at, interfaces)
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
	node, err := kube.New(client, name, conf, log)
	if err != nil {
		return nil, err
	}
	if set := os.Getenv("DAEMONSET"); set != "" {
		node.FollowDaemonSet(config.Name{Namespace: os.Getenv("POD_NAMESPACE"), Name: set})
	}
	return node, nil
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
