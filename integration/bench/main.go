// Command bench measures sluice and compares the results with its budgets. It runs as root: `make bench` or
// `go run ./integration/bench`. It prints a table and writes bin/bench.json. A missed budget is a finding, not a
// failure: the exit code is 0.
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

// parts are the benchmarks. The flag -run selects some of them.
var parts = []struct {
	name string
	run  func(*bench)
}{
	{"latency", benchLatency},
	{"fair", benchFair},
	{"idle", benchIdle},
	{"throughput", benchThroughput},
	{"mitmdump", benchMitmdump},
	{"sockets", benchSockets},
	{"wall", benchWall},
	{"add", benchAdd},
	{"waiting", benchWaiting},
	{"pods", benchPods},
	{"trust", benchTrust},
}

// bench is one run.
type bench struct {
	tb     *tb
	bin    string // the folder of the binaries
	short  bool
	report *report
}

func main() {
	run := flag.String("run", "", "run only the parts whose name matches this regular expression; the parts: "+names())
	short := flag.Bool("short", false, "use fewer rounds, pods and bytes, for a quick and rough result")
	out := flag.String("o", "bin/bench.json", "write the report to this `file`")
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
		b.tb.Fatalf("creating network namespaces needs root: run the benchmark as root")
	}
	b.tb.must(os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"), "PATH")
	for _, name := range []string{"ip", "nft", "iptables", "redsocks", "mitmdump"} {
		if _, err := exec.LookPath(name); err != nil {
			b.tb.Fatalf("%v: `make bench` installs missing programs", err)
		}
	}
	b.progress("building")
	bin, err := testbed.BuildReleased()
	b.tb.must(err, "building")
	b.bin = bin
	b.report.Versions = []string{
		version("redsocks", "-v"), version("iptables", "--version"), version(testbed.CNIPlugins + "/bridge"),
	}
	for _, v := range mitmproxies {
		b.report.Versions = append(b.report.Versions, version(testbed.Mitmproxy(b.tb, v, "mitmdump"), "--version"))
	}
}

// version returns the first line of a program's output about its version.
func version(name string, args ...string) string {
	out, _ := exec.Command(name, args...).CombinedOutput() // some programs print their version and fail
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return line
}

// progress prints a line about the progress of the run to standard error.
func (b *bench) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "… "+format+"\n", args...)
}

// add adds results to the report and prints them.
func (b *bench) add(results ...result) {
	b.report.Results = slices.Concat(b.report.Results, results)
	for _, r := range results {
		b.progress("  %s: %s (%s) %s", r.Name, r.figure, r.budget(), r.verdict())
	}
}
