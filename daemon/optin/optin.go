// Package optin decides whether an attachment is captured, and which part of its traffic: from the configuration and
// from the labels and annotations of its pod.
package optin

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Label is the label of a pod or a namespace that opts in ("true") or out ("false"). The pod's label takes precedence,
// unless the namespace has the value Enforced.
const Label = attach.AnnotationPrefix + "capture"

// Enforced is the value of the label of a namespace that lets no pod opt out.
const Enforced = "enforced"

// Facts are the properties of a pod on which a decision depends. They come from the API server, or, with capture.source
// all, from the attachment, which has annotations only.
type Facts struct {
	Labels, Annotations map[string]string
	// Namespace is the setting of the pod's namespace.
	Namespace Namespace
	// Containers are the names of the pod's containers and init containers.
	Containers []string
	// Resolvers are the name servers that the pod may use, as far as they are known.
	Resolvers []netip.Addr
	// Upstream is set if the upstream runs in this pod. Such a pod is never captured.
	Upstream bool
}

// Running is a pod that runs on this node.
type Running struct {
	Pod         attach.Pod
	IPs         []netip.Addr
	HostNetwork bool
	// RuntimeClass is the name of the pod's RuntimeClass, if it has one.
	RuntimeClass string
	Facts        Facts
}

// ErrUnknown means that a pod's facts are not known yet, because the API server does not answer or has not seen the
// pod. The caller can try again later.
var ErrUnknown = errors.New("the pod's labels are not known yet")

// Decide decides about one attachment of a pod. interfaces are all interfaces of the pod's netns that CNI has attached.
// An error means that a label or an annotation of the pod has an invalid value, and names the key and the value; or
// that the pod asks for capture and has a sidecar of its own.
func Decide(c config.Config, facts Facts, interfaces []string) (attach.Decision, error) {
	capture, reason := true, "capture.source is all"
	if c.Capture.Source == config.Kubernetes {
		var err error
		if capture, reason, err = wanted(facts); err != nil {
			return attach.Decision{}, err
		}
	}
	if !capture {
		return attach.Decision{Reason: reason}, nil
	}
	if err := noSidecar(c, facts); err != nil {
		return attach.Decision{}, err
	}
	r := ruleset.Ruleset{
		Interfaces:   interfaces,
		Upstream:     podReachable(c.Upstream.Address),
		IncludePorts: c.Capture.IncludePorts,
		ExcludePorts: c.Capture.ExcludePorts,
		ExcludeCIDRs: c.Capture.ExcludeCIDRs,
		RejectQUIC:   c.Capture.RejectQUIC,
		Other:        c.Capture.Other,
		Ports:        c.Capture.Ports,
	}
	d := attach.Decision{Capture: true, Ruleset: &r, Late: c.Late, Trust: c.Trust, Reason: reason}
	may := permission{allowed: c.Capture.Annotations, enforced: facts.Namespace.Value == Enforced}
	if err := annotate(&d, facts.Annotations, may); err != nil {
		return attach.Decision{}, err
	}
	if r.Other == ruleset.OtherDNS {
		r.Resolvers = slices.Clone(facts.Resolvers)
		slices.SortFunc(r.Resolvers, netip.Addr.Compare) // rulesets are compared
		r.Resolvers = slices.Compact(r.Resolvers)
	}
	return d, nil
}

// Wanted tells whether the pod asks to be captured by a valid label, its own or its namespace's. It is also true for
// the upstream's own pods, which Decide never captures.
func Wanted(facts Facts) bool {
	facts.Upstream = false
	capture, _, err := wanted(facts)
	return capture && err == nil
}

// Asks reports whether the labels of a pod ask for capture. A value that is neither true nor false counts, since the
// pod must not pass by mistake.
func Asks(labels map[string]string) bool {
	value, labelled := labels[Label]
	return labelled && value != "false"
}

func wanted(facts Facts) (capture bool, reason string, err error) {
	kind, value, reason := "namespace", facts.Namespace.Value, facts.Namespace.Reason
	known := []string{"true", "false", Enforced}
	if own, labelled := facts.Labels[Label]; labelled && value != Enforced {
		kind, value, reason, known = "pod", own, labelReason("pod", own), known[:2]
	}
	switch {
	case reason == "":
		return false, "neither the pod nor its namespace has the label " + Label, nil
	case !slices.Contains(known, value):
		return false, "", fmt.Errorf("label %s of the %s: %q: want %s", Label, kind, value, strings.Join(known, " or "))
	case value != "false" && facts.Upstream:
		return false, "the upstream runs in this pod", nil
	}
	return value != "false", reason, nil
}

func labelReason(kind, value string) string {
	return fmt.Sprintf("label %s of the %s is %s", Label, kind, value)
}

// podReachable parses the upstream's address if a pod could dial it. It is the zero value for a host name and for the
// loopback and unspecified addresses, which lead a pod to itself.
func podReachable(address string) netip.AddrPort {
	ap, err := netip.ParseAddrPort(address)
	if err != nil || ap.Addr().IsLoopback() || ap.Addr().IsUnspecified() {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port())
}

// annotations has a function for every known annotation, by its name without the prefix. It parses the value and
// applies it to the decision. Included ports and CIDRs of a pod replace those of the configuration; excluded ones are
// added to them.
var annotations = map[string]func(*attach.Decision, string) error{
	"include-outbound-ports": func(d *attach.Decision, v string) (err error) {
		d.Ruleset.IncludePorts, err = list(v, ruleset.ParsePortRange)
		return err
	},
	"exclude-outbound-ports": func(d *attach.Decision, v string) error {
		ports, err := list(v, ruleset.ParsePortRange)
		d.Ruleset.ExcludePorts = slices.Concat(d.Ruleset.ExcludePorts, ports)
		return err
	},
	"include-outbound-cidrs": func(d *attach.Decision, v string) (err error) {
		d.Ruleset.IncludeCIDRs, err = list(v, ruleset.ParseCIDR)
		return err
	},
	"exclude-outbound-cidrs": func(d *attach.Decision, v string) error {
		cidrs, err := list(v, ruleset.ParseCIDR)
		d.Ruleset.ExcludeCIDRs = slices.Concat(d.Ruleset.ExcludeCIDRs, cidrs)
		return err
	},
	"exclude-interfaces": func(d *attach.Decision, v string) error {
		names, err := list(v, func(s string) (string, error) { return s, ruleset.ValidateInterface(s) })
		d.Ruleset.ExcludeInterfaces = slices.Concat(d.Ruleset.ExcludeInterfaces, names)
		return err
	},
	"quic": func(d *attach.Decision, v string) error {
		if v != "reject" && v != "allow" {
			return errors.New("want reject or allow")
		}
		d.Ruleset.RejectQUIC = v == "reject"
		return nil
	},
	"other": func(d *attach.Decision, v string) error {
		asked := slices.Index(ruleset.Others, v)
		configured := max(slices.Index(ruleset.Others, d.Ruleset.Other), 0) // the first is the default
		switch {
		case asked < 0:
			return fmt.Errorf("want one of %s", strings.Join(ruleset.Others, ", "))
		case asked < configured:
			return fmt.Errorf("the configuration has capture.other: %s, and a pod may only be stricter",
				ruleset.Others[configured])
		}
		d.Ruleset.Other = v
		return nil
	},
	"when-late": func(d *attach.Decision, v string) (err error) {
		d.Late.Policy, err = config.LatePolicy(v)
		return err
	},
	"late-timeout": func(d *attach.Decision, v string) (err error) {
		d.Late.Timeout, err = config.Timeout(v)
		return err
	},
	"ca": func(d *attach.Decision, v string) (err error) {
		d.Trust.CA, err = config.TrustCA(v)
		return err
	},
	"tls": func(d *attach.Decision, v string) (err error) {
		d.Trust.TLS, err = config.TLSPolicy(v)
		return err
	},
	"nested": func(d *attach.Decision, v string) (err error) {
		d.Trust.Nested, err = config.TLSPolicy(v)
		return err
	},
	"capture-inbound-ports": func(d *attach.Decision, v string) (err error) {
		d.Ruleset.InboundPorts, err = list(v, ruleset.ParsePortRange)
		return err
	},
}

// written are the annotations, without the prefix, that sluice itself writes on pods. They are for the plugin.
var written = []string{strings.TrimPrefix(attach.OptInAnnotation, attach.AnnotationPrefix)}

// annotate applies the annotations of a pod that begin with the prefix. The error names the key and the value.
func annotate(d *attach.Decision, podAnnotations map[string]string, may permission) error {
	for _, key := range slices.Sorted(maps.Keys(podAnnotations)) {
		name, ours := strings.CutPrefix(key, attach.AnnotationPrefix)
		if !ours || slices.Contains(written, name) {
			continue
		}
		apply, ok := annotations[name]
		if !ok {
			known := slices.Sorted(maps.Keys(annotations))
			return fmt.Errorf("annotation %s: unknown; the known ones are %s", key, strings.Join(known, ", "))
		}
		err := apply(d, podAnnotations[key])
		if err == nil {
			err = may.have(name, podAnnotations[key])
		}
		if err != nil {
			return fmt.Errorf("annotation %s: %q: %w", key, podAnnotations[key], err)
		}
	}
	return nil
}

// list splits "80, 443" and parses each part; an empty value is an empty list.
func list[T any](value string, parse func(string) (T, error)) ([]T, error) {
	if strings.TrimSpace(value) == "" {
		return nil, nil
	}
	var values []T
	for part := range strings.SplitSeq(value, ",") {
		v, err := parse(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		values = append(values, v)
	}
	return values, nil
}
