package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// anything is the value of a key that allows every value.
const anything = "any"

// Allowance is one value, or one range of values, that an annotation of a pod may have. Of a list, each element needs
// one. The zero value allows the empty text alone.
type Allowance struct {
	Any   bool
	Ports ruleset.PortRange
	CIDR  netip.Prefix
	Text  string
}

// Covers reports whether a allows a value.
func (a Allowance) Covers(value string) bool {
	switch {
	case a.Any:
		return true
	case a.Ports != ruleset.PortRange{}:
		p, err := ruleset.ParsePortRange(value)
		return err == nil && a.Ports.First <= p.First && p.Last <= a.Ports.Last
	case a.CIDR.IsValid():
		c, err := ruleset.ParseCIDR(value)
		return err == nil && a.CIDR.Bits() <= c.Bits() && a.CIDR.Contains(c.Addr())
	}
	return a.Text == value
}

// allowances has the parser of the allowed values of every annotation, by its name without the prefix.
var allowances = map[string]func(string) (Allowance, error){
	"include-outbound-ports": allowedPorts,
	"exclude-outbound-ports": allowedPorts,
	"include-outbound-cidrs": allowedCIDR,
	"exclude-outbound-cidrs": allowedCIDR,
	"capture-inbound-ports":  allowedPorts,
	"exclude-interfaces":     allowedText(func(s string) (string, error) { return s, ruleset.ValidateInterface(s) }),
	"quic":                   allowedText(rejectQUIC),
	"other":                  allowedText(oneOf(ruleset.Others)),
	"when-late":              allowedText(LatePolicy),
	"late-timeout":           allowedText(Timeout),
	"ca":                     allowedCA,
	"tls":                    allowedText(TLSPolicy),
	"nested":                 allowedText(TLSPolicy),
}

func allowedPorts(s string) (Allowance, error) {
	ports, err := ruleset.ParsePortRange(s)
	return Allowance{Ports: ports}, err
}

func allowedCIDR(s string) (Allowance, error) {
	cidr, err := ruleset.ParseCIDR(s)
	return Allowance{CIDR: cidr}, err
}

func allowedCA(s string) (Allowance, error) {
	ca, err := TrustCA(s)
	if !ca {
		s = "off" // or false
	}
	return Allowance{Text: s}, err
}

// allowedText allows exactly one text, if parse accepts it.
func allowedText[T any](parse func(string) (T, error)) func(string) (Allowance, error) {
	return func(s string) (Allowance, error) {
		_, err := parse(s)
		return Allowance{Text: s}, err
	}
}

// Annotations returns the names of all annotations, without the prefix, sorted.
func Annotations() []string { return slices.Sorted(maps.Keys(allowances)) }

// annotations returns the setter of the annotations that pods may have: a mapping from names to lists of values. "any"
// stands for all annotations, and for all values of one.
func annotations(of *Capture) setter {
	return func(raw json.RawMessage) error {
		if scalar(raw) == anything {
			of.Annotations = nil
			return nil
		}
		var values map[string]json.RawMessage
		if err := json.Unmarshal(raw, &values); err != nil || values == nil {
			return fmt.Errorf("%.100s is neither any nor a mapping of annotations", raw)
		}
		of.Annotations = map[string][]Allowance{}
		var errs []error
		for _, name := range slices.Sorted(maps.Keys(values)) {
			parse, ok := allowances[name]
			if !ok {
				errs = append(errs, fmt.Errorf("%s: unknown; the known ones are %s", name,
					strings.Join(Annotations(), ", ")))
				continue
			}
			allowed := []Allowance{{Any: true}}
			if scalar(values[name]) != anything {
				if err := list(&allowed, parse)(values[name]); err != nil {
					errs = append(errs, fmt.Errorf("%s: %w", name, err))
				}
			}
			of.Annotations[name] = allowed
		}
		return errors.Join(errs...)
	}
}
