package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// newWeb creates a captured pod with a server, whose port is captured inbound, and with a readiness probe.
func newWeb() *corev1.Pod {
	server := "mkdir /w && cd /w && echo hello > index.html && exec httpd -f -vv -p 80"
	p := newPod("web", namespace, capture, server, "")
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

// flows returns mitmdump's output for the recorded flows that match a filter of mitmproxy.
func flows(ctx context.Context, t *testing.T, c *envconf.Config, filter string) string {
	t.Helper()
	proxy, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	out, err := inPod(ctx, c, proxies, proxy, "mitmdump", "--set=confdir=/var/lib/mitmproxy", "--no-server",
		"--rfile", flowFile, filter)
	must(t, err)
	return out
}

// inbound checks the flows to the pod of newWeb, which is older than the proxy.
func inbound(ctx context.Context, t *testing.T, c *envconf.Config) {
	var web corev1.Pod
	must(t, client(c).Get(ctx, "web", namespace, &web))
	url := "http://" + web.Status.PodIP + "/"
	inboundFlows := func() int {
		filter := fmt.Sprintf("~meta %s/web & ~meta inbound & ~u %s & ~c 200", namespace, url)
		return strings.Count(flows(ctx, t, c, filter), "GET http")
	}
	sendRequest := func(pod string) {
		t.Helper()
		if out, err := inPod(ctx, c, namespace, pod, "wget", "-q", "-O-", url); err != nil || out != "hello\n" {
			t.Fatalf("request from %s to web: got %q, %v", pod, out, err)
		}
	}
	sendRequest("plain")
	waitFor(ctx, t, "an inbound flow names the pod web", func() (bool, error) { return inboundFlows() == 1, nil })
	sendRequest("captured") // results in an outbound flow; the proxy's connection to web is not captured again
	waitFor(ctx, t, "an outbound flow names the pod captured", func() (bool, error) {
		out := flows(ctx, t, c, fmt.Sprintf("~meta %s/captured & ~meta outbound & ~u %s", namespace, url))
		return strings.Count(out, "GET http") == 1, nil
	})
	if got := inboundFlows(); got != 1 {
		t.Errorf("got %d inbound flows, want one, of the request from the pod without the label", got)
	}
	if probes := flows(ctx, t, c, "~hq kube-probe & ~meta "+namespace+"/web"); strings.Contains(probes, "GET http") {
		t.Errorf("kubelet's probes are captured:\n%s", probes)
	}

	before := strings.Count(logs(ctx, t, c, namespace, "web"), "url:/\n")
	notInbound := mergePatch(`{"metadata":{"annotations":{"sluice.dev/capture-inbound-ports":null}}}`)
	must(t, client(c).Patch(ctx, &web, notInbound))
	waitFor(ctx, t, "the inbound listener is closed", func() (bool, error) {
		out, err := inPod(ctx, c, namespace, "web", "netstat", "-ltn")
		return !strings.Contains(out, ":15006"), err
	})
	sendRequest("plain")
	if got := inboundFlows(); got != 1 {
		t.Errorf("got %d inbound flows after the annotation was removed, want still one", got)
	}
	if after := strings.Count(logs(ctx, t, c, namespace, "web"), "url:/\n"); after <= before {
		t.Errorf("web has logged %d requests, and had logged %d before: want more", after, before)
	}
}
