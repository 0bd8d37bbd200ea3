package config

import (
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

// Namespaces selects namespaces by labels of the operator's choice.
type Namespaces struct {
	// Selected are opted in, unless they have the label of sluice.
	Selected []labels.Selector
	// Enforced are captured, against any label of sluice on them and on their pods.
	Enforced []labels.Selector
}

// selectors returns the setter of a list of label selectors, as Kubernetes writes them.
func selectors(to *[]labels.Selector) setter {
	return func(raw json.RawMessage) error {
		var items []json.RawMessage
		if err := json.Unmarshal(raw, &items); err != nil || items == nil {
			return fmt.Errorf("%.100s is not a list", raw)
		}
		*to = nil
		for _, item := range items {
			if string(item) == "null" { // which would select everything
				return fmt.Errorf("%s is not a label selector", item)
			}
			var s metav1.LabelSelector
			if err := yaml.UnmarshalStrict(item, &s); err != nil {
				return fmt.Errorf("%.100s is not a label selector: %w", item, err)
			}
			selector, err := metav1.LabelSelectorAsSelector(&s)
			if err != nil {
				return fmt.Errorf("%.100s is not a label selector: %w", item, err)
			}
			*to = append(*to, selector)
		}
		return nil
	}
}
