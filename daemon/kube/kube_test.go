package kube

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// newNode is the view of the node "here", in sync. The fake API server does not select by field; the tests of the
// whole have a real one.
func newNode(t *testing.T, up config.Upstream, objects ...runtime.Object) (*Node, *fake.Clientset) {
	t.Helper()
	client := fake.NewClientset(objects...)
	n, err := New(client, "here", up, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
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
	for _, f := range n.factories { // the one that nobody else waits for too: reactors may only come when all have listed
		f.WaitForCacheSync(ctx.Done())
	}
	return n, client
}

var address = config.Upstream{Address: "127.0.0.1:18080"}

func TestPodIsKnown(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address,
		namespace("ci", map[string]string{"team": "a"}),
		pod("ci", "web-0", func(p *corev1.Pod) { p.Labels = map[string]string{optin.Label: "true"} }),
		pod("ci", "static", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "hash"} }),
	)
	client.PrependReactor("get", "*", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("it was asked")
	})
	for _, tc := range []struct {
		who  attach.Pod
		want error
	}{
		{attach.Pod{Namespace: "ci", Name: "web-0", UID: "uid-web-0"}, nil},
		{attach.Pod{Namespace: "ci", Name: "web-0"}, nil}, // not every runtime tells the UID
		{attach.Pod{Namespace: "ci", Name: "static", UID: "hash"}, nil},
		{attach.Pod{Namespace: "ci", Name: "web-0", UID: "of its successor"}, optin.ErrUnknown},
		{attach.Pod{Namespace: "ci", Name: "web-1", UID: "uid-web-1"}, optin.ErrUnknown},
	} {
		got, err := n.Cached(tc.who)
		if !errors.Is(err, tc.want) {
			t.Errorf("Cached(%+v): got %v, want %v", tc.who, err, tc.want)
		}
		if _, err := n.Pod(t.Context(), tc.who); !errors.Is(err, tc.want) {
			t.Errorf("Pod(%+v): got %v, want %v", tc.who, err, tc.want)
		}
		if err == nil && got.NamespaceLabels["team"] != "a" {
			t.Errorf("Cached(%+v): got %+v, want the labels of the namespace", tc.who, got)
		}
	}
}

// TestPodIsAskedForWhenTheWatchIsBehind: a sandbox can be quicker than the watch.
func TestPodIsAskedForWhenTheWatchIsBehind(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address)
	client.PrependReactor("get", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, pod("ci", "new-0", func(p *corev1.Pod) { p.Labels = map[string]string{optin.Label: "true"} }), nil
	})
	client.PrependReactor("get", "namespaces", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, namespace("ci", map[string]string{"team": "a"}), nil
	})
	who := attach.Pod{Namespace: "ci", Name: "new-0", UID: "uid-new-0"}
	if _, err := n.Cached(who); !errors.Is(err, optin.ErrUnknown) {
		t.Errorf("Cached: got %v, want it unknown", err)
	}
	got, err := n.Pod(t.Context(), who)
	if err != nil || got.Labels[optin.Label] != "true" || got.NamespaceLabels["team"] != "a" {
		t.Errorf("Pod: got %+v, %v", got, err)
	}
	who.UID = "uid-of-its-successor"
	if _, err := n.Pod(t.Context(), who); !errors.Is(err, optin.ErrUnknown) {
		t.Errorf("another UID: got %v, want it unknown", err)
	}
}

func TestChangesAreTold(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address, namespace("ci", nil), pod("ci", "web-0", nil))
	seen := func(what string, change func() error, holds func(optin.Pod) bool) {
		t.Helper()
		if err := change(); err != nil {
			t.Fatal(err)
		}
		deadline := time.After(20 * time.Second)
		for {
			if got, err := n.Cached(attach.Pod{Namespace: "ci", Name: "web-0"}); err == nil && holds(got) {
				return
			}
			select {
			case <-n.Changed():
			case <-deadline:
				t.Fatalf("%s: nobody told", what)
			}
		}
	}
	seen("a label on the pod", func() error {
		_, err := client.CoreV1().Pods("ci").Update(t.Context(), pod("ci", "web-0", func(p *corev1.Pod) {
			p.Labels = map[string]string{optin.Label: "true"}
		}), metav1.UpdateOptions{})
		return err
	}, func(p optin.Pod) bool { return p.Labels[optin.Label] == "true" })
	seen("a label on the namespace", func() error {
		_, err := client.CoreV1().Namespaces().Update(t.Context(), namespace("ci", map[string]string{optin.Label: "true"}), metav1.UpdateOptions{})
		return err
	}, func(p optin.Pod) bool { return p.NamespaceLabels[optin.Label] == "true" })
}

func wanted(p *corev1.Pod) { p.Labels = map[string]string{optin.Label: "true", "app": "proxy"} }

func TestUpstreamsOwnPods(t *testing.T) {
	t.Parallel()
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ci", Name: "proxy"},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "proxy"},
			Ports:    []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromString("web")}},
		},
	}
	byPods := config.Upstream{Pods: config.Selector{Namespace: "ci", Labels: map[string]string{"app": "proxy"}}, Port: 8080}
	byService := config.Upstream{Service: config.Name{Namespace: "ci", Name: "proxy"}, Port: 80}
	webPort := func(p *corev1.Pod) {
		p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 8081, HostPort: 18080}}}}
	}
	for _, tc := range []struct {
		name     string
		up       config.Upstream
		pod      *corev1.Pod
		upstream bool
		locate   string // "" for an error
	}{
		{"by labels", byPods, pod("ci", "p", wanted), true, "10.0.0.5:8080"},
		{"by labels, not ready", byPods, pod("ci", "p", func(p *corev1.Pod) { wanted(p); p.Status.Conditions = nil }), true, ""},
		{"by labels, going", byPods, pod("ci", "p", func(p *corev1.Pod) {
			wanted(p)
			p.DeletionTimestamp, p.Finalizers = &metav1.Time{Time: time.Unix(1, 0)}, []string{"x"}
		}), true, ""},
		{"by labels, of another namespace", byPods, pod("other", "p", wanted), false, ""},
		{"by service", byService, pod("ci", "p", func(p *corev1.Pod) { wanted(p); webPort(p) }), true, "10.0.0.5:8081"},
		{"by service, without its port", byService, pod("ci", "p", wanted), true, ""},
		{"by service, another port", config.Upstream{Service: byService.Service, Port: 81}, pod("ci", "p", func(p *corev1.Pod) { p.Labels = nil }), false, ""},
		{"by address, of the node's port", address, pod("ci", "p", func(p *corev1.Pod) { wanted(p); webPort(p) }), true, "127.0.0.1:18080"},
		{"by address, of the pod", config.Upstream{Address: "10.0.0.5:8080"}, pod("ci", "p", wanted), true, "10.0.0.5:8080"},
		{"by address, of another", address, pod("ci", "p", wanted), false, "127.0.0.1:18080"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n, _ := newNode(t, tc.up, namespace("ci", nil), namespace("other", nil), service, tc.pod)
			got, err := n.Cached(attach.Pod{Namespace: tc.pod.Namespace, Name: "p"})
			if err != nil || got.Upstream != tc.upstream {
				t.Errorf("Cached: got upstream %t, %v; want %t", got.Upstream, err, tc.upstream)
			}
			where, err := n.Locate()
			if where != tc.locate || (err == nil) != (tc.locate != "") {
				t.Errorf("Locate: got %q, %v; want %q", where, err, tc.locate)
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

// TestYoungestReadyPodIsTheUpstream: while one replaces the other, both are ready.
func TestYoungestReadyPodIsTheUpstream(t *testing.T) {
	t.Parallel()
	at := func(second int64, ip string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			wanted(p)
			p.CreationTimestamp, p.Status.PodIP = metav1.Unix(second, 0), ip
		}
	}
	n, _ := newNode(t, config.Upstream{Pods: config.Selector{Namespace: "ci", Labels: map[string]string{"app": "proxy"}}, Port: 80},
		namespace("ci", nil), pod("ci", "old", at(1, "10.0.0.1")), pod("ci", "young", at(3, "fd00::3")), pod("ci", "mid", at(2, "10.0.0.2")))
	if got, err := n.Locate(); err != nil || got != "[fd00::3]:80" {
		t.Errorf("Locate: got %q, %v; want the youngest", got, err)
	}
}

// TestServiceThatIsNotThere: what nobody wants captured is decided all the same.
func TestServiceThatIsNotThere(t *testing.T) {
	t.Parallel()
	n, _ := newNode(t, config.Upstream{Service: config.Name{Namespace: "ci", Name: "proxy"}, Port: 80},
		namespace("ci", nil), pod("ci", "labelled", wanted), pod("ci", "plain", nil))
	if _, err := n.Cached(attach.Pod{Namespace: "ci", Name: "plain"}); err != nil {
		t.Errorf("without the label: %v", err)
	}
	if _, err := n.Cached(attach.Pod{Namespace: "ci", Name: "labelled"}); !errors.Is(err, optin.ErrUnknown) {
		t.Errorf("with the label: got %v, want it unknown", err)
	}
}

func TestRunning(t *testing.T) {
	t.Parallel()
	n, _ := newNode(t, address, namespace("ci", nil),
		pod("ci", "runs", wanted),
		pod("ci", "host", func(p *corev1.Pod) { p.Spec.HostNetwork = true }),
		pod("ci", "starts", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
		pod("ci", "ended", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
	)
	got := map[string]optin.Running{}
	for _, r := range n.Running() {
		got[r.Pod.Name] = r
	}
	if len(got) != 2 || !got["host"].HostNetwork || got["runs"].HostNetwork || len(got["runs"].IPs) != 2 || !optin.Wanted(got["runs"].Facts) {
		t.Errorf("Running: got %+v", got)
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address)
	n.Report(attach.Pod{Namespace: "ci", Name: "web-0", UID: "u"}, true, "SluiceRefused", "annotation sluice.dev/quic: bad")
	n.Report(attach.Pod{}, true, "SluiceRefused", "of no pod")
	testbed.Eventually(t, "the event is there", func() bool {
		events, err := client.CoreV1().Events("ci").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return len(events.Items) == 1 && events.Items[0].Reason == "SluiceRefused" && events.Items[0].InvolvedObject.UID == "u" &&
			events.Items[0].Type == corev1.EventTypeWarning && events.Items[0].Source.Component == "sluiced"
	})
}
