package optin

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

var compareAddresses = cmpopts.EquateComparable(netip.Prefix{}, netip.AddrPort{}, netip.Addr{})

func conf() config.Config {
	return config.Config{
		Upstream: config.Upstream{Address: "127.0.0.1:18080", Protocol: config.Connect},
		Capture: config.Capture{
			Source: config.All, IncludePorts: ports(80, 443), ExcludePorts: ports(22),
			ExcludeCIDRs: ruleset.LinkLocal(), RejectQUIC: true, Other: ruleset.OtherAllow,
			Ports: ruleset.Ports{Outbound: 16001, Inbound: 16006},
		},
	}
}

func addresses(s ...string) []netip.Addr {
	var r []netip.Addr
	for _, a := range s {
		r = append(r, netip.MustParseAddr(a))
	}
	return r
}

func ports(single ...uint16) []ruleset.PortRange {
	var r []ruleset.PortRange
	for _, p := range single {
		r = append(r, ruleset.PortRange{First: p, Last: p})
	}
	return r
}

func cidrs(s ...string) []netip.Prefix {
	var r []netip.Prefix
	for _, c := range s {
		r = append(r, netip.MustParsePrefix(c))
	}
	return r
}

// configured is the ruleset that conf gives a pod without annotations.
func configured() ruleset.Ruleset {
	return ruleset.Ruleset{
		Interfaces: []string{"eth0"}, IncludePorts: ports(80, 443), ExcludePorts: ports(22),
		ExcludeCIDRs: ruleset.LinkLocal(), RejectQUIC: true, Other: ruleset.OtherAllow,
		Ports: ruleset.Ports{Outbound: 16001, Inbound: 16006},
	}
}

func TestAnnotations(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		annotations map[string]string
		change      func(*ruleset.Ruleset) // makes the wanted ruleset of configured's
	}{
		{"none", nil, func(*ruleset.Ruleset) {}},
		{
			"with another prefix",
			map[string]string{"sluice.dev": "x", "example.com/quic": "maybe", "xsluice.dev/y": ""},
			func(*ruleset.Ruleset) {},
		},
		{
			"included ports replace", map[string]string{"sluice.dev/include-outbound-ports": "8443, 9000-9001"},
			func(r *ruleset.Ruleset) {
				r.IncludePorts = append(ports(8443), ruleset.PortRange{First: 9000, Last: 9001})
			},
		},
		{
			"an empty list includes all ports", map[string]string{"sluice.dev/include-outbound-ports": " "},
			func(r *ruleset.Ruleset) { r.IncludePorts = nil },
		},
		{
			"excluded ports are added", map[string]string{"sluice.dev/exclude-outbound-ports": "5432"},
			func(r *ruleset.Ruleset) { r.ExcludePorts = ports(22, 5432) },
		},
		{
			"included CIDRs", map[string]string{"sluice.dev/include-outbound-cidrs": "10.0.0.0/8,fd00::/8"},
			func(r *ruleset.Ruleset) { r.IncludeCIDRs = cidrs("10.0.0.0/8", "fd00::/8") },
		},
		{
			"excluded CIDRs are added", map[string]string{"sluice.dev/exclude-outbound-cidrs": "203.0.113.7"},
			func(r *ruleset.Ruleset) { r.ExcludeCIDRs = append(ruleset.LinkLocal(), cidrs("203.0.113.7/32")...) },
		},
		{
			"excluded interfaces", map[string]string{"sluice.dev/exclude-interfaces": "wg0, docker0"},
			func(r *ruleset.Ruleset) { r.ExcludeInterfaces = []string{"wg0", "docker0"} },
		},
		{
			"QUIC allowed", map[string]string{"sluice.dev/quic": "allow"},
			func(r *ruleset.Ruleset) { r.RejectQUIC = false },
		},
		{"QUIC rejected", map[string]string{"sluice.dev/quic": "reject"}, func(*ruleset.Ruleset) {}},
		{
			"the late policy does not change the ruleset",
			map[string]string{"sluice.dev/when-late": "queue", "sluice.dev/late-timeout": "0s"},
			func(*ruleset.Ruleset) {},
		},
		{
			"nothing but TCP and DNS", map[string]string{"sluice.dev/other": "dns"},
			func(r *ruleset.Ruleset) {
				r.Other, r.Resolvers = ruleset.OtherDNS, addresses("10.96.0.10", "fd00:96::a")
			},
		},
		{
			"nothing but TCP", map[string]string{"sluice.dev/other": "deny"},
			func(r *ruleset.Ruleset) { r.Other = ruleset.OtherDeny },
		},
		{"no inbound ports", map[string]string{"sluice.dev/capture-inbound-ports": ""}, func(*ruleset.Ruleset) {}},
		{
			"inbound ports", map[string]string{"sluice.dev/capture-inbound-ports": "8080, 9000-9001"},
			func(r *ruleset.Ruleset) {
				r.InboundPorts = append(ports(8080), ruleset.PortRange{First: 9000, Last: 9001})
			},
		},
	} {
		want := configured()
		tc.change(&want)
		// The same rulesets, however often and in which order the resolvers are found: rulesets are compared.
		resolvers := addresses("fd00:96::a", "10.96.0.10", "fd00:96::a")
		d, err := Decide(conf(), Facts{Annotations: tc.annotations, Resolvers: resolvers}, []string{"eth0"})
		if err != nil || !d.Capture || d.Reason == "" {
			t.Errorf("%s: got %+v, %v", tc.name, d, err)
			continue
		}
		if diff := cmp.Diff(&want, d.Ruleset, compareAddresses); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
}

// TestTrustAnnotations checks that each annotation about TLS replaces the configured value alone.
func TestTrustAnnotations(t *testing.T) {
	t.Parallel()
	c := conf()
	c.Trust = attach.Trust{CA: true, TLS: attach.Pass, Nested: attach.Pass}
	for _, tc := range []struct {
		annotations map[string]string
		want        attach.Trust
	}{
		{nil, c.Trust},
		{map[string]string{"sluice.dev/ca": "auto"}, c.Trust},
		{map[string]string{"sluice.dev/ca": "off"}, attach.Trust{TLS: attach.Pass, Nested: attach.Pass}},
		{
			map[string]string{"sluice.dev/tls": "inspect"},
			attach.Trust{CA: true, TLS: attach.Inspect, Nested: attach.Pass},
		},
		{
			map[string]string{"sluice.dev/nested": "inspect"},
			attach.Trust{CA: true, TLS: attach.Pass, Nested: attach.Inspect},
		},
	} {
		d, err := Decide(c, Facts{Annotations: tc.annotations}, []string{"eth0"})
		if err != nil || d.Trust != tc.want {
			t.Errorf("%v: got %+v, %v; want %+v", tc.annotations, d.Trust, err, tc.want)
		}
	}
}

// TestLateAnnotations checks that the pod's policy and timeout each replace the configured one alone.
func TestLateAnnotations(t *testing.T) {
	t.Parallel()
	c := conf()
	c.Late = attach.Late{Policy: attach.Hold, Timeout: time.Minute}
	for _, tc := range []struct {
		annotations map[string]string
		want        attach.Late
	}{
		{nil, c.Late},
		{
			map[string]string{"sluice.dev/when-late": "queue"},
			attach.Late{Policy: attach.Queue, Timeout: time.Minute},
		},
		{
			map[string]string{"sluice.dev/when-late": "direct"},
			attach.Late{Policy: attach.Direct, Timeout: time.Minute},
		},
		{
			map[string]string{"sluice.dev/late-timeout": "90s"},
			attach.Late{Policy: attach.Hold, Timeout: 90 * time.Second},
		},
		{
			map[string]string{"sluice.dev/when-late": "queue", "sluice.dev/late-timeout": "0s"},
			attach.Late{Policy: attach.Queue},
		},
	} {
		d, err := Decide(c, Facts{Annotations: tc.annotations}, []string{"eth0"})
		if err != nil || d.Late != tc.want {
			t.Errorf("%v: got %+v, %v; want %+v", tc.annotations, d.Late, err, tc.want)
		}
	}
}

// TestBadAnnotations checks that the error names the annotation and the value.
func TestBadAnnotations(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ key, value, want string }{
		{"include-outbound-ports", "http", `"http"`},
		{"include-outbound-ports", "80,,443", `""`},
		{"include-outbound-ports", "80,", `""`},
		{"include-outbound-ports", "80 443", `"80 443"`},
		{"exclude-outbound-ports", "0", `"0"`},
		{"include-outbound-cidrs", "10.1.2.3/8", "host bits"},
		{"exclude-outbound-cidrs", "example.com", `"example.com"`},
		{"exclude-interfaces", "eth+", `"eth+"`},
		{"quic", "", "want reject or allow"},
		{"quic", "Reject", "want reject or allow"},
		{"other", "none", "want one of allow, dns, deny"},
		{"other", "", "want one of allow, dns, deny"},
		{"when-late", "never", "not one of [queue hold direct]"},
		{"late-timeout", "90", "is not a duration"},
		{"late-timeout", "-1s", "is not a duration"},
		{"capture-inbound-ports", "x", `"x"`},
		{"include-ports", "80", "unknown; the known ones are ca, capture-inbound-ports, "},
		{"", "x", "unknown"},
	} {
		key := attach.AnnotationPrefix + tc.key
		d, err := Decide(conf(), Facts{Annotations: map[string]string{key: tc.value}}, []string{"eth0"})
		if err == nil || d.Capture || !strings.Contains(err.Error(), "annotation "+key+": ") ||
			!strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %q: got %+v, %v; want an error with %q", key, tc.value, d, err, tc.want)
		}
	}
}

// TestOtherCanOnlyTighten: a pod cannot have more of what is neither TCP nor QUIC than the configuration allows.
func TestOtherCanOnlyTighten(t *testing.T) {
	t.Parallel()
	for i, configured := range ruleset.Others {
		c := conf()
		c.Capture.Other = configured
		if d, err := Decide(c, Facts{}, []string{"eth0"}); err != nil || d.Ruleset.Other != configured {
			t.Errorf("%s, no annotation: got %+v, %v", configured, d.Ruleset, err)
		}
		for j, asked := range ruleset.Others {
			facts := Facts{Annotations: map[string]string{"sluice.dev/other": asked}}
			d, err := Decide(c, facts, []string{"eth0"})
			if j >= i {
				if err != nil || d.Ruleset.Other != asked {
					t.Errorf("%s, asked for %s: got %+v, %v", configured, asked, d.Ruleset, err)
				}
				continue
			}
			want := fmt.Sprintf("annotation sluice.dev/other: %q: the configuration has capture.other: %s, "+
				"and a pod may only be stricter", asked, configured)
			if err == nil || err.Error() != want || d.Capture {
				t.Errorf("%s, asked for %s: got %+v, %v; want the error %q", configured, asked, d, err, want)
			}
		}
	}
}

// TestDecideDoesNotChangeTheConfiguration, which the next pod's decision uses too.
func TestDecideDoesNotChangeTheConfiguration(t *testing.T) {
	t.Parallel()
	c := conf()
	// Spare capacity: an append to the shared slice would write to it.
	c.Capture.ExcludePorts = append(make([]ruleset.PortRange, 0, 8), c.Capture.ExcludePorts...)
	c.Capture.ExcludeCIDRs = append(make([]netip.Prefix, 0, 8), c.Capture.ExcludeCIDRs...)
	decide := func(port, cidr string) *ruleset.Ruleset {
		d, err := Decide(c, Facts{Annotations: map[string]string{
			"sluice.dev/exclude-outbound-ports": port, "sluice.dev/exclude-outbound-cidrs": cidr,
		}}, []string{"eth0"})
		if err != nil {
			t.Fatal(err)
		}
		return d.Ruleset
	}
	first := decide("1001", "192.0.2.1")
	decide("1002", "192.0.2.2")
	if diff := cmp.Diff(ports(22, 1001), first.ExcludePorts); diff != "" {
		t.Errorf("the first pod's ports, after the second (-want +got):\n%s", diff)
	}
	want := append(ruleset.LinkLocal(), cidrs("192.0.2.1/32")...)
	if diff := cmp.Diff(want, first.ExcludeCIDRs, compareAddresses); diff != "" {
		t.Errorf("the first pod's CIDRs, after the second (-want +got):\n%s", diff)
	}
}

func TestUpstreamReachableFromThePod(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"192.0.2.1:18080":          "192.0.2.1:18080",
		"[2001:db8::1]:18080":      "[2001:db8::1]:18080",
		"[::ffff:192.0.2.1]:18080": "192.0.2.1:18080",
		"[fe80::1%eth0]:18080":     "[fe80::1]:18080",
		"127.0.0.1:18080":          "invalid AddrPort",
		"127.1.2.3:18080":          "invalid AddrPort",
		"[::1]:18080":              "invalid AddrPort",
		"[::ffff:127.0.0.1]:18080": "invalid AddrPort",
		"0.0.0.0:18080":            "invalid AddrPort",
		"[::]:18080":               "invalid AddrPort",
		"proxy.example:18080":      "invalid AddrPort",
		"localhost:18080":          "invalid AddrPort",
	} {
		c := conf()
		c.Upstream.Address = address
		d, err := Decide(c, Facts{}, []string{"eth0", "net1"})
		if err != nil {
			t.Errorf("%s: %v", address, err)
			continue
		}
		if got := d.Ruleset.Upstream.String(); got != want {
			t.Errorf("%s: got %s, want %s", address, got, want)
		}
		if err := d.Ruleset.Validate(); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// FuzzAnnotate checks that any annotation gives an error, or a valid ruleset.
func FuzzAnnotate(f *testing.F) {
	for name := range annotations {
		for _, value := range []string{
			"", "80,443", "8000-8999", "10.0.0.0/8, fd00::1", "eth0", "allow", "deny", "queue", "0s", "x,", ",",
		} {
			f.Add(name, value)
		}
	}
	f.Fuzz(func(t *testing.T, name, value string) {
		facts := Facts{Annotations: map[string]string{attach.AnnotationPrefix + name: value}}
		d, err := Decide(conf(), facts, []string{"eth0"})
		if err != nil {
			if d.Capture || !strings.Contains(err.Error(), attach.AnnotationPrefix+name) {
				t.Errorf("%q: %q: got %+v, %v", name, value, d, err)
			}
			return
		}
		if err := d.Ruleset.Validate(); err != nil {
			t.Errorf("%q: %q: the ruleset is not valid: %v", name, value, err)
		}
	})
}

func TestLabels(t *testing.T) {
	t.Parallel()
	c := conf()
	c.Capture.Source = config.Kubernetes
	labelled := func(value string) map[string]string { return map[string]string{Label: value} }
	on, off := labelled("true"), labelled("false")
	selector := func(team string) []labels.Selector {
		return []labels.Selector{
			labels.SelectorFromSet(labels.Set{"team": "none"}), labels.SelectorFromSet(labels.Set{"team": team}),
		}
	}
	c.Capture.Namespaces = config.Namespaces{Selected: selector("a"), Enforced: selector("b")}
	team := func(name string, label map[string]string) map[string]string {
		all := map[string]string{"team": name}
		maps.Copy(all, label)
		return all
	}
	enforced := labelled(Enforced)
	for _, tc := range []struct {
		name              string
		pod, namespace    map[string]string
		upstream, capture bool
		reason            string
	}{
		{name: "no label", reason: "neither the pod nor its namespace"},
		{name: "pod", pod: on, capture: true, reason: "of the pod is true"},
		{name: "namespace", namespace: on, capture: true, reason: "of the namespace is true"},
		{name: "pod opts out", pod: off, namespace: on, reason: "of the pod is false"},
		{name: "pod opts in", pod: on, namespace: off, capture: true, reason: "of the pod is true"},
		{name: "the upstream's own pod", namespace: on, upstream: true, reason: "the upstream runs in this pod"},
		{name: "enforced", namespace: enforced, capture: true, reason: "of the namespace is enforced"},
		{name: "enforced, pod opts out", pod: off, namespace: enforced, capture: true, reason: "namespace is enforced"},
		{name: "enforced, bad pod", pod: labelled("x"), namespace: enforced, capture: true, reason: "is enforced"},
		{name: "enforced, upstream", namespace: enforced, upstream: true, reason: "the upstream runs in this pod"},
		{name: "selected", namespace: team("a", nil), capture: true, reason: "namespaces.selected selects"},
		{name: "selected, pod opts out", pod: off, namespace: team("a", nil), reason: "of the pod is false"},
		{name: "selected, label false", namespace: team("a", off), reason: "of the namespace is false"},
		{
			name: "enforced by a selector", namespace: team("b", nil), capture: true,
			reason: "namespaces.enforced selects",
		},
		{
			name: "enforced by a selector, all opt out", pod: off, namespace: team("b", off), capture: true,
			reason: "namespaces.enforced selects",
		},
		{name: "another team", namespace: team("c", nil), reason: "neither the pod nor its namespace"},
	} {
		facts := Facts{
			Labels: tc.pod, Namespace: NamespaceOf(c.Capture.Namespaces, tc.namespace), Upstream: tc.upstream,
		}
		d, err := Decide(c, facts, []string{"eth0"})
		if err != nil || d.Capture != tc.capture || (d.Ruleset != nil) != tc.capture ||
			!strings.Contains(d.Reason, tc.reason) {
			t.Errorf("%s: got %+v, %v; want captured %t, because %q", tc.name, d, err, tc.capture, tc.reason)
		}
	}
	for _, bad := range []Facts{
		{Labels: labelled("yes")}, {Labels: enforced},
		{Namespace: NamespaceOf(c.Capture.Namespaces, labelled(""))},
		{Labels: on, Annotations: map[string]string{attach.AnnotationPrefix + "quic": "maybe"}},
	} {
		d, err := Decide(c, bad, []string{"eth0"})
		if err == nil || !strings.Contains(err.Error(), attach.AnnotationPrefix) {
			t.Errorf("%+v: got %+v, %v; want an error that names the key", bad, d, err)
		}
	}
	// A bad annotation of a pod that did not opt in is ignored.
	notOptedIn := Facts{Annotations: map[string]string{attach.AnnotationPrefix + "quic": "maybe"}}
	if d, err := Decide(c, notOptedIn, nil); err != nil || d.Capture {
		t.Errorf("not opted in: got %+v, %v", d, err)
	}
}
