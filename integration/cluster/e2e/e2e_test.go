package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/e2e-framework/klient/k8s"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"
)

// step is one test in the words of the framework.
func step(t *testing.T, name string, do func(ctx context.Context, t *testing.T, c *envconf.Config)) {
	t.Helper()
	suite.Test(t, features.New(name).Assess(name, func(ctx context.Context, t *testing.T, c *envconf.Config) context.Context {
		do(ctx, t, c)
		return ctx
	}).Feature())
	if t.Failed() {
		t.FailNow() // the rest of the story needs this one
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var capture = map[string]string{"sluice.dev/capture": "true"}

// TestSluice is one story, in the order in which a cluster meets it.
func TestSluice(t *testing.T) {
	step(t, "a labelled pod waits for the proxy, from the first packet of its init container on", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		ask := "wget -q -O- " + urls(ctx, t, c)[0]
		must(t, client(c).Create(ctx, newPod("captured", namespace, capture, "sleep 86400", ask)))
		must(t, client(c).Create(ctx, newPod("plain", namespace, nil, "sleep 86400", ask)))
		must(t, client(c).Create(ctx, newPod("excluded", "kube-system", capture, "sleep 86400", "")))
		must(t, client(c).Create(ctx, newWeb()))
		held := newPod("held", namespace, capture, "sleep 86400", "")
		held.Annotations = map[string]string{"sluice.dev/when-late": "hold", "sluice.dev/late-timeout": "5s"}
		must(t, client(c).Create(ctx, held))
		must(t, eventually(ctx, "a connection waits, and the pod without the label runs", func() (bool, error) {
			a, err := attachment(ctx, c, namespace+"/captured")
			return a.State == "captured" && a.Waiting == 1 && running(ctx, c, "plain"), err
		}))
		must(t, eventually(ctx, "the pod without the label has been answered", func() (bool, error) { return askedBy(ctx, t, c) > 0, nil }))
		must(t, eventually(ctx, "kubelet's probe is not captured inbound", func() (bool, error) { return isReady(ctx, c, "web"), nil }))
		if got := askedBy(ctx, t, c); got != 1 {
			t.Errorf("the server was asked %d times, want once, by the pod without the label", got)
		}
		hasty := newPod("hasty", namespace, capture, "sleep 86400", ask)
		hasty.Annotations = map[string]string{"sluice.dev/when-late": "direct", "sluice.dev/late-timeout": "2s"}
		must(t, client(c).Create(ctx, hasty))
		must(t, eventually(ctx, "a pod that may go direct runs", func() (bool, error) { return running(ctx, c, "hasty"), nil }))
		must(t, eventually(ctx, "its people are told", func() (bool, error) {
			return told(ctx, c, "hasty", "SluiceConnectionsDirect", "WITHOUT the upstream")
		}))
		if got := askedBy(ctx, t, c); got != 2 {
			t.Errorf("the server was asked %d times, want twice, by the pod that goes direct too", got)
		}
		applyExamples(ctx, t, c)
		must(t, setTaints(ctx, c, theirs, ours))
		createKeptOff(ctx, t, c)
		must(t, eventually(ctx, "kubelet is told to try the pod that is held again", func() (bool, error) {
			return told(ctx, c, "held", "FailedCreatePodSandBox", "is late")
		}))
		if running(ctx, c, "held") {
			t.Error("a pod that is held runs before the proxy is there")
		}
		if kept, err := hasTaints(ctx, c, theirs, ours); err != nil || !kept {
			t.Errorf("the taint is off before the proxy is there, or it is not known whether it is: %v", err)
		}
		must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
		must(t, eventually(ctx, "the pod runs, its request is complete", func() (bool, error) { return running(ctx, c, "captured"), nil }))
		must(t, eventually(ctx, "the pod that was held runs", func() (bool, error) { return running(ctx, c, "held"), nil }))
		wantLetIn(ctx, t, c)
		wantSeen(ctx, t, c, 0, 1)
	})
	step(t, "the examples of waiting without capture end through the proxy", checkExamples)
	step(t, "who did not opt in, or may not, is left alone", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		a, err := attachment(ctx, c, namespace+"/plain")
		if err != nil || a.State != "not captured" {
			t.Errorf("the pod without the label: got %+v, %v", a, err)
		}
		if a, err := attachment(ctx, c, "kube-system/excluded"); err != nil || a.State != "" {
			t.Errorf("the pod of an excluded namespace: got %+v, %v; want it not known", a, err)
		}
		must(t, client(c).Delete(ctx, newPod("excluded", "kube-system", nil, "", "")))
	})
	step(t, "flows name their pods, outbound and inbound", inbound)
	step(t, "a label comes to a running pod, and goes", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		for _, want := range []struct{ patch, state string }{
			{`{"metadata":{"labels":{"sluice.dev/capture":"true"}}}`, "captured"},
			{`{"metadata":{"labels":{"sluice.dev/capture":null}}}`, "not captured"},
		} {
			must(t, client(c).Patch(ctx, newPod("plain", namespace, nil, "", ""), k8s.Patch{PatchType: types.MergePatchType, Data: []byte(want.patch)}))
			must(t, eventually(ctx, "the pod is "+want.state, func() (bool, error) {
				a, err := attachment(ctx, c, namespace+"/plain")
				return a.State == want.state, err
			}))
			checkAsk(ctx, t, c, "plain", want.state == "captured")
			if want.state == "captured" {
				wantSeenAs(ctx, t, c, "plain")
			}
		}
	})
	step(t, "a label comes to a pod that is older than sluice", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		must(t, client(c).Patch(ctx, newPod("older", namespace, nil, "", ""), k8s.Patch{
			PatchType: types.MergePatchType, Data: []byte(`{"metadata":{"labels":{"sluice.dev/capture":"true"}}}`),
		}))
		must(t, eventually(ctx, "it is captured, and told so", func() (bool, error) {
			return told(ctx, c, "older", "SluiceCaptured", "connections that were open before stay as they are")
		}))
		checkAsk(ctx, t, c, "older", true)
	})
	step(t, "a bad annotation fails its pod, and says so", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		p := newPod("bad", namespace, capture, "sleep 86400", "")
		p.Annotations = map[string]string{"sluice.dev/quic": "maybe"}
		must(t, client(c).Create(ctx, p))
		must(t, eventually(ctx, "an event names key and value", func() (bool, error) {
			return told(ctx, c, "bad", "SluiceRefused", `sluice.dev/quic: "maybe"`)
		}))
		must(t, client(c).Delete(ctx, p))
	})
	step(t, "a pod on the host's network cannot be captured, and says so", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		p := newPod("host", namespace, capture, "sleep 86400", "")
		p.Spec.HostNetwork = true
		must(t, client(c).Create(ctx, p))
		must(t, eventually(ctx, "an event says so", func() (bool, error) { return told(ctx, c, "host", "SluiceNotCaptured", "host's network") }))
		must(t, client(c).Delete(ctx, p))
	})
	step(t, "the DaemonSet is rolled over while requests flow", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		outcome, url := make(chan error, 1), urls(ctx, t, c)[0]
		go func() {
			_, err := inPod(ctx, c, namespace, "captured", "sh", "-c", "for i in $(seq 200); do wget -q -O/dev/null "+url+" || exit 1; done")
			outcome <- err
		}()
		patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"e2e":"%d"}}}}}`, time.Now().UnixNano())
		must(t, client(c).Patch(ctx, &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "sluice", Namespace: system}}, k8s.Patch{PatchType: types.MergePatchType, Data: patch}))
		must(t, eventually(ctx, "it is rolled out", func() (bool, error) { return rolledOut(ctx, c, system, "sluice") }))
		if err := <-outcome; err != nil {
			t.Errorf("a request failed: %v", err)
		}
	})
	step(t, "pods start without the daemon, and end where they should", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		place(ctx, t, c, system, "sluice", false)
		must(t, eventually(ctx, "the daemon is gone", func() (bool, error) {
			var pods corev1.PodList
			err := client(c).WithNamespace(system).List(ctx, &pods)
			return len(pods.Items) == 0, err
		}))
		asked, seen := askedBy(ctx, t, c), seenByProxy(ctx, t, c)
		script := "wget -q -O- " + urls(ctx, t, c)[0] + " && echo complete && sleep 86400"
		for name, labels := range map[string]map[string]string{"early": capture, "early-plain": nil} {
			must(t, client(c).Create(ctx, newPod(name, namespace, labels, script, "")))
		}
		must(t, eventually(ctx, "both run", func() (bool, error) { return running(ctx, c, "early") && running(ctx, c, "early-plain"), nil }))
		if got := askedBy(ctx, t, c); got != asked {
			t.Errorf("%d requests went out before anybody knew the labels", got-asked)
		}
		place(ctx, t, c, system, "sluice", true)
		for _, name := range []string{"early", "early-plain"} {
			must(t, eventually(ctx, name+" completes its request", func() (bool, error) {
				return strings.Contains(logs(ctx, t, c, namespace, name), "complete"), nil
			}))
		}
		wantSeen(ctx, t, c, seen, 1) // that of the labelled pod
		must(t, eventually(ctx, "the daemon is back", func() (bool, error) { return rolledOut(ctx, c, system, "sluice") }))
	})
	step(t, "the node gets its taint back while the proxy is away for long, if asked", putBack)
	step(t, "the upstream is found by its labels, and by its service", upstreamKinds)
	step(t, "the daemon may change the taint of its own node, and nothing else of any", ownNodeOnly)
	step(t, "pods start without the API server, and end where they should", withoutAPIServer)
	step(t, "another component rewrites the network configuration", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		_, err := inPod(ctx, c, namespace, "node", "sh", "-c", "f=$(ls /cni/*.conflist | head -1); cat > $f <<'END'\n"+original+"END")
		must(t, err)
		must(t, eventually(ctx, "the entry is back", func() (bool, error) {
			text, err := inPod(ctx, c, namespace, "node", "sh", "-c", "cat /cni/*.conflist")
			return strings.Contains(text, `"type":"sluice"`), err
		}))
	})
	step(t, "the daemon's role does what it needs, and no more", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
		must(t, err)
		for _, can := range []struct {
			verb, resource string
			want           bool
		}{
			{"get", "pods", true}, {"list", "pods", true}, {"watch", "pods", true}, {"list", "namespaces", true}, {"create", "events", true},
			{"patch", "pods", false}, {"delete", "pods", false}, {"create", "pods", false}, {"get", "secrets", false}, {"list", "configmaps", false},
			{"get", "services", false}, {"patch", "namespaces", false},
			{"list", "nodes", true}, {"watch", "nodes", true}, {"patch", "nodes", true}, {"patch", "nodes/status", false},
			{"update", "nodes", false}, {"delete", "nodes", false}, {"create", "nodes", false}, {"get", "nodes", false},
		} {
			resource, subresource, _ := strings.Cut(can.resource, "/")
			got, err := k.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authv1.SubjectAccessReview{Spec: authv1.SubjectAccessReviewSpec{
				User:               "system:serviceaccount:" + system + ":sluice",
				Groups:             []string{"system:serviceaccounts", "system:authenticated"},
				ResourceAttributes: &authv1.ResourceAttributes{Verb: can.verb, Resource: resource, Subresource: subresource},
			}}, metav1.CreateOptions{})
			must(t, err)
			if got.Status.Allowed != can.want {
				t.Errorf("%s %s: allowed %t, want %t", can.verb, can.resource, got.Status.Allowed, can.want)
			}
		}
	})
	step(t, "nothing is left of a deleted pod", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		names := []string{"captured", "plain", "older", "early", "early-plain", "web", "held"}
		for _, name := range names {
			must(t, client(c).Delete(ctx, newPod(name, namespace, nil, "", "")))
		}
		must(t, eventually(ctx, "the daemon has forgotten them, and so has the disk", func() (bool, error) {
			left, err := inPod(ctx, c, namespace, "node", "sh", "-c", "cat /run/sluice/attachments/* 2>/dev/null || true")
			if err != nil {
				return false, err
			}
			for _, name := range names {
				if a, err := attachment(ctx, c, namespace+"/"+name); err != nil || a.State != "" || strings.Contains(left, `"name":"`+name+`"`) {
					return false, err
				}
			}
			return true, nil
		}))
	})
	step(t, "uninstalled, the node is as it was, and works", func(ctx context.Context, t *testing.T, c *envconf.Config) {
		name, err := only(ctx, c, system, "app.kubernetes.io/name=sluice")
		must(t, err)
		_, err = inPod(ctx, c, system, name, "sluiced", "uninstall", "--cni-conf-dir=/host/cni/net.d", "--cni-bin-dir=/host/cni/bin")
		must(t, err)
		text, err := inPod(ctx, c, namespace, "node", "sh", "-c", "cat /cni/*.conflist")
		must(t, err)
		if text != original {
			t.Errorf("the network configuration is\n%s\nand was\n%s", text, original)
		}
		must(t, client(c).Create(ctx, newPod("after", namespace, nil, "sleep 86400", "")))
		must(t, eventually(ctx, "a pod starts", func() (bool, error) { return running(ctx, c, "after"), nil }))
		if a, err := attachment(ctx, c, namespace+"/after"); err != nil || a.State != "" {
			t.Errorf("a pod that was added after: got %+v, %v; want it not known", a, err)
		}
	})
}

// attached is what the daemon says of one pod; all of it is empty if it says nothing.
type attached struct {
	Pod, State, Backend string
	Waiting             int
}

func attachment(ctx context.Context, c *envconf.Config, pod string) (attached, error) {
	s, err := status(ctx, c)
	for _, a := range s.Attachments {
		if a.Pod == pod {
			return a, err
		}
	}
	return attached{}, err
}

// said is what the daemon says.
type said struct {
	Upstream struct {
		Address string
		Ready   bool
	}
	Attachments []attached
}

func status(ctx context.Context, c *envconf.Config) (s said, err error) {
	name, err := only(ctx, c, system, "app.kubernetes.io/name=sluice")
	if err != nil {
		return s, err
	}
	out, err := inPod(ctx, c, system, name, "sluiced", "status", "--json")
	if err != nil {
		return s, err
	}
	err = json.Unmarshal([]byte(out), &s)
	return s, err
}

// askedBy counts the requests that the server has answered.
func askedBy(ctx context.Context, t *testing.T, c *envconf.Config) int {
	t.Helper()
	return strings.Count(logs(ctx, t, c, namespace, "server"), "url:/\n")
}

// seenByProxy counts the requests to the server that the proxy has logged.
func seenByProxy(ctx context.Context, t *testing.T, c *envconf.Config) (seen int) {
	t.Helper()
	name, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	brackets := strings.NewReplacer("[", "", "]", "") // which mitmproxy leaves out
	log := brackets.Replace(logs(ctx, t, c, proxies, name))
	for _, url := range urls(ctx, t, c) {
		seen += strings.Count(log, "GET "+brackets.Replace(url)+"\n")
	}
	return seen
}

// wantSeen wants the proxy to log so many requests more than before. Its log comes later than its answers.
func wantSeen(ctx context.Context, t *testing.T, c *envconf.Config, before, want int) {
	t.Helper()
	must(t, eventually(ctx, fmt.Sprintf("the proxy has logged %d requests", want), func() (bool, error) {
		return seenByProxy(ctx, t, c) >= before+want, nil
	}))
	if got := seenByProxy(ctx, t, c) - before; got != want {
		t.Errorf("the proxy saw %d requests, want %d", got, want)
	}
}

// wantSeenAs wants the proxy to have seen a pod by its own address.
func wantSeenAs(ctx context.Context, t *testing.T, c *envconf.Config, pod string) {
	t.Helper()
	var p corev1.Pod
	must(t, client(c).Get(ctx, pod, namespace, &p))
	proxy, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	if !strings.Contains(logs(ctx, t, c, proxies, proxy), p.Status.PodIP+":") {
		t.Errorf("the proxy has not seen %s at its own address %s", pod, p.Status.PodIP)
	}
}

// urls are the server's: IPv4 and, in a cluster that has it, IPv6.
func urls(ctx context.Context, t *testing.T, c *envconf.Config) (urls []string) {
	t.Helper()
	var p corev1.Pod
	must(t, client(c).Get(ctx, "server", namespace, &p))
	for _, ip := range p.Status.PodIPs {
		urls = append(urls, (&url.URL{Scheme: "http", Host: strings.TrimSuffix(net.JoinHostPort(ip.IP, ""), ":"), Path: "/"}).String())
	}
	return urls
}

// checkAsk lets a pod ask the server, at each of its addresses.
func checkAsk(ctx context.Context, t *testing.T, c *envconf.Config, pod string, captured bool) {
	t.Helper()
	for _, url := range urls(ctx, t, c) {
		before := seenByProxy(ctx, t, c)
		if out, err := inPod(ctx, c, namespace, pod, "wget", "-q", "-O-", url); err != nil || out != "hello\n" {
			t.Fatalf("%s asks %s: got %q, %v", pod, url, out, err)
		}
		want := 0
		if captured {
			want = 1
		}
		wantSeen(ctx, t, c, before, want)
	}
}

func logs(ctx context.Context, t *testing.T, c *envconf.Config, namespace, pod string) string {
	t.Helper()
	text, err := containerLogs(ctx, c, namespace, pod, "")
	must(t, err)
	return text
}

// containerLogs is what one container has written, the only one if it has no name.
func containerLogs(ctx context.Context, c *envconf.Config, namespace, pod, container string) (string, error) {
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	if err != nil {
		return "", err
	}
	text, err := k.CoreV1().Pods(namespace).GetLogs(pod, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	return string(text), err
}

func told(ctx context.Context, c *envconf.Config, pod, reason, message string) (bool, error) {
	return toldIn(ctx, c, namespace, pod, reason, message)
}

func toldIn(ctx context.Context, c *envconf.Config, namespace, name, reason, message string) (bool, error) {
	var events corev1.EventList
	if err := client(c).WithNamespace(namespace).List(ctx, &events); err != nil {
		return false, err
	}
	for _, e := range events.Items {
		if e.InvolvedObject.Name == name && e.Reason == reason && strings.Contains(e.Message, message) {
			return true, nil
		}
	}
	return false, nil
}
