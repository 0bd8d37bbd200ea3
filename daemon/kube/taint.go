package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-cni/sluice/plugin/attach"
)

// Taint is the key of the taint that keeps pods off a node which is not ready for them.
const Taint = "sluice.dev/not-ready"

const (
	// taintInterval is how often the taint is compared with what it is to be. That asks nobody.
	taintInterval = time.Second
	// maxTaintPause is how long an API server that goes on refusing is left alone.
	maxTaintPause = 30 * time.Second
)

// KeepTaint takes the taint off this node when status is ready, and puts it back when the upstream has been late for as
// long as after, unless that is 0. It ends with ctx.
func (n *Node) KeepTaint(ctx context.Context, after time.Duration, status func() attach.Status) error {
	pause, said := taintInterval, ""
	for {
		switch err := n.keepTaint(ctx, after, status(), time.Now()); {
		case err == nil, apierrors.IsConflict(err): // the watch is about to show what somebody else has changed
			pause, said = taintInterval, ""
		case ctx.Err() == nil:
			if err.Error() != said {
				n.log.Error("the node's taint stays as it is for now", "err", err)
			}
			pause, said = min(2*pause, maxTaintPause), err.Error()
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
	}
}

func (n *Node) keepTaint(ctx context.Context, after time.Duration, s attach.Status, now time.Time) error {
	node, err := n.nodes.Get(n.name)
	if err != nil {
		return nil //nolint:nilerr // the watch has not shown it yet
	}
	ours := func(t corev1.Taint) bool { return t.Key == Taint }
	tainted := slices.ContainsFunc(node.Spec.Taints, ours)
	want := wantTaint(tainted, after, s, now)
	if want == tainted {
		return nil
	}
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), ours)
	kind, reason, change, why := corev1.EventTypeNormal, "SluiceNodeReady", "taken off", "capture and upstream are ready"
	if want {
		taints = append(taints, corev1.Taint{Key: Taint, Effect: corev1.TaintEffectNoSchedule})
		kind, reason, change = corev1.EventTypeWarning, "SluiceNodeTainted", "put back"
		why = fmt.Sprintf("for %s now, %v", now.Sub(s.Upstream.Since).Round(time.Second), s.Upstream.Late())
	}
	if err := n.setTaints(ctx, node.ResourceVersion, taints); err != nil {
		return fmt.Errorf("taint %s of node %s, to be %s: %w", Taint, n.name, change, err)
	}
	n.log.Info("the node's taint is changed", "node", n.name, "taint", Taint, "change", change, "why", why)
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: n.name, UID: node.UID}
	n.events.Eventf(ref, kind, reason, "taint %s is %s: %s", Taint, change, why)
	return nil
}

// wantTaint tells whether the node is to have the taint. An upstream that is late for a shorter time, and a daemon that
// is only starting, leave it as it is.
func wantTaint(tainted bool, after time.Duration, s attach.Status, now time.Time) bool {
	switch {
	case s.Upstream.Ready:
		return tainted && s.NotReady != ""
	case after > 0 && now.Sub(s.Upstream.Since) >= after:
		return true
	}
	return tainted
}

// setTaints replaces the taints of this node as a whole, which is how the API server keeps them. The version that they
// were made of sees to it that nobody's are lost.
func (n *Node) setTaints(ctx context.Context, version string, taints []corev1.Taint) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": version},
		"spec":     map[string]any{"taints": taints},
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err = n.client.CoreV1().Nodes().Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}
