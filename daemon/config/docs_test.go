package config

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestDocumentedKeys compares the table of keys with the keys that Parse knows.
func TestDocumentedKeys(t *testing.T) {
	t.Parallel()
	rows := page.Read(t, page.Configuration).Table(t, "Keys of the daemon's file", "key")
	var c Config
	page.Compare(t, "keys of the daemon's file", rows, slices.Collect(maps.Keys(c.keys(os.LookupEnv))))
}

// TestDocumentedDefaults: a file with the documented default of a key means the same as a file without the key, and the
// default of a key that has none is the zero value.
func TestDocumentedDefaults(t *testing.T) {
	t.Parallel()
	const required = "upstream: {protocol: sockets}\ncapture: {source: all}\n"
	parse := func(text string) Config {
		c, err := Parse([]byte(text), os.LookupEnv)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		return c
	}
	without := parse(required)
	for key, row := range page.Read(t, page.Configuration).Table(t, "Keys of the daemon's file", "key") {
		switch value := page.Code(row["default"]); {
		case key == "upstream.protocol": // another protocol requires an address
			without := parse("upstream: {address: h:1}\ncapture: {source: all}")
			with := parse(fmt.Sprintf("upstream: {address: h:1, protocol: %s}\ncapture: {source: all}", value))
			if !reflect.DeepEqual(with, without) {
				t.Errorf("%s: %q is not the default", key, value)
			}
		case row["default"] == "required":
			if _, err := Parse([]byte("upstream: {protocol: sockets}"), os.LookupEnv); err == nil ||
				!strings.Contains(err.Error(), key+": missing") {
				t.Errorf("%s is required by the page, but without it the error is %v", key, err)
			}
		case row["default"] == "none":
			zero := Config{Upstream: Upstream{Protocol: Sockets}, Trust: attach.Trust{CA: true}}
			of := map[string][2]any{
				"upstream": {without.Upstream, zero.Upstream}, "trust": {without.Trust, zero.Trust},
			}
			section, _, _ := strings.Cut(key, ".")
			if got, ok := of[section]; !ok || !reflect.DeepEqual(got[0], got[1]) {
				t.Errorf("%s has a default", key)
			}
		case value == "":
			t.Errorf("%s: the default %q is neither a value in backquotes nor required nor none", key, row["default"])
		default:
			if with := parse(withKey(required, key, value)); !equalDefaults(with, without) {
				t.Errorf("%s: %q is not the default: got %+v, want %+v", key, value, with, without)
			}
		}
	}
}

// withKey adds a key to a file that has the mappings upstream and capture in one line each.
func withKey(file, key, value string) string {
	section, name, nested := strings.Cut(key, ".")
	if mapping, inner, deeper := strings.Cut(name, "."); deeper {
		name, value = mapping, fmt.Sprintf("{%s: %s}", inner, value)
	}
	switch {
	case !nested:
		return fmt.Sprintf("%s%s: %s\n", file, key, value)
	case strings.Contains(file, section+": {"):
		return strings.Replace(file, section+": {", fmt.Sprintf("%s: {%s: %s, ", section, name, value), 1)
	default:
		return fmt.Sprintf("%s%s: {%s: %s}\n", file, section, name, value)
	}
}

// equalDefaults compares in text, in which an empty list and a missing one are the same.
func equalDefaults(x, y Config) bool { return fmt.Sprintf("%+v", x) == fmt.Sprintf("%+v", y) }

// TestDocumentedExamples: each example of the file is valid, and the first one has every default.
func TestDocumentedExamples(t *testing.T) {
	t.Parallel()
	examples := page.Read(t, page.Configuration).Blocks("yaml")
	if len(examples) == 0 {
		t.Fatal("the page has no example")
	}
	var configs []Config
	for _, b := range examples {
		c, err := Parse([]byte(b.Text()), os.LookupEnv)
		if err != nil {
			t.Errorf("the example on line %d: %v", b.Line, err)
		}
		configs = append(configs, c)
	}
	want, err := Parse([]byte("upstream: {address: 127.0.0.1:18080}\ncapture: {source: all}"), os.LookupEnv)
	if err != nil || !equalDefaults(configs[0], want) {
		t.Errorf("the first example is %+v, want the defaults %+v, %v", configs[0], want, err)
	}
}
