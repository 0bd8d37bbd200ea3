package config

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/sluice-cni/sluice/integration/docs/page"
)

// schema is the part of JSON Schema that the chart uses for the configuration.
type schema struct {
	Ref                  string `json:"$ref"`
	Type                 string
	Enum                 []any
	Const                any
	Pattern              string
	Minimum, Maximum     *float64
	MinLength            int
	MinItems             int
	MaxItems             *int
	MinProperties        int
	Required             []string
	Items                *schema
	AnyOf                []schema
	Not, If, Then, Else  *schema
	Properties           map[string]*schema
	AdditionalProperties *additional
	Definitions          map[string]*schema
}

// additional is the schema of the values of other keys than those that a schema names, or nil if it allows none.
type additional struct{ *schema }

// UnmarshalJSON takes a schema, or false.
func (a *additional) UnmarshalJSON(text []byte) error {
	if string(text) == "false" {
		return nil
	}
	return json.Unmarshal(text, &a.schema)
}

// chartSchema returns the schema of the chart's `config`, and the definitions that it refers to.
func chartSchema(t *testing.T) (config *schema, definitions map[string]*schema) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(page.Root(t), "deploy", "chart", "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var values schema
	if err := json.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	return values.Properties["config"], values.Definitions
}

// leaves adds the schemas of all values in s to found, by their paths.
func (s *schema) leaves(path string, found map[string]*schema) {
	if s.Properties == nil {
		found[path] = s
	}
	for name, p := range s.Properties {
		p.leaves(strings.TrimPrefix(path+"."+name, "."), found)
	}
}

// open returns the paths of the mappings that allow other keys than those that the schema has.
func (s *schema) open(path string) (paths []string) {
	if s.Properties != nil && (s.AdditionalProperties == nil || s.AdditionalProperties.schema != nil) {
		paths = append(paths, path)
	}
	for name, p := range s.Properties {
		paths = append(paths, p.open(path+"."+name)...)
	}
	return paths
}

// TestSchemaOfTheChart: `helm install` knows the keys that Parse knows, and no others.
func TestSchemaOfTheChart(t *testing.T) {
	t.Parallel()
	s, _ := chartSchema(t)
	found := map[string]*schema{}
	s.leaves("", found)
	var c Config
	page.Compare(t, "keys of config in the chart's schema", found, slices.Collect(maps.Keys(c.keys(os.LookupEnv))))
	if paths := s.open("config"); len(paths) > 0 {
		t.Errorf("unknown keys are allowed in %q", paths)
	}
}

// at returns the schema of the value at path.
func (s *schema) at(path string) *schema {
	for name := range strings.SplitSeq(path, ".") {
		s = s.Properties[name]
	}
	return s
}

// allows tells whether the schema allows the value, which comes from JSON.
func (s *schema) allows(v any, definitions map[string]*schema) bool {
	if name, ok := strings.CutPrefix(s.Ref, "#/definitions/"); ok {
		return definitions[name].allows(v, definitions)
	}
	allow := func(one *schema) bool { return one.allows(v, definitions) }
	switch {
	case s.Not != nil && allow(s.Not):
		return false
	case len(s.AnyOf) > 0 && !slices.ContainsFunc(s.AnyOf, func(one schema) bool { return allow(&one) }):
		return false
	case (s.Enum != nil || s.Const != nil) && !slices.Contains(append(s.Enum, s.Const), v):
		return false
	case s.If != nil && allow(s.If) && !allow(s.Then), s.If != nil && !allow(s.If) && !allow(s.Else):
		return false
	}
	is := func(kind string) bool { return s.Type == "" || s.Type == kind }
	switch v := v.(type) {
	case string:
		return is("string") && len(v) >= s.MinLength && regexp.MustCompile(s.Pattern).MatchString(v)
	case float64:
		return is("integer") && v == float64(int(v)) && (s.Minimum == nil || v >= *s.Minimum) &&
			(s.Maximum == nil || v <= *s.Maximum)
	case map[string]any:
		return is("object") && s.allowsKeys(v, definitions)
	case []any:
		return is("array") && len(v) >= s.MinItems && (s.MaxItems == nil || len(v) <= *s.MaxItems) &&
			(s.Items == nil || !slices.ContainsFunc(v, func(i any) bool { return !s.Items.allows(i, definitions) }))
	}
	return s.Type == "" // true, false or null
}

// allowsKeys tells whether the schema allows the keys of a mapping, and their values.
func (s *schema) allowsKeys(v map[string]any, definitions map[string]*schema) bool {
	for name, value := range v {
		p := s.Properties[name]
		if p == nil && s.AdditionalProperties != nil {
			p = s.AdditionalProperties.schema
			if p == nil {
				return false
			}
		}
		if p != nil && !p.allows(value, definitions) {
			return false
		}
	}
	return len(v) >= s.MinProperties && !slices.ContainsFunc(s.Required, func(name string) bool {
		_, ok := v[name]
		return !ok
	})
}

// TestSchemaAgreesWithParse about values that are allowed, and about those that are not. The chart is stricter about
// paths that the manifests fix.
func TestSchemaAgreesWithParse(t *testing.T) {
	t.Parallel()
	s, definitions := chartSchema(t)
	const ports = `[] [80] ["80"] ["8000-8999",1] ["65535"] ["1-60000"] |
		[0] [65536] ["80-"] ["a"] 80 "80" ["65536"] ["99999"] ["80-70000"] ["0"]`
	const path, port = `"/a/b" | "a" "" 1`, `1 65535 | 0 65536 1.5 "x"`
	const duration = `"0s" "1m30s" "1.5h" | "" "5" "5 minutes" "-1s" "soon"`
	const selectors = `[] [{}] [{"matchLabels":{"team":"ci"}}]
		[{"matchExpressions":[{"key":"a","operator":"In","values":["x"]},{"key":"a","operator":"Exists"}]}]
		[{"matchExpressions":[{"key":"a","operator":"DoesNotExist","values":[]}]}] |
		{} [null] [{"matchLabel":{}}]
		[{"matchExpressions":[{"key":"a","operator":"In"}]}]
		[{"matchExpressions":[{"key":"a","operator":"NotIn","values":[]}]}]
		[{"matchExpressions":[{"key":"a","operator":"Exists","values":["x"]}]}]
		[{"matchExpressions":[{"key":"a","operator":"Is","values":["x"]}]}]
		[{"matchExpressions":[{"operator":"Exists"}]}]`
	lookup := func(string) (string, bool) { return "10.0.0.1", true }
	for key, samples := range map[string]string{
		"upstream.address": `"127.0.0.1:80" "[::1]:80" "proxy:80" "${HOST_IP}:80" "proxy-70000:65535" |
			"" "proxy" 80 "proxy:0" "proxy:65536" "proxy:99999" "proxy:http"`,
		"upstream.podSelector": `{"namespace":"n","matchLabels":{"a":"b"}} |
			{"namespace":"n"} {"matchLabels":{"a":"b"}} {"namespace":"","matchLabels":{"a":"b"}}
			{"namespace":"n","matchLabels":{}} {"namespace":"n","matchLabels":{"a":"b"},"x":1} []`,
		"upstream.service": `{"namespace":"n","name":"s"} |
			{"namespace":"n"} {"name":"s"} {"namespace":"n","name":""} {"namespace":"n","name":"s","x":1} "s"`,
		"upstream.protocol":      `"connect" "socks5" "proxy-v2" | "ftp" "" 1`,
		"upstream.probeInterval": duration, "late.timeout": duration, "late.taintAfter": duration,
		"capture.source":       `"kubernetes" | "some" ""`,
		"capture.includePorts": ports, "capture.excludePorts": ports,
		"capture.excludeCIDRs": `[] ["10.0.0.0/8","fe80::/10"] ["10.0.0.1","255.255.255.255/32","fd00::1"]
			["0.0.0.0/0","::/0"] ["64:ff9b::10.0.0.0/128"] |
			["x"] "10.0.0.0/8" ["10.0.0.0/99"] ["10.0.0.0/33"] ["abc"] ["256.0.0.1"] ["10.0.0/8"] ["10.01.0.0/16"]
			["fe80::/129"] ["fe80"] ["1:2:3:4:5:6:7:8:9"]`,
		"capture.namespaces.selected": selectors, "capture.namespaces.enforced": selectors,
		"capture.quic":          `"reject" "allow" | "drop" ""`,
		"capture.other":         `"allow" "dns" "deny" | "drop"`,
		"capture.nodeAddresses": `"refuse" "allow" | "x" true`,
		"trust.ca":              `"auto" "off" false | "on" true`,
		"capture.annotations": `"any" {} {"quic":["allow"],"late-timeout":"any"} {"ca":[false],"tls":[]}
			{"exclude-outbound-ports":[80,"8000-8999"],"exclude-outbound-cidrs":["10.0.0.0/8"]} |
			"none" [] {"quic":"allow"} {"quic":["x"]} {"unknown":[]} {"when-late":["never"]} {"late-timeout":["soon"]}
			{"exclude-outbound-ports":[0]} {"include-outbound-cidrs":["x"]} {"tls":["x"]} {"exclude-interfaces":[""]}`,
		"trust.tls": `"pass" "inspect" | "x" ""`, "trust.nested": `"pass" "inspect" | "x"`,
		"trust.caFile": path, "trust.nriSocket": path,
		"late.policy":           `"queue" "hold" "direct" | "never"`,
		"metricsAddress":        `"127.0.0.1:9" "[::]:9" "" | "9" ":9" 9 "127.0.0.1:0" "127.0.0.1:65536"`,
		"proxySocket":           `"/run/sluice/a" | "a"`,
		"capture.ports.inbound": port, "capture.ports.outbound": port,
	} {
		allowed := true
		for sample := range strings.FieldsSeq(strings.ReplaceAll(samples, "5 minutes", "5_minutes")) {
			if sample == "|" {
				allowed = false
				continue
			}
			var v any
			if err := json.Unmarshal([]byte(sample), &v); err != nil {
				t.Fatalf("%s: %s: %v", key, sample, err)
			}
			if got := s.at(key).allows(v, definitions); got != allowed {
				t.Errorf("%s: %s: the chart's schema allows it: %t, want %t", key, sample, got, allowed)
			}
			base := `{"upstream":{"address":"h:1"},"capture":{"source":"kubernetes"}}`
			if key == "upstream.podSelector" || key == "upstream.service" { // in place of the address
				base = `{"upstream":{"port":1},"capture":{"source":"kubernetes"}}`
			}
			_, err := Parse([]byte(withValue(t, base, key, v)), lookup)
			if (err == nil) != allowed {
				t.Errorf("%s: %s: Parse: got %v, want an error: %t", key, sample, err, !allowed)
			}
		}
	}
}

// withValue sets a key of a configuration in JSON.
func withValue(t *testing.T, base, key string, v any) string {
	t.Helper()
	var root map[string]any
	if err := json.Unmarshal([]byte(base), &root); err != nil {
		t.Fatal(err)
	}
	names, at := strings.Split(key, "."), root
	for _, name := range names[:len(names)-1] {
		if at[name] == nil {
			at[name] = map[string]any{}
		}
		at = at[name].(map[string]any)
	}
	at[names[len(names)-1]] = v
	text, err := json.Marshal(root)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestRenderedConfigMap: the manifest has the configuration in an immutable ConfigMap whose name is its hash, and the
// DaemonSet mounts that one. Its content is valid.
func TestRenderedConfigMap(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(page.Root(t), "deploy", "sluice.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var name string
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var m struct {
			Kind      string
			Metadata  struct{ Name string }
			Immutable bool
			Data      map[string]string
		}
		if err := yaml.Unmarshal([]byte(document), &m); err != nil {
			t.Fatal(err)
		}
		if m.Kind != "ConfigMap" {
			continue
		}
		name = m.Metadata.Name
		content := strings.TrimSuffix(m.Data["config.yaml"], "\n")
		if hash := fmt.Sprintf("%x", sha256.Sum256([]byte(content))); name != "sluice-"+hash[:10] || !m.Immutable {
			t.Errorf("the ConfigMap is %s, immutable: %t; want sluice-%s, true", name, m.Immutable, hash[:10])
		}
		if _, err := Parse([]byte(content), os.LookupEnv); err != nil {
			t.Error(err)
		}
	}
	if name == "" || !strings.Contains(string(text), "configMap: {name: "+name+"}") {
		t.Errorf("the DaemonSet does not mount the ConfigMap %q", name)
	}
}
