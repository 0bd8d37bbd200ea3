package mitmproxy

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/integration/testbed"
)

var (
	versionList = flag.String("versions", "", "versions of mitmproxy, separated by spaces")
	tableFile   = flag.String("table", "", "write the table of versions to this file")
)

// modes are the protocols by which sluice reaches mitmproxy.
var modes = []string{"sockets", "connect"}

// exception is a behaviour in which mitmproxy itself is wrong. The test fails also when it has become right.
type exception struct {
	name        string // of the protocol or scenario
	mode        string // the only one, unless empty
	from, until string // the first and the last version; empty: all before, all after
	reason      string
}

var exceptions = []exception{
	{"memcached", "", "", "", "it takes text for HTTP/1 and waits for the end of a request"},
	{"PING of Redis", "", "", "10.4.2", "it takes text for HTTP/1 and waits for the end of a request"},
	{"AMQP", "", "", "10.4.2", "it takes text for HTTP/1 and waits for the end of a request"},
	{"client half-closes TCP", "connect", "", "", "it ends a CONNECT tunnel with the client's side"},
	{"client half-closes TLS", "connect", "", "", "it ends a CONNECT tunnel with the client's side"},
	{"server half-closes TCP", "connect", "", "", "it ends a CONNECT tunnel with the server's side"},
	{"server resets", "connect", "", "", "it ends a CONNECT tunnel without a reset"},
	{"client half-closes HTTP/1", "sockets", "", "", "it gives up a request whose client has ended its side"},
	{"server ends, both silent", "", "", "", "it reads the server's end after the client's first bytes only"},
	{
		"gRPC-like streams, stream_large_bodies=1m", "", "", "",
		"it passes on no part of a body that is shorter, before the end of the body",
	},
	{manyName, "connect", "", "9.0.1", "it leaves it to Python's garbage collector to close connections"},
}

// outcomes of a case.
const (
	pass  = "pass"
	known = "known"
	fail  = "fail"
)

// table has the outcomes of cases, by version and mode.
type table struct {
	mu       sync.Mutex
	outcomes map[[3]string]string // by case, version and mode
}

// judge records the outcome of one case and fails the test unless it is as expected.
func (tb *table) judge(t *testing.T, name, version, mode string, err error) {
	t.Helper()
	got := pass
	i := slices.IndexFunc(exceptions, func(e exception) bool { return e.matches(name, version, mode) })
	switch {
	case err != nil && i >= 0:
		got = known
		t.Logf("known, since %s: %v", exceptions[i].reason, err)
	case err != nil:
		got = fail
		t.Errorf("%v", err)
	case i >= 0:
		got = fail
		t.Errorf("it works. Remove this version from the exceptions: %s", exceptions[i].reason)
	}
	tb.record(name, version, mode, got)
}

func (tb *table) record(name, version, mode, outcome string) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	tb.outcomes[[3]string{name, version, mode}] = outcome
}

func (e exception) matches(name, version, mode string) bool {
	return e.name == name && (e.mode == "" || e.mode == mode) &&
		(e.from == "" || compare(version, e.from) >= 0) && (e.until == "" || compare(version, e.until) <= 0)
}

// compare compares versions by their numbers.
func compare(a, b string) int {
	numbers := func(version string) (n []int) {
		for part := range strings.SplitSeq(version, ".") {
			i, err := strconv.Atoi(part)
			if err != nil {
				break // 13.0.0.dev
			}
			n = append(n, i)
		}
		return n
	}
	return slices.Compare(numbers(a), numbers(b))
}

// TestVersions runs every protocol and scenario with each version, by sockets and by CONNECT: `make test-mitmproxy`.
func TestVersions(t *testing.T) {
	if *versionList == "" {
		t.Skip("it is for `make test-mitmproxy`")
	}
	t.Parallel()
	results := &table{outcomes: map[[3]string]string{}}
	var tested []string
	t.Run("versions", func(t *testing.T) {
		for folder := range strings.FieldsSeq(*versionList) {
			version := reportedVersion(t, folder)
			tested = append(tested, version)
			for _, mode := range modes {
				t.Run(version+" "+mode, func(t *testing.T) {
					t.Parallel()
					results.runProtocols(t, folder, version, mode)
					for _, s := range scenarios {
						if s.mode != "" && s.mode != mode {
							continue
						}
						t.Run(s.name, func(t *testing.T) {
							results.record(s.name, version, mode, fail) // until it is judged
							results.judge(t, s.name, version, mode, s.run(t, folder, mode))
						})
					}
				})
			}
		}
	})
	if *tableFile != "" {
		if err := os.WriteFile(*tableFile, []byte(results.markdown(tested)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestManual: the tables of the manual have every case, and every exception with its reason.
func TestManual(t *testing.T) {
	t.Parallel()
	manual := page.Read(t, "docs/mitmproxy.md")
	var cases []string
	for _, row := range manual.Rows(t, "Versions", "case") {
		cases = append(cases, row["case"])
	}
	if want := names(); !slices.Equal(cases, want) {
		t.Errorf("the table of versions has the cases %q, want %q", cases, want)
	}
	rows := manual.Rows(t, "Known exceptions", "case")
	if !slices.EqualFunc(rows, exceptions, func(row page.Row, e exception) bool { return maps.Equal(row, e.row()) }) {
		want := new(strings.Builder)
		for _, e := range exceptions {
			r := e.row()
			fmt.Fprintf(want, "| %s | %s | %s | %s |\n", r["case"], r["by"], r["versions"], r["mitmproxy"])
		}
		t.Errorf("the table of exceptions differs from the list in the code, which is\n%s", want)
	}
}

// row is the exception in the manual's table.
func (e exception) row() page.Row {
	versions := "all"
	switch {
	case e.from != "" && e.until != "":
		versions = e.from + " to " + e.until
	case e.until != "":
		versions = "to " + e.until
	case e.from != "":
		versions = "from " + e.from
	}
	return page.Row{
		"case": e.name, "by": cmp.Or(e.mode, "both"), "versions": versions, "mitmproxy": e.reason,
	}
}

// firstPort is the port in the world of the first protocol.
const firstPort = 5001

// runProtocols runs the protocols through one mitmproxy.
func (tb *table) runProtocols(t *testing.T, folder, version, mode string) {
	t.Helper()
	s := newScene(t, folder, mode).complete(t)
	together := protocols()
	outcome := make([]chan error, len(together))
	for i, p := range together {
		outcome[i] = make(chan error, 1)
		finish := p.begin(t, s, firstPort+i)
		go func() { outcome[i] <- finish() }()
	}
	for i, p := range together {
		t.Run(p.name, func(t *testing.T) { tb.judge(t, p.name, version, mode, <-outcome[i]) })
	}
	for i, p := range largeBodies() {
		t.Run(p.name, func(t *testing.T) {
			tb.judge(t, p.name, version, mode, p.run(t, s, firstPort+len(together)+i))
		})
	}
}

var versionLine = regexp.MustCompile(`(?m)^Mitmproxy: (\S+)`)

// reportedVersion is the version that the mitmdump in a folder of bin/mitmproxy reports.
func reportedVersion(t *testing.T, folder string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), testbed.Mitmproxy(t, folder, "mitmdump"), "--version").Output()
	m := versionLine.FindSubmatch(out)
	if err != nil || m == nil {
		t.Fatalf("mitmdump --version: %v\n%s", err, out)
	}
	return string(m[1])
}

// names are those of all cases.
func names() (all []string) {
	for _, p := range slices.Concat(protocols(), largeBodies()) {
		all = append(all, p.name)
	}
	for _, s := range scenarios {
		all = append(all, s.name)
	}
	return all
}

// markdown is the table: a row for each case, a column for each version. A cell names a mode if the other passes.
func (tb *table) markdown(versions []string) string {
	var out strings.Builder
	fmt.Fprintf(&out, "| case | %s |\n|%s\n", strings.Join(versions, " | "), strings.Repeat(" --- |", len(versions)+1))
	for _, name := range names() {
		fmt.Fprintf(&out, "| %s |", name)
		for _, v := range versions {
			sockets, connect := tb.outcomes[[3]string{name, v, "sockets"}], tb.outcomes[[3]string{name, v, "connect"}]
			switch {
			case sockets == connect || connect == "":
				fmt.Fprintf(&out, " %s |", sockets)
			case sockets == pass:
				fmt.Fprintf(&out, " connect: %s |", connect)
			case connect == pass:
				fmt.Fprintf(&out, " sockets: %s |", sockets)
			default:
				fmt.Fprintf(&out, " sockets: %s, connect: %s |", sockets, connect)
			}
		}
		fmt.Fprintln(&out)
	}
	return out.String()
}
