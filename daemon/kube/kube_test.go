package kube

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// pod is a running, ready pod on the node "here", after change.
func pod(namespace, name string, change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{NodeName: "here"},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: "10.0.0.5", PodIPs: []corev1.PodIP{{IP: "10.0.0.5"}, {IP: "fd00::5"}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
	if change != nil {
		change(p)
	}
	return p
}

func namespace(name string, labels map[string]string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
}

// newNode is the synced view of the node "here". The fake API server ignores field selectors; the end-to-end tests have
// a real one.
func newNode(t *testing.T, up config.Upstream, objects ...runtime.Object) (*Node, *fake.Clientset) {
	t.Helper()
	client := fake.NewClientset(objects...)
	n, err := New(client, "here", config.Config{Upstream: up, Capture: byTeam}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	start(t, n)
	return n, client
}

// start runs n until the end of the test, and returns when its informers have listed.
func start(t *testing.T, n *Node) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	testbed.Eventually(t, "the caches are in sync", n.Synced)
	// Synced leaves out the node's informer. Tests may only add reactors when all informers have listed.
	for _, f := range n.factories {
		f.WaitForCacheSync(ctx.Done())
	}
}

var address = config.Upstream{Address: "127.0.0.1:18080"}

// byTeam opts the namespaces of the team "a" in, and enforces the capture of those of the team "b".
var byTeam = config.Capture{Namespaces: config.Namespaces{
	Selected: []labels.Selector{labels.SelectorFromSet(labels.Set{"team": "a"})},
	Enforced: []labels.Selector{labels.SelectorFromSet(labels.Set{"team": "b"})},
}}

func TestPodFromTheCache(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address,
		namespace("ci", map[string]string{"team": "a"}),
		pod("ci", "web-0", func(p *corev1.Pod) { p.Labels = map[string]string{optin.Label: "true"} }),
		pod("ci", "static", func(p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "hash"}
		}),
	)
	client.PrependReactor("get", "*", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("unexpected request")
	})
	for _, tc := range []struct {
		pod  attach.Pod
		want error
	}{
		{attach.Pod{Namespace: "ci", Name: "web-0", UID: "uid-web-0"}, nil},
		{attach.Pod{Namespace: "ci", Name: "web-0"}, nil}, // not every runtime passes the UID
		{attach.Pod{Namespace: "ci", Name: "static", UID: "hash"}, nil},
		{attach.Pod{Namespace: "ci", Name: "web-0", UID: "uid-of-its-successor"}, optin.ErrUnknown},
		{attach.Pod{Namespace: "ci", Name: "web-1", UID: "uid-web-1"}, optin.ErrUnknown},
	} {
		got, err := n.Cached(tc.pod)
		if !errors.Is(err, tc.want) {
			t.Errorf("Cached(%+v): got %v, want %v", tc.pod, err, tc.want)
		}
		if _, err := n.Pod(t.Context(), tc.pod); !errors.Is(err, tc.want) {
			t.Errorf("Pod(%+v): got %v, want %v", tc.pod, err, tc.want)
		}
		if err == nil && got.Namespace.Value != "true" {
			t.Errorf("Cached(%+v): got %+v, want the label of the namespace", tc.pod, got)
		}
	}
}

// TestFactsOfTheSpec: the watches keep what decisions need of a pod's spec.
func TestFactsOfTheSpec(t *testing.T) {
	t.Parallel()
	n, _ := newNode(t, address, namespace("ci", nil), pod("ci", "web-0", func(p *corev1.Pod) {
		p.Spec.Containers = []corev1.Container{{Name: "app"}}
		p.Spec.InitContainers = []corev1.Container{{Name: "istio-init"}, {Name: "istio-proxy"}}
		p.Spec.DNSConfig = &corev1.PodDNSConfig{Nameservers: []string{"192.0.2.53", "2001:db8::53"}}
	}))
	got, err := n.Cached(attach.Pod{Namespace: "ci", Name: "web-0"})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"istio-init", "istio-proxy", "app"}; !slices.Equal(got.Containers, want) {
		t.Errorf("got containers %q, want %q", got.Containers, want)
	}
	resolvers := []netip.Addr{netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("2001:db8::53")}
	if !slices.Equal(got.Resolvers, resolvers) {
		t.Errorf("got resolvers %s, want %s", got.Resolvers, resolvers)
	}
}

// TestPodFromTheAPIServer: a sandbox can be ready before the watch shows its pod.
func TestPodFromTheAPIServer(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address)
	client.PrependReactor("get", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, pod("ci", "new-0", wanted), nil
	})
	client.PrependReactor("get", "namespaces", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, namespace("ci", map[string]string{"team": "a"}), nil
	})
	newPod := attach.Pod{Namespace: "ci", Name: "new-0", UID: "uid-new-0"}
	if _, err := n.Cached(newPod); !errors.Is(err, optin.ErrUnknown) {
		t.Errorf("Cached: got %v, want optin.ErrUnknown", err)
	}
	got, err := n.Pod(t.Context(), newPod)
	if err != nil || got.Labels[optin.Label] != "true" || got.Namespace.Value != "true" {
		t.Errorf("Pod: got %+v, %v", got, err)
	}
	newPod.UID = "uid-of-its-successor"
	if _, err := n.Pod(t.Context(), newPod); !errors.Is(err, optin.ErrUnknown) {
		t.Errorf("another UID: got %v, want optin.ErrUnknown", err)
	}
}

func TestChanged(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address, namespace("ci", nil), pod("ci", "web-0", nil))
	seen := func(name string, change func() error, arrived func(optin.Facts) bool) {
		t.Helper()
		if err := change(); err != nil {
			t.Fatal(err)
		}
		deadline := time.After(20 * time.Second)
		for {
			if got, err := n.Cached(attach.Pod{Namespace: "ci", Name: "web-0"}); err == nil && arrived(got) {
				return
			}
			select {
			case <-n.Changed():
			case <-deadline:
				t.Fatalf("%s: Changed has not received it", name)
			}
		}
	}
	seen("a label on the pod", func() error {
		_, err := client.CoreV1().Pods("ci").Update(t.Context(), pod("ci", "web-0", func(p *corev1.Pod) {
			p.Labels = map[string]string{optin.Label: "true"}
		}), metav1.UpdateOptions{})
		return err
	}, func(p optin.Facts) bool { return p.Labels[optin.Label] == "true" })
	seen("a label on the namespace", func() error {
		labelled := namespace("ci", map[string]string{optin.Label: "true"})
		_, err := client.CoreV1().Namespaces().Update(t.Context(), labelled, metav1.UpdateOptions{})
		return err
	}, func(p optin.Facts) bool { return p.Namespace.Value == "true" })
}

// wanted makes p a pod that opts in, with a label of its own to select it.
func wanted(p *corev1.Pod) { p.Labels = map[string]string{optin.Label: "true", "app": "proxy"} }

func TestPodsOfTheUpstream(t *testing.T) {
	t.Parallel()
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ci", Name: "proxy"},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "proxy"},
			Ports:    []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromString("web")}},
		},
	}
	byPods := byLabels(8080)
	byService := config.Upstream{Service: config.Name{Namespace: "ci", Name: "proxy"}, Port: 80}
	webPort := func(p *corev1.Pod) {
		p.Spec.Containers = []corev1.Container{{
			Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 8081, HostPort: 18080}},
		}}
	}
	wantedWebPort := func(p *corev1.Pod) { wanted(p); webPort(p) }
	notReady := func(p *corev1.Pod) { wanted(p); p.Status.Conditions = nil }
	otherLabels := func(p *corev1.Pod) { p.Labels = nil }
	byOtherPort := config.Upstream{Service: byService.Service, Port: 81}
	for _, tc := range []struct {
		name     string
		up       config.Upstream
		pod      *corev1.Pod
		upstream bool
		located  string // "" if locating fails with an error that contains message
		message  string
	}{
		{"by labels", byPods, pod("ci", "p", wanted), true, "10.0.0.5:8080", ""},
		{
			"by labels, not ready", byPods, pod("ci", "p", notReady), true, "",
			"no ready pod on here matches app=proxy in namespace ci",
		},
		{"by labels, being deleted", byPods, pod("ci", "p", func(p *corev1.Pod) {
			wanted(p)
			p.DeletionTimestamp, p.Finalizers = &metav1.Time{Time: time.Unix(1, 0)}, []string{"x"}
		}), true, "", "no ready pod"},
		{"by labels, in another namespace", byPods, pod("other", "p", wanted), false, "", "no ready pod"},
		{"by service", byService, pod("ci", "p", wantedWebPort), true, "10.0.0.5:8081", ""},
		{
			"by service, pod not ready", byService, pod("ci", "p", notReady), true, "",
			"no ready pod on here matches app=proxy in namespace ci (the selector of service ci/proxy)",
		},
		{
			"by service, pod without its port", byService, pod("ci", "p", wanted), true, "",
			"pod ci/p has no container port named web",
		},
		{
			"by service, another port", byOtherPort, pod("ci", "p", otherLabels), false, "",
			"service ci/proxy, port 81: the service has no such TCP port",
		},
		{"by address, a hostPort", address, pod("ci", "p", wantedWebPort), true, "127.0.0.1:18080", ""},
		{
			"by address, the pod's", config.Upstream{Address: "10.0.0.5:8080"}, pod("ci", "p", wanted), true,
			"10.0.0.5:8080", "",
		},
		{"by address, another", address, pod("ci", "p", wanted), false, "127.0.0.1:18080", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n, _ := newNode(t, tc.up, namespace("ci", nil), namespace("other", nil), service, tc.pod)
			got, err := n.Cached(attach.Pod{Namespace: tc.pod.Namespace, Name: "p"})
			if err != nil || got.Upstream != tc.upstream {
				t.Errorf("Cached: got upstream %t, %v; want %t", got.Upstream, err, tc.upstream)
			}
			located, err := n.Locate()
			if located != tc.located || (err == nil) != (tc.located != "") {
				t.Errorf("Locate: got %q, %v; want %q", located, err, tc.located)
			}
			if err != nil && !strings.Contains(err.Error(), tc.message) {
				t.Errorf("Locate: got the error %q, want %q in it", err, tc.message)
			}
			var proxies []netip.Addr
			if tc.upstream {
				proxies = []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")}
			}
			if got := n.Proxies(); !slices.Equal(got, proxies) {
				t.Errorf("Proxies: got %v, want %v", got, proxies)
			}
		})
	}
}

// byLabels is an upstream in namespace ci that is found by a label which the function wanted sets.
func byLabels(port uint16) config.Upstream {
	proxy := map[string]string{"app": "proxy"}
	return config.Upstream{Pods: config.Selector{Namespace: "ci", Labels: proxy}, Port: port}
}

// TestLocateYoungestReadyPod: during a rollout, two pods of the upstream are ready.
func TestLocateYoungestReadyPod(t *testing.T) {
	t.Parallel()
	at := func(second int64, ip string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			wanted(p)
			p.CreationTimestamp, p.Status.PodIP = metav1.Unix(second, 0), ip
		}
	}
	n, _ := newNode(t, byLabels(80), namespace("ci", nil),
		pod("ci", "old", at(1, "10.0.0.1")), pod("ci", "young", at(3, "fd00::3")), pod("ci", "mid", at(2, "10.0.0.2")))
	if got, err := n.Locate(); err != nil || got != "[fd00::3]:80" {
		t.Errorf("Locate: got %q, %v; want the youngest", got, err)
	}
}

// TestUpstreamServiceMissing: the facts of pods that did not opt in are known all the same.
func TestUpstreamServiceMissing(t *testing.T) {
	t.Parallel()
	n, _ := newNode(t, config.Upstream{Service: config.Name{Namespace: "ci", Name: "proxy"}, Port: 80},
		namespace("ci", nil), pod("ci", "labelled", wanted), pod("ci", "plain", nil))
	if _, err := n.Cached(attach.Pod{Namespace: "ci", Name: "plain"}); err != nil {
		t.Errorf("without the label: %v", err)
	}
	if _, err := n.Cached(attach.Pod{Namespace: "ci", Name: "labelled"}); !errors.Is(err, optin.ErrUnknown) {
		t.Errorf("with the label: got %v, want optin.ErrUnknown", err)
	}
}

func TestRunning(t *testing.T) {
	t.Parallel()
	n, _ := newNode(t, address, namespace("ci", nil),
		pod("ci", "runs", wanted),
		pod("ci", "host", func(p *corev1.Pod) { p.Spec.HostNetwork = true }),
		pod("ci", "sandboxed", func(p *corev1.Pod) { p.Spec.RuntimeClassName = new("gvisor") }),
		pod("ci", "initializes", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
		pod("ci", "starts", func(p *corev1.Pod) { p.Status.Phase, p.Status.PodIPs = corev1.PodPending, nil }),
		pod("ci", "ended", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
	)
	got := map[string]optin.Running{}
	for _, r := range n.Running() {
		got[r.Pod.Name] = r
	}
	host, runs := got["host"], got["runs"]
	_, initializes := got["initializes"]
	if !initializes || len(got) != 4 || !host.HostNetwork || runs.HostNetwork || len(runs.IPs) != 2 ||
		!optin.Wanted(runs.Facts) || runs.RuntimeClass != "" || got["sandboxed"].RuntimeClass != "gvisor" {
		t.Errorf("Running: got %+v", got)
	}
}

// TestTerminating: a pod that is being deleted has containers until it has ended.
func TestTerminating(t *testing.T) {
	t.Parallel()
	deleted := func(p *corev1.Pod) {
		p.DeletionTimestamp, p.Finalizers = &metav1.Time{Time: time.Now()}, []string{"a/b"}
	}
	ended := func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }
	for _, tc := range []struct {
		name   string
		change func(*corev1.Pod)
		want   bool
	}{
		{"runs", wanted, false},
		{"ended", ended, false},
		{"being deleted", deleted, true},
		{"being deleted, and ended", func(p *corev1.Pod) { deleted(p); ended(p) }, false},
	} {
		n, _ := newNode(t, address, namespace("ci", nil), pod("ci", "web", tc.change))
		if got := n.Terminating(); got != tc.want {
			t.Errorf("%s: got %t, want %t", tc.name, got, tc.want)
		}
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address)
	web := attach.Pod{Namespace: "ci", Name: "web-0", UID: "u"}
	n.Report(web, true, "SluiceRefused", "annotation sluice.dev/quic: bad")
	n.Report(attach.Pod{}, true, "SluiceRefused", "a pod without a name")
	testbed.Eventually(t, "the event is there", func() bool {
		events, err := client.CoreV1().Events("ci").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(events.Items) != 1 {
			return false
		}
		e := events.Items[0]
		return e.Reason == "SluiceRefused" && e.InvolvedObject.UID == "u" &&
			e.Type == corev1.EventTypeWarning && e.Source.Component == "sluiced"
	})
}
