package page

import (
	"slices"
	"strings"
	"testing"
)

const text = `# Title

## Keys

| key | value |
| --- | --- |
| ` + "`a.b`" + ` | one |
| ` + "`c`" + ` | this \| that |

| other | value |
| --- | --- |
| ` + "`a.b`" + ` | two |

<!-- run: node -->
` + "```console" + `
# sluiced status
upstream 127.0.0.1:18080 (connect): LATE for 2.3s
# ## no heading
$ echo a \
    b
` + "```" + `

A paragraph.

` + "```yaml" + `
# a: b
` + "```" + `
## Other
`

func TestTable(t *testing.T) {
	t.Parallel()
	p := Parse("p.md", text)
	got := p.Table(t, "Keys", "key")
	if len(got) != 2 || got["a.b"]["value"] != "one" || got["c"]["value"] != "this | that" {
		t.Errorf("got %q", got)
	}
	if got := p.Table(t, "Keys", "other"); len(got) != 1 || got["a.b"]["value"] != "two" {
		t.Errorf("got %q", got)
	}
}

// failures counts the errors that a test would report.
type failures struct {
	testing.TB
	errors int
}

func (f *failures) Helper()               {}
func (f *failures) Errorf(string, ...any) { f.errors++ }
func (f *failures) Fatalf(string, ...any) { f.errors++ }

func TestTableErrors(t *testing.T) {
	t.Parallel()
	for name, table := range map[string]string{
		"two of one name": "# T\n| key |\n| --- |\n| `a` |\n| `a` |\n",
		"no backquotes":   "# T\n| key |\n| --- |\n| a |\n",
		"a missing cell":  "# T\n| key | v |\n| --- | --- |\n| `b` | c |\n| `a` |\n",
		"another heading": "# U\n| key |\n| --- |\n| `a` |\n",
		"another column":  "# T\n| name |\n| --- |\n| `a` |\n",
		"no rows":         "# T\n| key |\n| --- |\n",
	} {
		var f failures
		Parse("p.md", table).Table(&f, "T", "key")
		if f.errors != 1 {
			t.Errorf("%s: got %d errors, want one", name, f.errors)
		}
	}
}

func TestCompare(t *testing.T) {
	t.Parallel()
	rows := map[string]Row{"a": nil, "b": nil}
	for want, code := range [][]string{{"b", "a", "a"}, {"a"}, {"a", "c"}} {
		var f failures
		Compare(&f, "names", rows, code)
		if f.errors != want {
			t.Errorf("%q: got %d errors, want %d", code, f.errors, want)
		}
	}
}

func TestBlocks(t *testing.T) {
	t.Parallel()
	blocks := Parse("p.md", text).Blocks("")
	if len(blocks) != 2 || blocks[0].Runner != "node" || blocks[0].Line != 15 || blocks[1].Runner != "" ||
		blocks[1].Text() != "# a: b\n" {
		t.Fatalf("got %+v", blocks)
	}
	commands, stray := blocks[0].Commands()
	var got []string
	for _, c := range commands {
		got = append(got, c.Text+": "+strings.Join(c.Output, "/"))
	}
	want := []string{
		"sluiced status: upstream 127.0.0.1:18080 (connect): LATE for 2.3s", "## no heading: ", "echo a \\\nb: ",
	}
	if !slices.Equal(got, want) || stray != nil {
		t.Errorf("got %q, stray %q; want %q", got, stray, want)
	}
}

func TestMatches(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		shown, output string
		want          bool
	}{
		{"ready for 2.3s", "ready for 1m12s", true},
		{"ready for 2.3s", "LATE for 2.3s", false},
		{"default/web  cnitool-1127/eth0  captured  2  0", "default/web sluice-2-3-w/eth0 captured 17 1.2k\n", true},
		{"dial tcp 127.0.0.1:18080", "dial tcp 127.0.0.1:1", true},
		{"4f2a9c01d5e7", "deadbeef0123", true},
		{"a\nb", "a", false},
		{"a", "a\nb", false},
		{"a\n...", "a", true},
		{"a\n...\nc", "a\nb\nb\nc", true},
		{"a\n...\nd", "a\nb\nc", false},
		{"...\na", "b\na", true},
		{"a: ...", "a: b", true},
		{"a: ...", "b: b", false},
	} {
		if got := Matches(strings.Split(tc.shown, "\n"), strings.Split(tc.output, "\n")); got != tc.want {
			t.Errorf("%q, %q: got %v", tc.shown, tc.output, got)
		}
	}
}
