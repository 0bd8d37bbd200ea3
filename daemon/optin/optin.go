// Package optin decides about attachments: whether a pod is captured, and what of its traffic.
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

// Label opts a pod in or out; that of its namespace counts where the pod has none.
const Label = Prefix + "capture"

// Pod is what the API server says of a pod, as far as it matters here.
type Pod struct {
	Labels, NamespaceLabels, Annotations map[string]string
	// Upstream is set for the pods that the upstream runs in.
	Upstream bool
}

// Running is a pod that runs on this node.
type Running struct {
	Pod         attach.Pod
	IPs         []netip.Addr
	HostNetwork bool
	Facts       Pod
}

// ErrUnknown means that nothing can be said of a pod yet: the API server does not answer, or does not know it.
var ErrUnknown = errors.New("the pod's labels are not known")

// Decide says what becomes of an attachment of pod, given every interface through which its container is
// attached. An error is the pod's own: a label or an annotation that is none.
func Decide(c config.Config, pod Pod, interfaces []string) (attach.Decision, error) {
	capture, reason := true, "capture.source is all"
	if c.Capture.Source == config.Kubernetes {
		var err error
		if capture, reason, err = wanted(pod); err != nil {
			return attach.Decision{}, err
		}
	}
	if !capture {
		return attach.Decision{Reason: reason}, nil
	}
	r := ruleset.Ruleset{
		Interfaces:   interfaces,
		Upstream:     reachable(c.Upstream.Address),
		IncludePorts: c.Capture.IncludePorts,
		ExcludePorts: c.Capture.ExcludePorts,
		ExcludeCIDRs: c.Capture.ExcludeCIDRs,
		RejectQUIC:   c.Capture.RejectQUIC,
	}
	d := attach.Decision{Capture: true, Ruleset: &r, Late: c.Late, Reason: reason}
	if err := annotate(&d, pod.Annotations); err != nil {
		return attach.Decision{}, err
	}
	d.Ruleset.Direct = d.Late.Policy == attach.Direct && d.Late.Timeout > 0
	return d, nil
}

// Wanted tells whether pod asks to be captured, whatever stands against it.
func Wanted(pod Pod) bool {
	pod.Upstream = false
	capture, _, err := wanted(pod)
	return capture && err == nil
}

func wanted(pod Pod) (capture bool, reason string, err error) {
	for _, by := range []struct {
		who    string
		labels map[string]string
	}{{"pod", pod.Labels}, {"namespace", pod.NamespaceLabels}} {
		value, labelled := by.labels[Label]
		if !labelled {
			continue
		}
		if value != "true" && value != "false" {
			return false, "", fmt.Errorf("label %s of the %s: %q: want true or false", Label, by.who, value)
		}
		reason = fmt.Sprintf("label %s of the %s is %s", Label, by.who, value)
		if value == "true" && pod.Upstream {
			return false, "it is the upstream's own pod", nil
		}
		return value == "true", reason, nil
	}
	return false, "neither pod nor namespace has the label " + Label, nil
}

// reachable is the upstream's address if a pod could dial it: not a name, and not the node's loopback.
func reachable(address string) netip.AddrPort {
	ap, err := netip.ParseAddrPort(address)
	if err != nil || ap.Addr().IsLoopback() || ap.Addr().IsUnspecified() {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port())
}

// Prefix is that of every annotation of ours.
const Prefix = "sluice.dev/"

// annotations is every annotation, and what it does to the decision. What a pod includes replaces what the
// configuration includes; what it excludes is added.
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
	"when-late": func(d *attach.Decision, v string) (err error) {
		d.Late.Policy, err = config.LatePolicy(v)
		return err
	},
	"late-timeout": func(d *attach.Decision, v string) (err error) {
		d.Late.Timeout, err = config.Timeout(v)
		return err
	},
	"capture-inbound-ports": func(d *attach.Decision, v string) (err error) {
		d.Ruleset.InboundPorts, err = list(v, ruleset.ParsePortRange)
		return err
	},
}

// annotate applies a pod's annotations. The error names the key and the value.
func annotate(d *attach.Decision, pod map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(pod)) {
		name, ours := strings.CutPrefix(key, Prefix)
		if !ours {
			continue
		}
		apply, ok := annotations[name]
		if !ok {
			return fmt.Errorf("annotation %s: unknown; known are %s", key, strings.Join(slices.Sorted(maps.Keys(annotations)), ", "))
		}
		if err := apply(d, pod[key]); err != nil {
			return fmt.Errorf("annotation %s: %q: %w", key, pod[key], err)
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
