package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	listers "k8s.io/client-go/listers/core/v1"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

var (
	notReady = corev1.Taint{Key: Taint, Effect: corev1.TaintEffectNoSchedule}
	// others are taints of other clients; together they use every field of a taint.
	others = []corev1.Taint{
		{
			Key: "gpu", Value: "a100", Effect: corev1.TaintEffectNoExecute,
			TimeAdded: &metav1.Time{Time: time.Unix(1700000000, 0).UTC()},
		},
		{Key: Taint + "-at-all", Effect: corev1.TaintEffectPreferNoSchedule},
	}
)

// tainted is the node "here" with these taints, and with fields that strip must drop and patches must keep.
func tainted(version string, taints ...corev1.Taint) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: "here", UID: "u", ResourceVersion: version, Labels: map[string]string{"zone": "a"},
		},
		Spec: corev1.NodeSpec{ProviderID: "p", Taints: taints},
		Status: corev1.NodeStatus{
			Images:   []corev1.ContainerImage{{Names: []string{"large"}}},
			NodeInfo: corev1.NodeSystemInfo{ContainerRuntimeVersion: "containerd://2.4.2", OSImage: "x"},
		},
	}
}

var (
	isReady = attach.Status{Upstream: attach.UpstreamStatus{Ready: true, Since: time.Unix(1000, 0)}}
	isLate  = attach.Status{Upstream: attach.UpstreamStatus{
		Address: "1.2.3.4:80", Since: time.Unix(1000, 0), Reason: "connection refused",
	}}
)

func TestWantTaint(t *testing.T) {
	t.Parallel()
	unready := func(s attach.Status) attach.Status {
		s.NotReady = "not installed yet"
		return s
	}
	contested := func(s attach.Status) attach.Status {
		s = unready(s)
		s.Contested = attach.Contest{Since: time.Unix(1000, 0), Reason: "Cilium"}
		return s
	}
	const after = time.Minute
	for _, tc := range []struct {
		name    string
		tainted bool
		after   time.Duration
		status  attach.Status
		late    time.Duration
		want    bool
	}{
		{"ready", true, 0, isReady, 0, false},
		{"ready for a long time", true, after, isReady, time.Hour, false},
		{"ready and never tainted", false, after, isReady, time.Hour, false},
		{"the upstream is ready, capture is not yet", true, 0, unready(isReady), time.Hour, true},
		{"capture is not ready any more", false, after, unready(isReady), time.Hour, false},
		{"late at the start", true, 0, isLate, time.Hour, true},
		{"late, and the taint is never added", false, 0, isLate, time.Hour, false},
		{"late for a moment", false, after, isLate, after - 1, false},
		{"late for a long time", false, after, isLate, after, true},
		{"late for a long time, capture not ready", false, after, unready(isLate), after, true},
		{"contested for a long time", false, after, contested(isReady), after, true},
		{"contested for a moment", false, after, contested(isReady), after - 1, false},
		{"contested, and the taint is never added", false, 0, contested(isReady), time.Hour, false},
		{"contested, and tainted", true, 0, contested(isReady), time.Hour, true},
		{"late for a moment, and tainted", true, after, isLate, 0, true},
		{"late for a long time, and tainted", true, after, isLate, time.Hour, true},
	} {
		if got := wantTaint(tc.tainted, tc.after, tc.status, time.Unix(1000, 0).Add(tc.late)); got != tc.want {
			t.Errorf("%s: got %t, want %t", tc.name, got, tc.want)
		}
	}
}

// TestTaintIsRemovedAndAdded, by a fake API server, and everything else of the node stays as it is.
func TestTaintIsRemovedAndAdded(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address, tainted("7", others[0], notReady, others[1]))
	now := time.Unix(1000, 0).Add(time.Minute)
	seen := func(taints int) {
		t.Helper()
		testbed.Eventually(t, fmt.Sprintf("the watch shows %d taints", taints), func() bool {
			node, err := n.nodes.Get("here")
			return err == nil && len(node.Spec.Taints) == taints
		})
	}
	want := func(step string, patches int, taints ...corev1.Taint) {
		t.Helper()
		got, err := client.CoreV1().Nodes().Get(t.Context(), "here", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got.ManagedFields = nil
		if diff := cmp.Diff(tainted("7", taints...), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step, diff)
		}
		count := 0
		for _, a := range client.Actions() {
			if a, ok := a.(k8stesting.PatchAction); ok && a.GetResource().Resource == "nodes" {
				count++
			}
		}
		if count != patches {
			t.Errorf("%s: got %d patches, want %d", step, count, patches)
		}
	}
	keep := func(after time.Duration, s attach.Status) {
		t.Helper()
		if err := n.keepTaint(t.Context(), after, s, now); err != nil {
			t.Fatal(err)
		}
	}
	seen(3)
	keep(time.Minute, isLate)
	want("late, and tainted already", 0, others[0], notReady, others[1])
	keep(0, isReady)
	want("ready", 1, others...)
	seen(2)
	keep(0, isReady)
	keep(2*time.Minute, isLate)
	want("late for a moment", 1, others...)
	keep(time.Minute, isLate)
	want("late for a long time", 2, others[0], others[1], notReady)
	seen(3)
	keep(0, isReady)
	seen(2)
	contested := isReady
	contested.Contested = attach.Contest{Since: now.Add(-time.Hour), Reason: "Cilium does it"}
	keep(time.Minute, contested)
	want("contested", 4, others[0], others[1], notReady)
	for message, reason := range map[string]string{
		"taint sluice.dev/not-ready removed: " +
			"sluice is ready to capture pods, and the upstream is ready": "SluiceNodeReady",
		"taint sluice.dev/not-ready added: Cilium does it (for 1h0m0s)": "SluiceNodeTainted",
		"taint sluice.dev/not-ready added: " +
			"upstream 1.2.3.4:80 is late: connection refused (for 1m0s)": "SluiceNodeTainted",
	} {
		wantNodeEvent(t, client, reason, message)
	}
}

func wantNodeEvent(t *testing.T, client *fake.Clientset, reason, message string) {
	t.Helper()
	testbed.Eventually(t, "there is an event "+reason+": "+message, func() bool {
		events, err := client.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			node := e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == "here"
			return node && e.Reason == reason && e.Message == message
		})
	})
}

// TestContestIsReported on the node, its beginning and its end, also if it began before the watch has shown the node.
func TestContestIsReported(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address)
	contests := make(chan attach.Contest, 1)
	contests <- attach.Contest{Since: time.Unix(1000, 0), Reason: "Cilium does it"}
	var contest attach.Contest
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- n.ReportContest(ctx, func() attach.Contest {
			select {
			case contest = <-contests:
			default:
			}
			return contest
		})
	}()
	if _, err := client.CoreV1().Nodes().Create(t.Context(), tainted("7"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	wantNodeEvent(t, client, "SluicePluginUndone", "new pods are not captured when they start: Cilium does it")
	contests <- attach.Contest{}
	wantNodeEvent(t, client, "SluicePluginInstalled",
		"no other program undoes the installation of the plugin any more: new pods are captured when they start")
	cancel()
	if err := <-done; err != nil {
		t.Errorf("ReportContest: %v", err)
	}
}

// TestNodeIsStrippedAndNotNotified: the node object is large, changes often, and concerns no pod.
func TestNodeIsStrippedAndNotNotified(t *testing.T) {
	t.Parallel()
	n, client := newNode(t, address, tainted("1", notReady))
	testbed.Eventually(t, "Changed receives the first list", func() bool {
		select {
		case <-n.Changed():
			return true
		default:
			return false
		}
	})
	for version := range 20 { // enough updates for the first one to arrive, if Changed received them
		want := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{
				Name: "here", UID: "u", ResourceVersion: fmt.Sprint(version), Labels: map[string]string{"zone": "a"},
			},
			Spec: corev1.NodeSpec{Taints: []corev1.Taint{notReady}},
			Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{
				ContainerRuntimeVersion: "containerd://2.4.2",
			}},
		}
		update := tainted(want.ResourceVersion, notReady)
		if _, err := client.CoreV1().Nodes().Update(t.Context(), update, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		testbed.Eventually(t, "the watch shows the node, stripped", func() bool {
			got, err := n.nodes.Get("here")
			return err == nil && cmp.Equal(want, got)
		})
	}
	if got := n.Runtime(); got != "containerd" {
		t.Errorf("the node's runtime is %q, want containerd", got)
	}
	select {
	case <-n.Changed():
		t.Error("Changed receives changes of the node object")
	default:
	}
}

// TestTaintConflict: the patch has the resourceVersion that the watch showed, so that no taint of another client is
// lost. After a conflict it is tried again.
func TestTaintConflict(t *testing.T) {
	t.Parallel()
	attempts, log := keepTaintFor(t, 3*time.Second, func(patch []byte) error {
		var p struct {
			Metadata struct{ ResourceVersion string }
		}
		if err := json.Unmarshal(patch, &p); err != nil || p.Metadata.ResourceVersion != "7" {
			t.Errorf("patch %s, %v: want the version 7", patch, err)
		}
		return apierrors.NewConflict(corev1.Resource("nodes"), "here", errors.New("the object has been modified"))
	})
	if got := fmt.Sprint(attempts); got != "[0s 1s 2s 3s]" || log != "" {
		t.Errorf("got attempts after %s, want one each second, and the log\n%s", got, log)
	}
}

// TestTaintRefusal: a refused patch is logged once, and tried again at growing intervals.
func TestTaintRefusal(t *testing.T) {
	t.Parallel()
	attempts, log := keepTaintFor(t, 90*time.Second, func([]byte) error {
		return apierrors.NewForbidden(corev1.Resource("nodes"), "here", errors.New("the token names no node"))
	})
	if got, want := fmt.Sprint(attempts), "[0s 2s 6s 14s 30s 1m0s 1m30s]"; got != want {
		t.Errorf("got attempts after %s, want %s", got, want)
	}
	if strings.Count(log, "level=ERROR") != 1 || !strings.Contains(log, "removing taint "+Taint+" of node here") ||
		!strings.Contains(log, "the token names no node") {
		t.Errorf("got the log\n%s\nwant one error, with the refused change and the reason", log)
	}
}

// TestTaintIsRemovedForGood: a daemon that leaves the node removes the taint, and never adds it again.
func TestTaintIsRemovedForGood(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(tainted("7", others[0], notReady, others[1]))
	n := unwatched(t, client, tainted("7", others[0], notReady, others[1]))
	if err := n.RemoveTaint(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantTaints(t, client, others...)
	late := func() attach.Status { return isLate }
	if err := n.KeepTaint(t.Context(), time.Nanosecond, late); err != nil { // it would run until the end of the test
		t.Error(err)
	}
	if err := n.keepTaint(t.Context(), time.Nanosecond, isLate, time.Now()); err != nil { // had it just begun
		t.Error(err)
	}
	wantTaints(t, client, others...)
}

// TestTaintIsRemovedBeforeTheWatch shows that this daemon has just added it.
func TestTaintIsRemovedBeforeTheWatch(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(tainted("7", others...))
	n := unwatched(t, client, tainted("7", others...))
	if err := n.keepTaint(t.Context(), time.Nanosecond, isLate, time.Now()); err != nil {
		t.Fatal(err)
	}
	wantTaints(t, client, others[0], others[1], notReady)
	if err := n.RemoveTaint(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantTaints(t, client, others...)
}

// TestTaintRemovalIsRefused after the rights of the daemon have been deleted. A node without the taint needs none.
func TestTaintRemovalIsRefused(t *testing.T) {
	t.Parallel()
	for _, taints := range [][]corev1.Taint{nil, {notReady}} {
		client := fake.NewClientset(tainted("7", taints...))
		client.PrependReactor("*", "nodes", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(corev1.Resource("nodes"), "here", errors.New("no role"))
		})
		err := unwatched(t, client, tainted("7", taints...)).RemoveTaint(t.Context())
		if apierrors.IsForbidden(err) != (taints != nil) || taints != nil && !strings.Contains(err.Error(), Taint) {
			t.Errorf("the taints are %v: got %v", taints, err)
		}
	}
}

// unwatched is the view of a node that the watch has shown as seen, and does not show again.
func unwatched(t *testing.T, client *fake.Clientset, seen *corev1.Node) *Node {
	t.Helper()
	nodes := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	if err := nodes.Add(seen); err != nil {
		t.Fatal(err)
	}
	return &Node{
		name: "here", client: client, log: slog.New(slog.DiscardHandler), nodes: listers.NewNodeLister(nodes),
		events: record.NewFakeRecorder(10),
	}
}

// wantTaints checks the taints that the node "here" has at the API server.
func wantTaints(t *testing.T, client *fake.Clientset, taints ...corev1.Taint) {
	t.Helper()
	got, err := client.CoreV1().Nodes().Get(t.Context(), "here", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(taints, got.Spec.Taints); diff != "" {
		t.Errorf("taints of the node (-want +got):\n%s", diff)
	}
}

// keepTaintFor runs KeepTaint for d of a synctest's time, on a node that is ready and still tainted. answer is the API
// server's answer to each patch. It returns the times of the patches since the start, and the log.
func keepTaintFor(t *testing.T, d time.Duration, answer func(patch []byte) error) ([]time.Duration, string) {
	t.Helper()
	var attempts []time.Duration
	var log string
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		begin := time.Now()
		client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
			attempts = append(attempts, time.Since(begin))
			return true, nil, answer(a.(k8stesting.PatchAction).GetPatch())
		})
		var out bytes.Buffer
		n := unwatched(t, client, tainted("7", notReady))
		n.log = slog.New(slog.NewTextHandler(&out, nil))
		ctx, cancel := context.WithTimeout(t.Context(), d+1)
		defer cancel()
		if err := n.KeepTaint(ctx, 0, func() attach.Status { return isReady }); err != nil {
			t.Error(err)
		}
		log = out.String()
	})
	return attempts, log
}
