package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// matching returns the values that match the whole pattern.
func matching(values []string, pattern string) []string {
	whole := regexp.MustCompile(`^(?:` + pattern + `)$`)
	return slices.DeleteFunc(values, func(s string) bool { return !whole.MatchString(s) })
}

func TestEvents(t *testing.T) {
	t.Parallel()
	code := matching(literals(sources(t, "daemon", "plugin"), token.STRING), `Sluice[A-Z][A-Za-z]*`)
	configuration := page.Read(t, page.Configuration)
	page.Compare(t, "events of "+page.Configuration, configuration.Table(t, "Events", "reason"), code)
	page.Compare(t, "events of "+operations, page.Read(t, operations).Table(t, "Events", "reason"), code)
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	code := matching(literals(sources(t, "daemon", "plugin"), token.STRING), `sluice_[a-z_]+`)
	rows := page.Read(t, page.Configuration).Table(t, "Metrics", "metric")
	page.Compare(t, "metrics", rows, code)
	for name, row := range rows {
		want := "gauge"
		if strings.HasSuffix(name, "_total") {
			want = "counter"
		}
		if row["type"] != want {
			t.Errorf("%s is a %s on the page, want %s", name, row["type"], want)
		}
	}
}

// TestAlertsNameMetrics: alerts and other examples on the page for operators use metrics that exist.
func TestAlertsNameMetrics(t *testing.T) {
	t.Parallel()
	rows := page.Read(t, page.Configuration).Table(t, "Metrics", "metric")
	for _, b := range page.Read(t, operations).Blocks("") {
		for _, name := range regexp.MustCompile(`\bsluice_[a-z_]+`).FindAllString(b.Text(), -1) {
			if rows[name] == nil {
				t.Errorf("%s, line %d: there is no metric %s", operations, b.Line, name)
			}
		}
	}
}

func TestLogAttributes(t *testing.T) {
	t.Parallel()
	rows := page.Read(t, page.Configuration).Table(t, "Log attributes", "key")
	page.Compare(t, "log attributes", rows, logKeys(t, sources(t, "daemon", "plugin")))
}

// TestLogMessages: the page for operators has every message of the levels WARN and ERROR.
func TestLogMessages(t *testing.T) {
	t.Parallel()
	code := warnings(sources(t, "daemon"))
	rows := page.Read(t, operations).Table(t, "Log messages", "message")
	maps.Copy(rows, page.Read(t, operations).Table(t, "Log messages", "CA message"))
	page.Compare(t, "messages of WARN and ERROR", rows, slices.Collect(maps.Keys(code)))
	for message, level := range code {
		if row := rows[message]; row != nil && level != "" && row["level"] != level {
			t.Errorf("%q: the page has the level %s, the code %s", message, row["level"], level)
		}
	}
}

// TestTexts: the texts that the page quotes from the status are texts of the code, or of the kernel.
func TestTexts(t *testing.T) {
	t.Parallel()
	code := texts(sources(t, "daemon", "plugin"))
	code = append(code, unix.ECONNREFUSED.Error(), unix.EADDRINUSE.Error(), os.ErrDeadlineExceeded.Error())
	p := page.Read(t, operations)
	for heading, column := range map[string]string{
		"The upstream line": "reason", "Proxies": "text", "Not ready": "text", "States": "state", "Notes": "note",
	} {
		for quoted := range p.Table(t, heading, column) {
			if !slices.ContainsFunc(code, func(s string) bool { return strings.Contains(s, quoted) }) {
				t.Errorf("%s: the code has no text with %q", heading, quoted)
			}
		}
	}
	states := []string{
		string(attach.Captured), string(attach.Provisional), string(attach.Passed), string(attach.Adding),
	}
	page.Compare(t, "states", p.Table(t, "States", "state"), states)
}

// TestLogKeys: every form of a log call is recognised.
func TestLogKeys(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "x.go", `package x
func f() {
	log.Info("m", "a", "not a key", "b", 1)
	h.log.With("c", 1).Warn("m", "d", 2)
	k.Log.Log(ctx, level, "m", "e", err)
	log.ErrorContext(ctx, "m", slog.String("f", "v"), "g", 1)
	http.Error(w, "m", "none")
	x.With("none")
}`, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	got := slices.Sorted(slices.Values(logKeys(t, []source{{"x.go", file}})))
	if want := []string{"a", "b", "c", "d", "e", "f", "g"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// libraryCodes are the codes of the CNI spec by the names that the library gives them.
var libraryCodes = map[string]uint{
	"ErrUnknown":                     types.ErrUnknown,
	"ErrIncompatibleCNIVersion":      types.ErrIncompatibleCNIVersion,
	"ErrUnsupportedField":            types.ErrUnsupportedField,
	"ErrUnknownContainer":            types.ErrUnknownContainer,
	"ErrInvalidEnvironmentVariables": types.ErrInvalidEnvironmentVariables,
	"ErrIOFailure":                   types.ErrIOFailure,
	"ErrDecodingFailure":             types.ErrDecodingFailure,
	"ErrInvalidNetworkConfig":        types.ErrInvalidNetworkConfig,
	"ErrInvalidNetNS":                types.ErrInvalidNetNS,
	"ErrTryAgainLater":               types.ErrTryAgainLater,
	"ErrPluginNotAvailable":          types.ErrPluginNotAvailable,
	"ErrLimitedConnectivity":         types.ErrLimitedConnectivity,
	"ErrInternal":                    types.ErrInternal,
}

func TestErrorCodes(t *testing.T) {
	t.Parallel()
	files := sources(t, "plugin")
	constants := integerConstants(files)
	used := map[string]bool{}
	calls(files, func(f source, receiver ast.Expr, name string, args []ast.Expr) {
		if identifier(receiver) != "types" || name != "NewError" || len(args) == 0 {
			return
		}
		constant := identifier(args[0])
		if code, ok := libraryCodes[constant]; ok {
			used[strconv.FormatUint(uint64(code), 10)] = true
		} else if code := constants[constant]; code != "" {
			used[code] = true
		} else {
			t.Errorf("%s: the code of an error is not known", f.path)
		}
	})
	p := page.Read(t, page.Configuration)
	page.Compare(t, "CNI error codes", p.Table(t, "CNI error codes", "code"), slices.Collect(maps.Keys(used)))

	known := map[string]bool{}
	for _, code := range libraryCodes {
		known[strconv.FormatUint(uint64(code), 10)] = true
	}
	for code := range p.Table(t, "CNI error codes", "code of the library") {
		if !known[code] || used[code] {
			t.Errorf("code %s is not one that the library alone uses", code)
		}
	}
}

// integerConstants returns the constants that are declared with an integer literal.
func integerConstants(files []source) map[string]string {
	constants := map[string]string{}
	for _, f := range files {
		ast.Inspect(f.file, func(n ast.Node) bool {
			v, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for i, name := range v.Names {
				if i < len(v.Values) {
					if l, ok := v.Values[i].(*ast.BasicLit); ok && l.Kind == token.INT {
						constants[name.Name] = l.Value
					}
				}
			}
			return true
		})
	}
	return constants
}

// TestPorts: all ports of sluice begin with 15, as numbers or as part of an address.
func TestPorts(t *testing.T) {
	t.Parallel()
	files := sources(t, "daemon", "plugin")
	code := matching(literals(files, token.INT), `15\d{3}`)
	for _, text := range literals(files, token.STRING) {
		for _, m := range regexp.MustCompile(`:(15\d{3})\b`).FindAllStringSubmatch(text, -1) {
			code = append(code, m[1])
		}
	}
	page.Compare(t, "ports", page.Read(t, page.Configuration).Table(t, "Ports", "port"), code)
}

// TestTaint: the taint and the names of the CA are the strings of the code with that prefix, and every environment
// variable is a string of the code.
func TestTaint(t *testing.T) {
	t.Parallel()
	code := literals(sources(t, "daemon"), token.STRING)
	p := page.Read(t, page.Configuration)
	names := p.Table(t, "Taint", "taint")
	maps.Copy(names, p.Table(t, "Objects of the CA", "name"))
	page.Compare(t, "taints and names of the CA", names, matching(slices.Clone(code), `sluice\.dev/[a-z-]+`))
	for name := range p.Table(t, "Environment variables", "variable") {
		if !slices.Contains(code, name) {
			t.Errorf("the daemon does not read the environment variable %s", name)
		}
	}
}

// TestFiles: the defaults of paths on the page begin with directories of the code.
func TestFiles(t *testing.T) {
	t.Parallel()
	code := literals(sources(t, "daemon", "plugin"), token.STRING)
	for path := range page.Read(t, page.Configuration).Table(t, "Files and sockets", "path") {
		found := slices.ContainsFunc(code, func(s string) bool {
			return strings.HasPrefix(s, "/") && strings.HasPrefix(path, s) && len(s) > 1
		})
		if !found {
			t.Errorf("the code has no default for %s", path)
		}
	}
}

// TestLinks: every link to another page, and to a heading, has its target. Pages that do not exist yet are left out.
func TestLinks(t *testing.T) {
	t.Parallel()
	for _, path := range []string{page.Configuration, operations} {
		for _, link := range page.Read(t, path).Links() {
			target, anchor, _ := strings.Cut(link, "#")
			switch {
			case strings.Contains(target, ":"):
			case target == "":
				checkAnchor(t, path, path, anchor)
			case slices.Contains(page.All(t), "docs/"+target):
				checkAnchor(t, path, "docs/"+target, anchor)
			}
		}
	}
}

func checkAnchor(t *testing.T, from, path, anchor string) {
	t.Helper()
	if anchor != "" && !slices.Contains(page.Read(t, path).Anchors(), anchor) {
		t.Errorf("%s: %s has no heading #%s", from, path, anchor)
	}
}

const operations = "docs/operations.md"
