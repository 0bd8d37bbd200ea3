package kube

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// renewInterval is the time after which an unchanged list of namespaces is written again, for its time.
const renewInterval = time.Minute

// KeepOptedIn keeps the list of the namespaces that have opted in, for the plugin, until ctx ends. It always returns
// nil.
func (n *Node) KeepOptedIn(ctx context.Context, file attach.OptedInFile) error {
	renew := time.NewTicker(renewInterval)
	defer renew.Stop()
	list, err := file.Read()
	if err != nil {
		n.log.Debug("the namespaces that opted in before are not known", "err", err)
	}
	written, failed := attach.OptedIn{}, false
	for {
		if n.Synced() {
			list.Namespaces = n.optedIn(list.Namespaces)
			now := time.Now()
			if !slices.Equal(list.Namespaces, written.Namespaces) || now.Sub(written.AsOf).Abs() >= renewInterval {
				list.AsOf = now
				err := file.Write(list)
				if err == nil {
					written = list
				} else if !failed {
					n.log.Error("the plugin does not learn which namespaces opted in; trying again", "err", err)
				}
				failed = err != nil
			}
		}
		select {
		case <-n.relabeled:
		case <-renew.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// optedIn returns the namespaces that opt in, those with a pod on this node that does, and those of before, sorted. A
// namespace stays on the list until it is deleted: its next pod may opt in too.
func (n *Node) optedIn(before []string) []string {
	all := []string{}
	namespaces, _ := n.namespaces.List(labels.Everything()) // a list from the cache cannot fail
	for _, ns := range namespaces {
		if optin.NamespaceOf(n.selected, ns.Labels).Asks() || slices.Contains(before, ns.Name) {
			all = append(all, ns.Name)
		}
	}
	for _, p := range n.scheduled() {
		if optin.Asks(p.Labels) {
			all = append(all, p.Namespace)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
