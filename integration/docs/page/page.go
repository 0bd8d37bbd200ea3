// Package page reads the tables and the code blocks of the documentation, for tests that compare them with the code.
package page

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// TB is the part of testing.TB that is used here.
type TB interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Configuration is the page that lists every name.
const Configuration = "docs/configuration.md"

// module is the first line of go.mod in the repository's root. Other directories have modules of their own.
const module = "module github.com/sluice-cni/sluice\n"

// Root returns the repository's root: the nearest directory above the test with the module's go.mod.
func Root(tb TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatalf("finding the repository's root: %v", err)
	}
	for {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(text), module) {
			return dir
		}
		if dir == filepath.Dir(dir) {
			tb.Fatalf("no directory above the test has a go.mod that begins with %q", module)
		}
		dir = filepath.Dir(dir)
	}
}

// All returns the paths of all pages that exist, relative to the root.
func All(tb TB) []string {
	tb.Helper()
	root := Root(tb)
	var all []string
	for _, pattern := range []string{"README.md", "CONTRIBUTING.md", "docs/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			tb.Fatalf("%s: %v", pattern, err)
		}
		for _, path := range found {
			relative, err := filepath.Rel(root, path)
			if err != nil {
				tb.Fatalf("%s: %v", path, err)
			}
			all = append(all, relative)
		}
	}
	return all
}

// Page is the text of one page.
type Page struct {
	// Path is relative to the repository's root.
	Path  string
	lines []string
}

// Read reads the page at path, which is relative to the repository's root.
func Read(tb TB, path string) Page {
	tb.Helper()
	text, err := os.ReadFile(filepath.Join(Root(tb), path))
	if err != nil {
		tb.Fatalf("reading a page: %v", err)
	}
	return Parse(path, string(text))
}

// Parse makes a page from its text.
func Parse(path, text string) Page { return Page{path, strings.Split(text, "\n")} }

// Row is a row of a table: its cells by the heading of their column.
type Row map[string]string

// Table returns the rows of a table under the heading: of the one with that first column. Their keys are the names in
// the first column, without backquotes. A name that appears twice is an error, and so is a table that does not exist.
func (p Page) Table(tb TB, heading, column string) map[string]Row {
	tb.Helper()
	rows := map[string]Row{}
	for _, row := range p.Rows(tb, heading, column) {
		name := Code(row[column])
		if name == "" {
			tb.Errorf("%s, %q: the first cell of a row is %q, want a name in backquotes", p.Path, heading, row[column])
		}
		if rows[name] != nil {
			tb.Errorf("%s, %q: two rows are named %q", p.Path, heading, name)
		}
		rows[name] = row
	}
	return rows
}

// Rows is Table for a table in which names may appear more than once, in the order of the page.
func (p Page) Rows(tb TB, heading, column string) []Row {
	tb.Helper()
	var rows []Row
	var columns []string // of the table; nil outside of it
	for _, line := range p.section(heading) {
		cells, ok := cells(line)
		switch {
		case !ok:
			columns = nil
		case columns == nil && cells[0] == column:
			columns = cells
		case columns == nil || strings.Trim(cells[0], "-: ") == "":
		case len(cells) != len(columns):
			tb.Errorf("%s, %q: a row has %d cells, its heading %d: %s", p.Path, heading, len(cells), len(columns), line)
		default:
			row := Row{}
			for i, c := range columns {
				row[c] = cells[i]
			}
			rows = append(rows, row)
		}
	}
	if len(rows) == 0 {
		tb.Fatalf("%s: no table with the first column %q under the heading %q", p.Path, column, heading)
	}
	return rows
}

// Headings returns the headings of the page, without their level.
func (p Page) Headings() (headings []string) {
	fenced := false
	for _, line := range p.lines {
		fenced = fenced != strings.HasPrefix(strings.TrimSpace(line), fence)
		if level := strings.TrimLeft(line, "#"); !fenced && level != line {
			headings = append(headings, strings.TrimSpace(level))
		}
	}
	return headings
}

var (
	notAnchor = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	link      = regexp.MustCompile(`\]\(([^)]+)\)`)
)

// Anchors returns the anchors of the headings, as GitHub makes them.
func (p Page) Anchors() (anchors []string) {
	for _, h := range p.Headings() {
		anchors = append(anchors, strings.ReplaceAll(notAnchor.ReplaceAllString(strings.ToLower(h), ""), " ", "-"))
	}
	return anchors
}

// Links returns the targets of all links.
func (p Page) Links() (links []string) {
	for _, m := range link.FindAllStringSubmatch(strings.Join(p.lines, "\n"), -1) {
		links = append(links, m[1])
	}
	return links
}

// section returns the lines from a heading to the next one of any level, outside of code blocks.
func (p Page) section(heading string) (lines []string) {
	inside, fenced := false, false
	for _, line := range p.lines {
		fenced = fenced != strings.HasPrefix(strings.TrimSpace(line), fence)
		if level := strings.TrimLeft(line, "#"); !fenced && level != line {
			inside = strings.TrimSpace(level) == heading
			continue
		}
		if inside {
			lines = append(lines, line)
		}
	}
	return lines
}

// cells splits a row of a table. A bar in a cell is written as \|.
func cells(line string) ([]string, bool) {
	line = strings.TrimSpace(line)
	if len(line) < 2 || !strings.HasPrefix(line, "|") || !strings.HasSuffix(line, "|") {
		return nil, false
	}
	const bar = "\x00"
	parts := strings.Split(strings.ReplaceAll(line[1:len(line)-1], `\|`, bar), "|")
	for i, part := range parts {
		parts[i] = strings.TrimSpace(strings.ReplaceAll(part, bar, "|"))
	}
	return parts, true
}

var quoted = regexp.MustCompile("^`([^`]+)`$")

// Code returns the text of a cell that is in backquotes as a whole, and "" for any other cell.
func Code(cell string) string {
	if m := quoted.FindStringSubmatch(cell); m != nil {
		return m[1]
	}
	return ""
}

// Compare reports the names that are only in the table and those that are only in the code.
func Compare[T any](tb TB, subject string, rows map[string]T, code []string) {
	tb.Helper()
	code = slices.Compact(slices.Sorted(slices.Values(code)))
	for _, name := range code {
		if _, ok := rows[name]; !ok {
			tb.Errorf("%s: the code has %q, the page has not", subject, name)
		}
	}
	for name := range rows {
		if !slices.Contains(code, name) {
			tb.Errorf("%s: the page has %q, the code has not", subject, name)
		}
	}
}
