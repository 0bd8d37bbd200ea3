package optin

import (
	"slices"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/sluice-cni/sluice/daemon/config"
)

// Namespace is the setting of a namespace for its pods. The zero value is none.
type Namespace struct {
	// Value is a value of Label.
	Value string
	// Reason says where the value comes from; it is empty if there is none.
	Reason string
}

// NamespaceOf returns the setting of a namespace with these labels.
func NamespaceOf(c config.Namespaces, of map[string]string) Namespace {
	value, labelled := of[Label]
	switch {
	case matches(c.Enforced, of):
		return Namespace{Enforced, "capture.namespaces.enforced selects the namespace"}
	case labelled:
		return Namespace{value, labelReason("namespace", value)}
	case matches(c.Selected, of):
		return Namespace{"true", "capture.namespaces.selected selects the namespace"}
	}
	return Namespace{}
}

func matches(selectors []labels.Selector, of map[string]string) bool {
	return slices.ContainsFunc(selectors, func(s labels.Selector) bool { return s.Matches(labels.Set(of)) })
}

// Asks reports whether the namespace asks for capture, as the function Asks does for a pod.
func (n Namespace) Asks() bool { return n.Reason != "" && n.Value != "false" }
