package optin

import (
	"errors"
	"fmt"
	"slices"

	"github.com/sluice-cni/sluice/daemon/config"
)

// permission says which annotations a pod may have.
type permission struct {
	allowed  map[string][]config.Allowance // nil: all
	enforced bool                          // only those that let no more of the traffic around the proxy
}

// strict has the annotations that let no more of a pod's traffic around the proxy, or past its inspection, than the
// configuration does, each with the values that do not; nil stands for all values. late-timeout is not among them: with
// the policy direct, a connection goes around the proxy after it.
var strict = map[string][]string{
	"other": nil, "capture-inbound-ports": nil,
	"quic": {"reject"}, "when-late": {"queue", "hold"},
	"ca": {"auto"}, "tls": {"inspect"}, "nested": {"inspect"},
}

// have returns an error if a pod may not have an annotation of that name with that value, which is valid.
func (p permission) have(name, value string) error {
	if p.enforced {
		values, ok := strict[name]
		if !ok || values != nil && !slices.Contains(values, value) {
			return errors.New("the namespace enforces the capture, so a pod may not ask for less of it")
		}
	}
	if p.allowed == nil {
		return nil
	}
	parts, err := list(value, func(s string) (string, error) { return s, nil })
	if err != nil {
		return err
	}
	for _, part := range parts {
		covers := func(a config.Allowance) bool { return a.Covers(part) }
		if !slices.ContainsFunc(p.allowed[name], covers) {
			return fmt.Errorf("the configuration (capture.annotations) does not allow %q", part)
		}
	}
	return nil
}
