package ruleset

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func cidrs(s ...string) []netip.Prefix {
	var p []netip.Prefix
	for _, c := range s {
		p = append(p, netip.MustParsePrefix(c))
	}
	return p
}

// goldenCase is a whole ruleset as it is installed in a netns with eth0; it has its golden files.
type goldenCase struct {
	name      string
	change    func(*Ruleset) // of Provisional("eth0")
	noSYNGate bool
	noWall    bool
	noAddress bool
}

func (c goldenCase) installed() Installed {
	in := Installed{
		Ruleset: Provisional("eth0"), SYNGate: !c.noSYNGate, Wall: WallFull,
		Interfaces: []Interface{{Name: "eth0", MAC: "02:00:00:00:00:01"}},
	}
	c.change(&in.Ruleset)
	if !c.noAddress {
		in.Interfaces[0].IPv4 = netip.MustParseAddr("10.88.0.2")
		in.Interfaces[0].IPv6 = netip.MustParseAddr("fd00:88::2")
	}
	if c.noWall {
		in.Wall = WallNone
	}
	if in.Ruleset.ExpiresAfter > 0 {
		in.Expires = time.Now().Add(in.Ruleset.ExpiresAfter)
	}
	return in
}

var goldenCases = []goldenCase{
	{name: "defaults", change: func(*Ruleset) {}},
	{name: "upstream-ipv4", change: func(r *Ruleset) { r.Upstream = netip.MustParseAddrPort("192.0.2.1:18080") }},
	{name: "upstream-ipv6", change: func(r *Ruleset) {
		r.Upstream = netip.MustParseAddrPort("[2001:db8::1]:18080")
	}},
	{name: "include-ports", change: func(r *Ruleset) {
		r.IncludePorts = []PortRange{{80, 80}, {443, 443}, {8000, 8999}}
	}},
	{name: "exclude-ports", change: func(r *Ruleset) { r.ExcludePorts = []PortRange{{22, 22}, {9000, 9999}} }},
	{name: "include-cidrs", change: func(r *Ruleset) {
		r.IncludeCIDRs = cidrs("10.0.0.0/8", "203.0.113.7/32", "fd00::/8")
	}},
	{name: "include-cidrs-ipv4-only", change: func(r *Ruleset) { r.IncludeCIDRs = cidrs("10.0.0.0/8") }},
	{name: "exclude-cidrs", change: func(r *Ruleset) {
		r.ExcludeCIDRs = cidrs("10.0.0.0/8", "203.0.113.7/32", "fd00::/8", "2001:db8::7/128")
	}},
	{name: "exclude-interfaces", change: func(r *Ruleset) { r.ExcludeInterfaces = []string{"wg0", "docker0"} }},
	{name: "quic-allowed", change: func(r *Ruleset) { r.RejectQUIC = false }},
	{name: "quic-port-excluded", change: func(r *Ruleset) { r.ExcludePorts = []PortRange{{400, 500}} }},
	{name: "quic-port-not-included", change: func(r *Ruleset) { r.IncludePorts = []PortRange{{80, 80}} }},
	{name: "two-interfaces", change: func(r *Ruleset) { r.Interfaces = []string{"eth0", "net1"} }},
	{name: "inbound", change: func(r *Ruleset) {
		r.InboundPorts = []PortRange{{80, 80}, {8000, 8999}}
		r.ExcludeSources = cidrs("10.0.0.1/32", "192.0.2.0/24", "fd00::1/128")
	}},
	{name: "other-dns", change: func(r *Ruleset) {
		r.Other = OtherDNS
		r.Resolvers = []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00:96::10")}
	}},
	{name: "other-deny", change: func(r *Ruleset) { r.Other = OtherDeny }},
	{name: "ports", change: func(r *Ruleset) {
		r.Ports, r.InboundPorts = Ports{Outbound: 16001, Inbound: 16006}, []PortRange{{80, 80}}
	}},
	{name: "keep-older", change: func(r *Ruleset) { r.KeepOlder = true }},
	{name: "expires", change: func(r *Ruleset) { r.ExpiresAfter = 2 * time.Minute }},

	{name: "no-syn-gate", change: func(*Ruleset) {}, noSYNGate: true},
	{name: "no-wall", change: func(r *Ruleset) { r.IncludePorts = []PortRange{{80, 80}, {443, 443}} }, noWall: true},
	{name: "no-address", change: func(*Ruleset) {}, noAddress: true},
}

// TestGolden compares the rules that each backend puts into a new netns with testdata/*.golden.
func TestGolden(t *testing.T) {
	t.Parallel()
	for _, tc := range goldenCases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			in := tc.installed()
			if err := in.Ruleset.Validate(); err != nil {
				t.Fatalf("Validate: %v", err)
			}
			var dump, wall strings.Builder
			for _, f := range []Family{IPv4, IPv6} {
				tables := in.Ruleset.tables(f, in.facts())
				golden(t, tc.name+".iptables-"+strings.ToLower(f.String()), string(document(f, tables, nil)))
				for _, tb := range tables {
					dumpTable(&dump, tb)
				}
			}
			for _, tb := range in.wall() {
				dumpTable(&wall, tb)
			}
			golden(t, tc.name+".nftables", dump.String())
			golden(t, tc.name+".wall", wall.String())
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; `go test ./plugin/ruleset -run TestGolden -update` writes it", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// TestRevision fails when rendered rules change without a new Revision: pods that are captured already would keep the
// old rules. The sum leaves out comment lines, since a new reason for the same rule replaces nothing in the kernel.
func TestRevision(t *testing.T) {
	t.Parallel()
	const revision, sum = 4, "968e208fde30af1a"
	paths, err := filepath.Glob("testdata/*.golden")
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	for _, p := range paths {
		data, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(data) {
			if !bytes.HasPrefix(bytes.TrimSpace(line), []byte("#")) {
				h.Write(line)
			}
		}
	}
	if got := hex.EncodeToString(h.Sum(nil))[:16]; got != sum || Revision != revision {
		t.Errorf("got sum %s, Revision %d; want %s, %d: if rules have changed, raise Revision and write both here",
			got, Revision, sum, revision)
	}
}

// TestNoStrayGoldenFiles finds golden files of cases that were renamed or deleted.
func TestNoStrayGoldenFiles(t *testing.T) {
	if *update {
		return
	}
	t.Parallel()
	paths, err := filepath.Glob("testdata/*.golden")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := len(paths), 4*len(goldenCases); got != want {
		t.Errorf("got %d golden files, want %d", got, want)
	}
}
