package kube

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestKeepOptedIn: a namespace comes onto the list by its own label, by the configuration, or by the label of a pod. It
// stays there until it is deleted.
func TestKeepOptedIn(t *testing.T) {
	t.Parallel()
	asks := map[string]string{optin.Label: "true"}
	n, client := newNode(t, address,
		namespace("before", nil), namespace("by-pod", nil), namespace("dev", nil),
		namespace("by-label", asks), namespace("wrong", map[string]string{optin.Label: "yes"}),
		namespace("out", map[string]string{optin.Label: "false"}),
		namespace("chosen", map[string]string{"team": "a"}),
		namespace("chosen-out", map[string]string{"team": "a", optin.Label: "false"}),
		namespace("kept", map[string]string{"team": "b", optin.Label: "false"}),
		pod("by-pod", "web", func(p *corev1.Pod) { p.Labels = asks }), pod("dev", "plain", nil),
	)
	file := attach.NewOptedInFile(t.TempDir())
	earlier := time.Now().Add(-time.Hour)
	if err := file.Write(attach.OptedIn{AsOf: earlier, Namespaces: []string{"before", "deleted"}}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- n.KeepOptedIn(ctx, file) }()
	wantList := func(want ...string) {
		t.Helper()
		testbed.Eventually(t, "the list is "+testbed.JSON(want), func() bool {
			o, err := file.Read()
			return err == nil && slices.Equal(o.Namespaces, want) && o.AsOf.After(earlier)
		})
	}
	wantList("before", "by-label", "by-pod", "chosen", "kept", "wrong")

	ns := client.CoreV1().Namespaces()
	if _, err := ns.Update(ctx, namespace("by-label", nil), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := ns.Update(ctx, namespace("dev", asks), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	wantList("before", "by-label", "by-pod", "chosen", "dev", "kept", "wrong")
	if err := ns.Delete(ctx, "before", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wantList("by-label", "by-pod", "chosen", "dev", "kept", "wrong")
	cancel()
	if err := <-done; err != nil {
		t.Errorf("KeepOptedIn: %v", err)
	}
}

// TestOptedInBeforeTheFirstList: without the API server the list stays as it was.
func TestOptedInBeforeTheFirstList(t *testing.T) {
	t.Parallel()
	n := &Node{
		relabeled: make(chan struct{}, 1), synced: []cache.InformerSynced{func() bool { return false }},
	}
	file := attach.NewOptedInFile(t.TempDir())
	want := attach.OptedIn{AsOf: time.Now().Round(0), Namespaces: []string{"ci"}}
	if err := file.Write(want); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(string(file))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- n.KeepOptedIn(ctx, file) }()
	n.relabeled <- struct{}{}
	testbed.Eventually(t, "the change is looked at", func() bool { return len(n.relabeled) == 0 })
	cancel()
	if err := <-done; err != nil {
		t.Errorf("KeepOptedIn: %v", err)
	}
	after, err := os.Stat(string(file))
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the list was written: %v", err)
	}
}
