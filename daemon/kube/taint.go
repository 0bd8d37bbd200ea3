package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// Taint is the key of the taint that keeps new pods off a node on which sluice is not ready.
const Taint = "sluice.dev/not-ready"

const (
	// taintInterval is the time between two checks of the taint. A check reads the informer's cache, not the API
	// server.
	taintInterval = time.Second
	// maxTaintInterval bounds the time between two attempts while the API server refuses the change.
	maxTaintInterval = 30 * time.Second
)

// KeepTaint removes the taint from this node when status is ready, and adds it again when the upstream has been late,
// or the plugin's installation contested, for after; 0: it never adds it. It runs until ctx ends, and always returns
// nil. It ends too when RemoveTaint is called.
func (n *Node) KeepTaint(ctx context.Context, after time.Duration, status func() attach.Status) error {
	interval, logged := taintInterval, ""
	for ctx.Err() == nil && !n.taint.isLeft() {
		switch err := n.keepTaint(ctx, after, status(), time.Now()); {
		case err == nil, apierrors.IsConflict(err): // a conflict: the watch is about to show another client's change
			interval, logged = taintInterval, ""
		case ctx.Err() == nil:
			if err.Error() != logged {
				n.log.Error("the node's taint cannot be changed", "node", n.name, "err", err)
			}
			interval, logged = min(2*interval, maxTaintInterval), err.Error()
		}
		_ = pause.For(ctx, interval) // the loop looks at ctx
	}
	return nil
}

func (n *Node) keepTaint(ctx context.Context, after time.Duration, s attach.Status, now time.Time) error {
	node := n.seen()
	if node == nil {
		return nil
	}
	n.taint.mu.Lock()
	defer n.taint.mu.Unlock()
	tainted := slices.ContainsFunc(node.Spec.Taints, isOurs)
	want := wantTaint(tainted, after, s, now)
	if want == tainted || n.taint.left {
		return nil
	}
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), isOurs)
	warning, event, attempt, change := false, "SluiceNodeReady", "removing", "removed"
	why := "sluice is ready to capture pods, and the upstream is ready"
	if want {
		taints = append(taints, corev1.Taint{Key: Taint, Effect: corev1.TaintEffectNoSchedule})
		warning, event, attempt, change = true, "SluiceNodeTainted", "adding", "added"
		reason, since := s.Contested.Reason, s.Contested.Since
		if s.Contested.IsZero() {
			reason, since = fmt.Sprint(s.Upstream.Late()), s.Upstream.Since
		}
		why = fmt.Sprintf("%s (for %s)", reason, now.Sub(since).Round(time.Second))
	}
	n.taint.added = n.taint.added || want // an attempt that seems to fail may succeed
	if err := n.setTaints(ctx, node.ResourceVersion, taints); err != nil {
		return fmt.Errorf("%s taint %s of node %s: %w", attempt, Taint, n.name, err)
	}
	n.log.Info("node taint changed", "node", n.name, "taint", Taint, "change", change, "reason", why)
	n.reportNode(node, warning, event, fmt.Sprintf("taint %s %s: %s", Taint, change, why))
	return nil
}

// taintState is the part of the taint's state that the watch does not show.
type taintState struct {
	mu    sync.Mutex // guards the fields, and serialises changes of the taint
	added bool       // this daemon has tried to add the taint; the watch may not show it yet
	left  bool       // the daemon leaves the node, and does not add the taint any more
}

func (s *taintState) isLeft() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left
}

func isOurs(t corev1.Taint) bool { return t.Key == Taint }

// RemoveTaint removes the taint from this node, and ends KeepTaint. It is for a daemon that leaves the node for good:
// no other one would remove the taint. The caller may call it again after an error. It sends no request if the node has
// no taint as far as the watch and this daemon know.
func (n *Node) RemoveTaint(ctx context.Context) error {
	n.taint.mu.Lock()
	defer n.taint.mu.Unlock()
	n.taint.left = true
	seen := n.seen()
	if seen != nil && !n.taint.added && !slices.ContainsFunc(seen.Spec.Taints, isOurs) {
		return nil
	}
	if err := n.removeTaint(ctx); err != nil {
		return fmt.Errorf("removing taint %s of node %s: %w", Taint, n.name, err)
	}
	return nil
}

func (n *Node) removeTaint(ctx context.Context) error {
	node, err := n.askNode(ctx)
	if err != nil || node == nil || !slices.ContainsFunc(node.Spec.Taints, isOurs) {
		return err
	}
	if err := n.setTaints(ctx, node.ResourceVersion, slices.DeleteFunc(node.Spec.Taints, isOurs)); err != nil {
		return err
	}
	n.log.Info("node taint changed", "node", n.name, "taint", Taint, "change", "removed",
		"reason", "sluice is being removed from this node")
	return nil
}

// seen returns this node as the watch has shown it, or nil if it has not yet.
func (n *Node) seen() *corev1.Node {
	node, err := n.nodes.Get(n.name)
	if err != nil {
		return nil
	}
	return node
}

// askNode asks the API server for this node, as askOwner does; nil if it is gone.
func (n *Node) askNode(ctx context.Context) (*corev1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	nodes, err := n.client.CoreV1().Nodes().List(ctx, named(n.name))
	if err != nil {
		return nil, err
	}
	return first(nodes.Items), nil
}

// reportNode makes an event on this node, a warning or a normal one.
func (n *Node) reportNode(node *corev1.Node, warning bool, reason, message string) {
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: n.name, UID: node.UID}
	n.events.Event(ref, eventType(warning), reason, message)
}

// ReportContest makes an event on this node when a contest about the plugin's installation begins, and when it ends. It
// runs until ctx ends, and always returns nil.
func (n *Node) ReportContest(ctx context.Context, contest func() attach.Contest) error {
	var reported attach.Contest
	for ctx.Err() == nil {
		if now := contest(); now.Since != reported.Since {
			if node, err := n.nodes.Get(n.name); err == nil { // the watch has shown the node
				n.reportContest(node, now)
				reported = now
			}
		}
		_ = pause.For(ctx, taintInterval) // the loop looks at ctx
	}
	return nil
}

func (n *Node) reportContest(node *corev1.Node, c attach.Contest) {
	if c.IsZero() {
		n.reportNode(node, false, "SluicePluginInstalled",
			"no other program undoes the installation of the plugin any more: new pods are captured when they start")
		return
	}
	n.reportNode(node, true, "SluicePluginUndone", "new pods are not captured when they start: "+c.Reason)
}

// wantTaint tells whether the node should have the taint. The taint stays as it is while the upstream has been late, or
// the plugin's installation contested, for less than after, and while the daemon is not ready yet.
func wantTaint(tainted bool, after time.Duration, s attach.Status, now time.Time) bool {
	contested := !s.Contested.IsZero()
	switch {
	case after > 0 && contested && now.Sub(s.Contested.Since) >= after:
		return true
	case s.Upstream.Ready:
		return tainted && s.NotReady != ""
	case after > 0 && now.Sub(s.Upstream.Since) >= after:
		return true
	}
	return tainted
}

// setTaints replaces all taints of this node, because a merge patch replaces a list as a whole. version is the
// resourceVersion from which taints was made. With it the API server refuses the patch (conflict) if another client has
// changed the node since, so that no other taint is lost.
func (n *Node) setTaints(ctx context.Context, version string, taints []corev1.Taint) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": version},
		"spec":     map[string]any{"taints": taints},
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	_, err = n.client.CoreV1().Nodes().Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}
