package main

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/kube"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// TestDecisionsByTheAPIServer: decisions about pods of a namespace that opts in, by their specs as the API server has
// them.
func TestDecisionsByTheAPIServer(t *testing.T) {
	t.Parallel()
	conf := config.Config{
		Upstream: config.Upstream{Address: "127.0.0.1:18080", Protocol: config.Connect},
		Capture: config.Capture{
			Source: config.Kubernetes, Other: ruleset.OtherDNS, Ports: ruleset.Ports{Outbound: 16001, Inbound: 16006},
		},
	}
	pod := func(name string, spec corev1.PodSpec) *corev1.Pod {
		spec.NodeName = "here"
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ci", Name: name}, Spec: spec}
	}
	sidecar := []corev1.Container{{Name: "app"}, {Name: "linkerd-proxy"}}
	client := fake.NewClientset(
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ci", Labels: map[string]string{optin.Label: "true"}}},
		pod("plain", corev1.PodSpec{}),
		pod("own-dns", corev1.PodSpec{DNSConfig: &corev1.PodDNSConfig{
			Nameservers: []string{"10.96.0.9", "10.96.0.10"},
		}}),
		pod("meshed", corev1.PodSpec{Containers: sidecar}),
	)
	node, err := kube.New(client, "here", conf, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- node.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	testbed.Eventually(t, "the caches are in sync", node.Synced)

	cluster := []netip.Addr{netip.MustParseAddr("10.96.0.10")}
	o := newOrchestrator(
		decider{conf: conf, resolvers: cluster, proxies: func() []netip.Addr { return nil }}, node,
		func(string) bool { return false },
	)
	decide := func(name string) (attach.Decision, error) {
		at := attach.Attachment{Pod: attach.Pod{Namespace: "ci", Name: name}}
		return o.Decision(t.Context(), at, []string{"eth0"}, false)
	}
	for name, want := range map[string][]netip.Addr{
		"plain": cluster, "own-dns": {netip.MustParseAddr("10.96.0.9"), cluster[0]},
	} {
		d, err := decide(name)
		if err != nil || d.Ruleset.Other != ruleset.OtherDNS || d.Ruleset.Ports != conf.Capture.Ports ||
			!slices.Equal(d.Ruleset.Resolvers, want) {
			t.Errorf("%s: got %+v, %v; want the name servers %s", name, d.Ruleset, err, want)
		}
	}
	if d, err := decide("meshed"); err == nil || d.Capture ||
		!strings.Contains(err.Error(), "the sidecar of Linkerd (container linkerd-proxy)") {
		t.Errorf("meshed: got %+v, %v; want it refused for its sidecar", d, err)
	}
}
