package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	authv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"
)

// step runs one part of the story as a feature of the e2e framework. The story ends with the first part that fails,
// because each part needs those before it.
func step(t *testing.T, name string, do func(ctx context.Context, t *testing.T, c *envconf.Config)) {
	t.Helper()
	assess := func(ctx context.Context, t *testing.T, c *envconf.Config) context.Context {
		do(ctx, t, c)
		return ctx
	}
	suite.Test(t, features.New(name).Assess(name, assess).Feature())
	if t.Failed() {
		t.FailNow()
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var capture = map[string]string{"sluice.dev/capture": "true"}

// TestSluice is one story, in the order of events in a cluster: installation, a late proxy, operation, failures and
// uninstallation.
func TestSluice(t *testing.T) {
	step(t, "a captured pod waits for the proxy, from the first packet of its init container on", proxyIsLate)
	step(t, "the examples of waiting without capture end through the proxy", checkExamples)
	step(t, "pods without the label and pods of excluded namespaces are not captured", notCaptured)
	step(t, "flows name their pods, outbound and inbound", inbound)
	step(t, "the label is added to a running pod, and removed", labelChanges)
	step(t, "the label is added to a pod that is older than sluice", labelOnOlderPod)
	step(t, "a malformed annotation fails ADD, and an event names it", malformedAnnotation)
	step(t, "a pod on the host's network is not captured, and an event says so", hostNetworkPod)
	step(t, "the DaemonSet is rolled out again while requests are under way", rollout)
	step(t, "pods start without the daemon, and are captured or not when it comes", withoutDaemon)
	step(t, "with late.taintAfter, the node gets its taint back while the proxy is away", taintReturns)
	step(t, "the upstream is found by the pods' labels, by its Service and by its address", upstreamKinds)
	step(t, "the daemon may change the taint of its own node, and nothing else of a node", ownNodeOnly)
	step(t, "pods start without the API server, and are captured or not when it comes", withoutAPIServer)
	step(t, "the plugin's entry returns when another component rewrites the network configuration", entryReturns)
	step(t, "the daemon's role grants the verbs that it needs, and no others", daemonRole)
	step(t, "no record of a deleted pod remains", deletedPods)
	step(t, "after uninstallation, the node's network configuration is the original one", uninstall)
	step(t, "the commands in the documentation work as they are printed", documented)
}

// proxyIsLate creates pods on a node without a proxy, and then the proxy.
func proxyIsLate(ctx context.Context, t *testing.T, c *envconf.Config) {
	request := "wget -q -O- " + urls(ctx, t, c)[0]
	atServer := serverRequests(ctx, t, c)
	must(t, client(c).Create(ctx, newPod("captured", namespace, capture, "sleep 86400", request)))
	must(t, client(c).Create(ctx, newPod("plain", namespace, nil, "sleep 86400", request)))
	must(t, client(c).Create(ctx, newPod("excluded", "kube-system", capture, "sleep 86400", "")))
	must(t, client(c).Create(ctx, newWeb()))
	held := newPod("held", namespace, capture, "sleep 86400", "")
	held.Annotations = map[string]string{"sluice.dev/when-late": "hold", "sluice.dev/late-timeout": "5s"}
	must(t, client(c).Create(ctx, held))
	waitFor(ctx, t, "a connection waits, and the pod without the label runs", func() (bool, error) {
		a, err := attachment(ctx, c, namespace+"/captured")
		return a.State == "captured" && a.Waiting == 1 && running(ctx, c, "plain"), err
	})
	waitFor(ctx, t, "the pod without the label has its response", func() (bool, error) {
		return serverRequests(ctx, t, c) > atServer, nil
	})
	waitFor(ctx, t, "kubelet's probe is not captured inbound", func() (bool, error) {
		return isReady(ctx, c, "web"), nil
	})
	if got := serverRequests(ctx, t, c) - atServer; got != 1 {
		t.Errorf("the server has received %d requests, want one, from the pod without the label", got)
	}
	direct := newPod("direct", namespace, capture, "sleep 86400", request)
	direct.Annotations = map[string]string{"sluice.dev/when-late": "direct", "sluice.dev/late-timeout": "2s"}
	must(t, client(c).Create(ctx, direct))
	waitFor(ctx, t, "a pod with the policy direct runs", func() (bool, error) { return running(ctx, c, "direct"), nil })
	waitFor(ctx, t, "an event says that its connections go around the proxy", func() (bool, error) {
		return hasEvent(ctx, c, "direct", "SluiceConnectionsDirect", "WITHOUT the upstream")
	})
	if got := serverRequests(ctx, t, c) - atServer; got != 2 {
		t.Errorf("the server has received %d requests, want two, the second from the pod with the policy direct", got)
	}
	applyExamples(ctx, t, c)
	must(t, setTaints(ctx, c, foreignTaint, sluiceTaint))
	createPodKeptOff(ctx, t, c)
	waitFor(ctx, t, "kubelet tries again to add the pod with the policy hold", func() (bool, error) {
		return hasEvent(ctx, c, "held", "FailedCreatePodSandBox", "is late")
	})
	if running(ctx, c, "held") {
		t.Error("the pod with the policy hold runs before the proxy does")
	}
	if tainted, err := hasTaints(ctx, c, foreignTaint, sluiceTaint); err != nil || !tainted {
		t.Errorf("before the proxy runs, the node has both taints: got %t, %v", tainted, err)
	}
	must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	waitFor(ctx, t, "the request is complete, and the captured pod runs", func() (bool, error) {
		return running(ctx, c, "captured"), nil
	})
	waitFor(ctx, t, "the pod with the policy hold runs", func() (bool, error) { return running(ctx, c, "held"), nil })
	wantPodAdmitted(ctx, t, c)
	wantProxyRequests(ctx, t, c, 0, 1)
}

func notCaptured(ctx context.Context, t *testing.T, c *envconf.Config) {
	a, err := attachment(ctx, c, namespace+"/plain")
	if err != nil || a.State != "not captured" {
		t.Errorf("the pod without the label: got %+v, %v", a, err)
	}
	if a, err := attachment(ctx, c, "kube-system/excluded"); err != nil || a.State != "" {
		t.Errorf("the pod of an excluded namespace: got %+v, %v; want no attachment", a, err)
	}
	must(t, client(c).Delete(ctx, newPod("excluded", "kube-system", nil, "", "")))
}

func labelChanges(ctx context.Context, t *testing.T, c *envconf.Config) {
	for _, want := range []struct{ patch, state string }{
		{`{"metadata":{"labels":{"sluice.dev/capture":"true"}}}`, "captured"},
		{`{"metadata":{"labels":{"sluice.dev/capture":null}}}`, "not captured"},
	} {
		must(t, client(c).Patch(ctx, newPod("plain", namespace, nil, "", ""), mergePatch(want.patch)))
		waitFor(ctx, t, "the pod is "+want.state, func() (bool, error) {
			a, err := attachment(ctx, c, namespace+"/plain")
			return a.State == want.state, err
		})
		checkRequests(ctx, t, c, "plain", want.state == "captured")
		if want.state == "captured" {
			wantProxySawAddress(ctx, t, c, "plain")
		}
	}
}

func labelOnOlderPod(ctx context.Context, t *testing.T, c *envconf.Config) {
	labelled := mergePatch(`{"metadata":{"labels":{"sluice.dev/capture":"true"}}}`)
	must(t, client(c).Patch(ctx, newPod("older", namespace, nil, "", ""), labelled))
	waitFor(ctx, t, "the pod is captured, and an event says so", func() (bool, error) {
		return hasEvent(ctx, c, "older", "SluiceCaptured", "connections that were open before stay as they are")
	})
	checkRequests(ctx, t, c, "older", true)
}

func malformedAnnotation(ctx context.Context, t *testing.T, c *envconf.Config) {
	p := newPod("bad", namespace, capture, "sleep 86400", "")
	p.Annotations = map[string]string{"sluice.dev/quic": "maybe"}
	must(t, client(c).Create(ctx, p))
	waitFor(ctx, t, "an event names key and value", func() (bool, error) {
		return hasEvent(ctx, c, "bad", "SluiceRefused", `sluice.dev/quic: "maybe"`)
	})
	must(t, client(c).Delete(ctx, p))
}

func hostNetworkPod(ctx context.Context, t *testing.T, c *envconf.Config) {
	p := newPod("host", namespace, capture, "sleep 86400", "")
	p.Spec.HostNetwork = true
	must(t, client(c).Create(ctx, p))
	waitFor(ctx, t, "an event says so", func() (bool, error) {
		return hasEvent(ctx, c, "host", "SluiceNotCaptured", "host's network")
	})
	must(t, client(c).Delete(ctx, p))
}

// rollout rolls the daemons of all nodes out again, while a captured pod of each node sends requests.
func rollout(ctx context.Context, t *testing.T, c *envconf.Config) {
	const count = 200
	url := urls(ctx, t, c)[0]
	requests := fmt.Sprintf("for i in $(seq %d); do wget -q -O/dev/null %s || exit 1; done", count, url)
	atProxy := map[string]int{}
	outcomes := make(chan error, 1+len(others))
	begin := func(node, pod string) {
		atProxy[node] = proxyRequestsOn(ctx, t, c, node, url)
		go func() {
			_, err := inPod(ctx, c, namespace, pod, "sh", "-c", requests)
			outcomes <- err
		}()
	}
	for i, name := range others {
		p := newPod(fmt.Sprintf("captured-%d", i), namespace, capture, "sleep 86400", "")
		onNodeNamed(p, name)
		must(t, client(c).Create(ctx, p))
		defer func() { must(t, client(c).Delete(context.WithoutCancel(ctx), p)) }()
		waitFor(ctx, t, p.Name+" runs", func() (bool, error) { return running(ctx, c, p.Name), nil })
		begin(name, p.Name)
	}
	begin(home, "captured")
	annotated := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"e2e":"%d"}}}}}`, time.Now().UnixNano())
	must(t, client(c).Patch(ctx, daemonSet(system, "sluice"), mergePatch(annotated)))
	waitForRollout(ctx, t, c, system, "sluice")
	for range atProxy {
		if err := <-outcomes; err != nil {
			t.Errorf("a request failed: %v", err)
		}
	}
	for name, before := range atProxy {
		waitFor(ctx, t, "the proxy of "+name+" has logged every request", func() (bool, error) {
			return proxyRequestsOn(ctx, t, c, name, url) == before+count, nil
		})
	}
}

func withoutDaemon(ctx context.Context, t *testing.T, c *envconf.Config) {
	stopDaemon(ctx, t, c)
	atServer, atProxy := serverRequests(ctx, t, c), proxyRequests(ctx, t, c)
	script := "wget -q -O- " + urls(ctx, t, c)[0] + " && echo complete && sleep 86400"
	for name, labels := range map[string]map[string]string{"early": capture, "early-plain": nil} {
		must(t, client(c).Create(ctx, newPod(name, namespace, labels, script, "")))
	}
	waitFor(ctx, t, "both pods run", func() (bool, error) {
		return running(ctx, c, "early") && running(ctx, c, "early-plain"), nil
	})
	if got := serverRequests(ctx, t, c); got != atServer {
		t.Errorf("%d requests left the pods before the daemon knew the labels", got-atServer)
	}
	setDaemonImage(ctx, t, c, "sluice:e2e")
	for _, name := range []string{"early", "early-plain"} {
		waitFor(ctx, t, name+" completes its request", func() (bool, error) {
			return strings.Contains(logs(ctx, t, c, namespace, name), "complete"), nil
		})
	}
	wantProxyRequests(ctx, t, c, atProxy, 1) // from the pod with the label
	waitForRollout(ctx, t, c, system, "sluice")
}

func entryReturns(ctx context.Context, t *testing.T, c *envconf.Config) {
	rewrite := "f=$(ls /cni/*.conflist | head -1); cat > $f <<'END'\n" + original + "END"
	_, err := inPod(ctx, c, namespace, "node", "sh", "-c", rewrite)
	must(t, err)
	waitFor(ctx, t, "the entry is in the configuration again", func() (bool, error) {
		text, err := inPod(ctx, c, namespace, "node", "sh", "-c", "cat /cni/*.conflist")
		return strings.Contains(text, `"type":"sluice"`), err
	})
}

func daemonRole(ctx context.Context, t *testing.T, c *envconf.Config) {
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	must(t, err)
	for _, can := range []struct {
		verb, resource string
		want           bool
	}{
		{"get", "pods", true}, {"list", "pods", true}, {"watch", "pods", true}, {"list", "namespaces", true},
		{"create", "events", true},
		{"patch", "pods", false}, {"delete", "pods", false}, {"create", "pods", false},
		{"get", "secrets", false}, {"list", "configmaps", false},
		{"get", "services", false}, {"patch", "namespaces", false},
		{"list", "daemonsets.apps", true}, {"watch", "daemonsets.apps", true}, {"get", "daemonsets.apps", false},
		{"patch", "daemonsets.apps", false}, {"delete", "daemonsets.apps", false},
		{"list", "nodes", true}, {"watch", "nodes", true}, {"patch", "nodes", true},
		{"patch", "nodes/status", false},
		{"update", "nodes", false}, {"delete", "nodes", false}, {"create", "nodes", false}, {"get", "nodes", false},
	} {
		resource, subresource, _ := strings.Cut(can.resource, "/")
		review := &authv1.SubjectAccessReview{Spec: authv1.SubjectAccessReviewSpec{
			User:   "system:serviceaccount:" + system + ":sluice",
			Groups: []string{"system:serviceaccounts", "system:authenticated"},
			ResourceAttributes: &authv1.ResourceAttributes{
				Verb: can.verb, Resource: resource, Subresource: subresource,
			},
		}}
		if name, group, ok := strings.Cut(resource, "."); ok { // the role is for the one object
			review.Spec.ResourceAttributes.Resource, review.Spec.ResourceAttributes.Group = name, group
			review.Spec.ResourceAttributes.Namespace, review.Spec.ResourceAttributes.Name = system, "sluice"
		}
		got, err := k.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		must(t, err)
		if got.Status.Allowed != can.want {
			t.Errorf("%s %s: allowed %t, want %t", can.verb, can.resource, got.Status.Allowed, can.want)
		}
	}
}

func deletedPods(ctx context.Context, t *testing.T, c *envconf.Config) {
	names := []string{"captured", "plain", "older", "early", "early-plain", "web", "held"}
	for _, name := range names {
		must(t, client(c).Delete(ctx, newPod(name, namespace, nil, "", "")))
	}
	waitFor(ctx, t, "neither the daemon nor a file on the node knows them", func() (bool, error) {
		files, err := inPod(ctx, c, namespace, "node", "sh", "-c", "cat /run/sluice/attachments/* 2>/dev/null || true")
		if err != nil {
			return false, err
		}
		for _, name := range names {
			a, err := attachment(ctx, c, namespace+"/"+name)
			if err != nil || a.State != "" || strings.Contains(files, `"name":"`+name+`"`) {
				return false, err
			}
		}
		return true, nil
	})
}

func uninstall(ctx context.Context, t *testing.T, c *envconf.Config) {
	name, err := only(ctx, c, system, daemonPods)
	must(t, err)
	_, err = inPod(ctx, c, system, name,
		"sluiced", "uninstall", "--cni-conf-dir=/host/cni/net.d", "--cni-bin-dir=/host/cni/bin")
	must(t, err)
	text, err := inPod(ctx, c, namespace, "node", "sh", "-c", "cat /cni/*.conflist")
	must(t, err)
	if text != original {
		t.Errorf("the network configuration is\n%s\nand was\n%s", text, original)
	}
	must(t, client(c).Create(ctx, newPod("after", namespace, nil, "sleep 86400", "")))
	waitFor(ctx, t, "a pod starts", func() (bool, error) { return running(ctx, c, "after"), nil })
	if a, err := attachment(ctx, c, namespace+"/after"); err != nil || a.State != "" {
		t.Errorf("a pod that was added after uninstallation: got %+v, %v; want no attachment", a, err)
	}
}
