// Command bench measures sluice against its budgets: as root, `go run ./integration/bench`, or `make bench`. It
// prints a table and writes bin/bench.json. A budget that is missed is a finding, not a failure.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// parts are what -run selects from.
var parts = []struct {
	name string
	run  func(*bench)
}{
	{"latency", benchLatency},
	{"throughput", benchThroughput},
	{"mitmdump", benchMitmdump},
	{"sockets", benchSockets},
	{"add", benchAdd},
	{"waiting", benchWaiting},
	{"pods", benchPods},
}

// bench is one run.
type bench struct {
	tb     *tb
	bin    string // where the binaries are
	short  bool
	report *report
}

func main() {
	run := flag.String("run", "", "run the parts that this regular expression matches: "+names())
	short := flag.Bool("short", false, "do less of everything: a quick look")
	out := flag.String("o", "bin/bench.json", "write the report to this file")
	flag.Parse()
	wanted, err := regexp.Compile(*run)
	if err != nil {
		fmt.Fprintln(os.Stderr, "-run:", err)
		os.Exit(2)
	}
	t := newTB()
	b := &bench{tb: t, short: *short, report: newReport(*short)}
	b.prepare()
	for _, p := range parts {
		if wanted.MatchString(p.name) {
			b.progress("%s", p.name)
			t.within(func() { p.run(b) })
		}
	}
	b.report.print(os.Stdout)
	t.must(b.report.write(*out), "writing the report")
	t.end(0)
}

func names() string {
	var n []string
	for _, p := range parts {
		n = append(n, p.name)
	}
	return strings.Join(n, ", ")
}

func (b *bench) prepare() {
	if os.Geteuid() != 0 {
		b.tb.Fatalf("this makes network namespaces and measures daemons: run it as root")
	}
	b.tb.must(os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"), "PATH")
	for _, name := range []string{"ip", "nft", "iptables", "redsocks", "mitmdump"} {
		if _, err := exec.LookPath(name); err != nil {
			b.tb.Fatalf("%v: `make bench` installs what is missing", err)
		}
	}
	b.progress("building")
	bin, err := testbed.BuildReleased()
	b.tb.must(err, "building")
	b.tb.Cleanup(func() { _ = os.RemoveAll(bin) })
	b.bin = bin
	b.report.Versions = []string{
		version("redsocks", "-v"), version("mitmdump", "--version"), version("iptables", "--version"), version(testbed.CNIPlugins + "/bridge"),
	}
}

// version is the first line that a program says of itself.
func version(name string, args ...string) string {
	out, _ := exec.Command(name, args...).CombinedOutput() // whatever it says
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return line
}

// progress tells who waits how far it is.
func (b *bench) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "… "+format+"\n", args...)
}

// add takes a result down, and shows it.
func (b *bench) add(results ...result) {
	b.report.Results = slices.Concat(b.report.Results, results)
	for _, r := range results {
		b.progress("  %s: %s (%s) %s", r.Name, r.figure, r.budget(), r.verdict())
	}
}
