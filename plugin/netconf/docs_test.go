package netconf

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/sluice-cni/sluice/integration/docs/page"
)

// TestDocumentedKeys compares the tables of keys with the keys that Validate accepts.
func TestDocumentedKeys(t *testing.T) {
	t.Parallel()
	p := page.Read(t, page.Configuration)
	page.Compare(t, "keys of the conflist entry", p.Table(t, "Keys of the conflist entry", "key"), ownKeys)
	for key := range p.Table(t, "Keys of the conflist entry", "key of the spec") {
		if c, err := Parse(fmt.Appendf(nil, `{%q: null}`, key)); err != nil || c.Validate() != nil {
			t.Errorf("%s is not a key of the CNI spec: %v, %v", key, err, c.Validate())
		}
	}
}

// TestDocumentedDefaults: an entry with the documented default of a key means the same as an empty entry.
func TestDocumentedDefaults(t *testing.T) {
	t.Parallel()
	text := func(entry string) string {
		c, err := Parse([]byte(entry))
		if err != nil {
			t.Fatalf("%s: %v", entry, err)
		}
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", entry, err)
		}
		c.raw = nil
		return fmt.Sprintf("%+v", *c) // in which an empty list and a missing one are the same
	}
	want := text("{}")
	for key, row := range page.Read(t, page.Configuration).Table(t, "Keys of the conflist entry", "key") {
		if value := page.Code(row["default"]); text(fmt.Sprintf(`{%q: %s}`, key, value)) != want {
			t.Errorf("%s: %s is not the default", key, value)
		}
	}
}

// TestDocumentedExample: the example's entry is valid, and has every key with its default.
func TestDocumentedExample(t *testing.T) {
	t.Parallel()
	p := page.Read(t, page.Configuration)
	blocks := p.Blocks("json")
	if len(blocks) == 0 {
		t.Fatal("the page has no example of the conflist")
	}
	for _, b := range blocks {
		var list struct{ Plugins []json.RawMessage }
		if err := json.Unmarshal([]byte(b.Text()), &list); err != nil || len(list.Plugins) == 0 {
			t.Fatalf("line %d is not a conflist: %v", b.Line, err)
		}
		c, err := Parse(list.Plugins[len(list.Plugins)-1])
		if err != nil {
			t.Fatalf("line %d: %v", b.Line, err)
		}
		if err := c.Validate(); err != nil {
			t.Errorf("line %d: %v", b.Line, err)
		}
		for key, row := range p.Table(t, "Keys of the conflist entry", "key") {
			if got, want := compact(c.raw[key]), compact(json.RawMessage(page.Code(row["default"]))); got != want {
				t.Errorf("line %d: %s is %s, want its default %s", b.Line, key, got, want)
			}
		}
	}
}
