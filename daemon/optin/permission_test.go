package optin

import (
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// parse reads a configuration with a list of allowed annotations.
func parse(t *testing.T, allowed string) config.Config {
	t.Helper()
	text := "upstream: {protocol: sockets}\ncapture: {source: kubernetes, annotations: " + allowed + "}"
	c, err := config.Parse([]byte(text), func(string) (string, bool) { return "", false })
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestAllowedAnnotations: a pod is refused if it asks for more than the configuration allows, or in a namespace that
// enforces the capture for less of it.
func TestAllowedAnnotations(t *testing.T) {
	t.Parallel()
	const some = `{
		exclude-outbound-cidrs: [10.0.0.0/8, "fd00::/8"], exclude-outbound-ports: [5432, 8000-8999],
		exclude-interfaces: [wg0], when-late: [queue, direct], late-timeout: any, quic: [], ca: [off], tls: any,
	}`
	const byConfiguration = "the configuration (capture.annotations) does not allow"
	const byNamespace = "the namespace enforces the capture"
	for _, tc := range []struct {
		allowed, name, value string
		enforced             bool
		want                 string // in the error; empty: the pod may
	}{
		{"any", "exclude-outbound-cidrs", "0.0.0.0/0", false, ""},
		{"{}", "exclude-outbound-cidrs", "192.0.2.1", false, byConfiguration + ` "192.0.2.1"`},
		{"{}", "other", "deny", false, byConfiguration},
		{"{}", "exclude-outbound-ports", " ", false, ""}, // excludes nothing
		{some, "exclude-outbound-cidrs", "10.0.0.0/8", false, ""},
		{some, "exclude-outbound-cidrs", "10.1.2.3, fd00:1::/32", false, ""},
		{some, "exclude-outbound-cidrs", "10.1.2.3, 192.0.2.1", false, byConfiguration + ` "192.0.2.1"`},
		{some, "exclude-outbound-cidrs", "10.0.0.0/7", false, "does not allow"},
		{some, "exclude-outbound-cidrs", "0.0.0.0/0", false, byConfiguration},
		{some, "exclude-outbound-cidrs", "::/0", false, byConfiguration},
		{some, "exclude-outbound-ports", "5432, 8080, 8000-8999", false, ""},
		{some, "exclude-outbound-ports", "8000-9000", false, byConfiguration},
		{some, "exclude-outbound-ports", "1-65535", false, byConfiguration},
		{some, "include-outbound-ports", "1", false, byConfiguration},
		{some, "exclude-interfaces", "wg0", false, ""},
		{some, "exclude-interfaces", "wg0,eth0", false, byConfiguration + ` "eth0"`},
		{some, "when-late", "direct", false, ""},
		{some, "when-late", "hold", false, byConfiguration},
		{some, "late-timeout", "17s", false, ""},
		{some, "quic", "reject", false, byConfiguration},
		{some, "ca", "off", false, ""},
		{some, "ca", "auto", false, byConfiguration},
		{some, "capture-inbound-ports", "80", false, byConfiguration},
		{some, "opt-in", "false", false, ""}, // it says nothing to the daemon

		{"any", "exclude-outbound-cidrs", "192.0.2.1", true, byNamespace},
		{"any", "exclude-outbound-ports", "80", true, byNamespace},
		{"any", "include-outbound-cidrs", "192.0.2.1", true, byNamespace},
		{"any", "include-outbound-ports", "80", true, byNamespace},
		{"any", "exclude-interfaces", "eth0", true, byNamespace},
		{"any", "late-timeout", "1s", true, byNamespace},
		{"any", "when-late", "direct", true, byNamespace},
		{"any", "when-late", "queue", true, ""},
		{"any", "quic", "allow", true, byNamespace},
		{"any", "quic", "reject", true, ""},
		{"any", "ca", "off", true, byNamespace},
		{"any", "tls", "pass", true, byNamespace},
		{"any", "tls", "inspect", true, ""},
		{"any", "nested", "pass", true, byNamespace},
		{"any", "other", "deny", true, ""},
		{"any", "capture-inbound-ports", "80", true, ""},
		{some, "exclude-outbound-ports", "5432", true, byNamespace}, // what the configuration allows does not undo it
		{some, "tls", "inspect", true, ""},
		{some, "quic", "reject", true, byConfiguration},
	} {
		facts := Facts{
			Labels:      map[string]string{Label: "true"},
			Annotations: map[string]string{attach.AnnotationPrefix + tc.name: tc.value},
		}
		if tc.enforced {
			facts.Namespace = NamespaceOf(config.Namespaces{}, map[string]string{Label: Enforced})
		}
		d, err := Decide(parse(t, tc.allowed), facts, []string{"eth0"})
		if tc.want == "" && (err != nil || !d.Capture) {
			t.Errorf("%s=%q, enforced %t, allowed %s: got %+v, %v", tc.name, tc.value, tc.enforced, tc.allowed, d, err)
		}
		if tc.want != "" && (err == nil || d.Capture || !strings.Contains(err.Error(), tc.want) ||
			!strings.Contains(err.Error(), "annotation "+attach.AnnotationPrefix+tc.name)) {
			t.Errorf("%s=%q, enforced %t, allowed %s: got %+v, %v; want an error with %q",
				tc.name, tc.value, tc.enforced, tc.allowed, d, err, tc.want)
		}
	}
}
