package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/e2e-framework/klient/k8s"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// newWeb is a captured pod that serves at a port that is captured too, and that kubelet asks whether it is ready.
func newWeb() *corev1.Pod {
	p := newPod("web", namespace, capture, "mkdir /w && cd /w && echo hello > index.html && exec httpd -f -vv -p 80", "")
	p.Annotations = map[string]string{"sluice.dev/capture-inbound-ports": "80"}
	p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		PeriodSeconds: 1,
		ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(80)}},
	}
	return p
}

func isReady(ctx context.Context, c *envconf.Config, name string) bool {
	var p corev1.Pod
	if client(c).Get(ctx, name, namespace, &p) != nil {
		return false
	}
	for _, condition := range p.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// flows are those that the proxy has recorded, and that a filter of mitmproxy finds.
func flows(ctx context.Context, t *testing.T, c *envconf.Config, filter string) string {
	t.Helper()
	proxy, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	out, err := inPod(ctx, c, proxies, proxy, "mitmdump", "--no-server", "--rfile", flowFile, filter)
	must(t, err)
	return out
}

// inbound is about the pod of newWeb, which was there before the proxy.
func inbound(ctx context.Context, t *testing.T, c *envconf.Config) {
	var web corev1.Pod
	must(t, client(c).Get(ctx, "web", namespace, &web))
	asked := func() int {
		return strings.Count(flows(ctx, t, c, fmt.Sprintf("~meta %s/web & ~meta inbound & ~u http://%s/ & ~c 200", namespace, web.Status.PodIP)), "GET http")
	}
	ask := func(pod string) {
		t.Helper()
		if out, err := inPod(ctx, c, namespace, pod, "wget", "-q", "-O-", "http://"+web.Status.PodIP+"/"); err != nil || out != "hello\n" {
			t.Fatalf("%s asks web: got %q, %v", pod, out, err)
		}
	}
	ask("plain")
	must(t, eventually(ctx, "its flow names the pod that was asked", func() (bool, error) { return asked() == 1, nil }))
	ask("captured") // its own flow is outbound; the proxy's connection to web is not captured again
	must(t, eventually(ctx, "flows name the pods that have asked", func() (bool, error) {
		out := flows(ctx, t, c, fmt.Sprintf("~meta %s/captured & ~meta outbound & ~u http://%s/", namespace, web.Status.PodIP))
		return strings.Count(out, "GET http") == 1, nil
	}))
	if got := asked(); got != 1 {
		t.Errorf("got %d inbound flows, want that of the pod without the label alone", got)
	}
	if probes := flows(ctx, t, c, "~hq kube-probe & ~meta "+namespace+"/web"); strings.Contains(probes, "GET http") {
		t.Errorf("kubelet's probes are captured:\n%s", probes)
	}

	before := strings.Count(logs(ctx, t, c, namespace, "web"), "url:/\n")
	must(t, client(c).Patch(ctx, &web, k8s.Patch{
		PatchType: types.MergePatchType, Data: []byte(`{"metadata":{"annotations":{"sluice.dev/capture-inbound-ports":null}}}`),
	}))
	must(t, eventually(ctx, "nobody listens inbound any more", func() (bool, error) {
		out, err := inPod(ctx, c, namespace, "web", "netstat", "-ltn")
		return !strings.Contains(out, ":15006"), err
	}))
	ask("plain")
	if got := asked(); got != 1 {
		t.Errorf("got %d inbound flows after the annotation went, want none more", got)
	}
	if after := strings.Count(logs(ctx, t, c, namespace, "web"), "url:/\n"); after <= before {
		t.Errorf("the server was asked %d times in all, and %d times before", after, before)
	}
}
