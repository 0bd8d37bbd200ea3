package ruleset

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestParsePortRange(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		in      string
		want    PortRange
		wantErr string
	}{
		{in: "80", want: PortRange{80, 80}},
		{in: "1", want: PortRange{1, 1}},
		{in: "65535", want: PortRange{65535, 65535}},
		{in: "8000-8999", want: PortRange{8000, 8999}},
		{in: "80-80", want: PortRange{80, 80}},
		{in: "1-65535", want: PortRange{1, 65535}},
		{in: " 80 - 90 ", want: PortRange{80, 90}},
		{in: "", wantErr: `port ""`},
		{in: "0", wantErr: `port "0"`},
		{in: "0-80", wantErr: `port "0-80"`},
		{in: "65536", wantErr: `port "65536"`},
		{in: "-80", wantErr: `port "-80"`},
		{in: "80-", wantErr: `port "80-"`},
		{in: "1-2-3", wantErr: `port "1-2-3"`},
		{in: "+80", wantErr: `port "+80"`},
		{in: "http", wantErr: `port "http"`},
		{in: "0x50", wantErr: `port "0x50"`},
		{in: "80:90", wantErr: `port "80:90"`},
		{in: "90-80", wantErr: `port range "90-80" ends before it starts`},
	} {
		got, err := ParsePortRange(tc.in)
		wantError(t, "ParsePortRange("+tc.in+")", err, tc.wantErr)
		if got != tc.want {
			t.Errorf("ParsePortRange(%q): got %v, want %v", tc.in, got, tc.want)
		}
		if err != nil {
			continue
		}
		if again, err := ParsePortRange(got.String()); err != nil || again != got {
			t.Errorf("ParsePortRange(%q), from String: got %v, %v; want %v", got, again, err, got)
		}
	}
}

func TestParseCIDR(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ in, want, wantErr string }{
		{in: "10.0.0.0/8", want: "10.0.0.0/8"},
		{in: "0.0.0.0/0", want: "0.0.0.0/0"},
		{in: "203.0.113.7", want: "203.0.113.7/32"},
		{in: "203.0.113.7/32", want: "203.0.113.7/32"},
		{in: "fd00::/8", want: "fd00::/8"},
		{in: "::/0", want: "::/0"},
		{in: "2001:DB8::7", want: "2001:db8::7/128"},
		{in: "10.1.2.3/8", wantErr: `"10.1.2.3/8" has host bits set; did you mean 10.0.0.0/8?`},
		{in: "fd00::1/8", wantErr: "did you mean fd00::/8?"},
		{in: "::ffff:10.0.0.0/104", wantErr: "write the IPv4 prefix itself"},
		{in: "::ffff:10.0.0.1", wantErr: `"::ffff:10.0.0.1"`},
		{in: "fe80::1%eth0", wantErr: `"fe80::1%eth0" is not a CIDR`},
		{in: "10.0.0.0/33", wantErr: `"10.0.0.0/33" is not a CIDR`},
		{in: "10.0.0.0/", wantErr: "is not a CIDR"},
		{in: "10.0.0/8", wantErr: "is not a CIDR"},
		{in: "example.com", wantErr: `"example.com" is not a CIDR`},
		{in: "", wantErr: `"" is not a CIDR`},
		{in: " 10.0.0.0/8", wantErr: "is not a CIDR"},
	} {
		got, err := ParseCIDR(tc.in)
		wantError(t, "ParseCIDR("+tc.in+")", err, tc.wantErr)
		if err == nil && got.String() != tc.want {
			t.Errorf("ParseCIDR(%q): got %s, want %s", tc.in, got, tc.want)
		}
	}
}

func TestValidateInterface(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"eth0", "net1", "wg-home", "eth0.100", "veth_1", "eth0:1", "eth0@if2", "a", "fifteen-letters",
	} {
		wantError(t, "ValidateInterface("+name+")", ValidateInterface(name), "")
	}
	for _, name := range []string{
		"", "sixteen-letters-", "eth+", "eth 0", "eth0\n", `eth"0`, "eth/0", "eth!", "éth0", "-j;",
	} {
		wantError(t, "ValidateInterface("+name+")", ValidateInterface(name), "is not an interface name")
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		change  func(*Ruleset) // of Provisional("eth0")
		wantErr string
	}{
		{"provisional", func(*Ruleset) {}, ""},
		{"everything", func(r *Ruleset) {
			*r = Ruleset{
				Interfaces: []string{"eth0", "net1"}, Upstream: netip.MustParseAddrPort("192.0.2.1:1"),
				IncludePorts: []PortRange{{1, 65535}}, ExcludePorts: []PortRange{{22, 22}},
				IncludeCIDRs: cidrs("0.0.0.0/0", "::/0"), ExcludeCIDRs: cidrs("10.0.0.0/8"),
				ExcludeInterfaces: []string{"wg0"},
			}
		}, ""},
		{"no interface", func(r *Ruleset) { r.Interfaces = nil }, "interfaces: none given"},
		{"wildcard interface", func(r *Ruleset) {
			r.Interfaces = []string{"eth0", "eth+"}
		}, `"eth+" is not an interface name`},
		{"bad excluded interface", func(r *Ruleset) {
			r.ExcludeInterfaces = []string{"a b"}
		}, `"a b" is not an interface name`},
		{"port 0", func(r *Ruleset) { r.IncludePorts = []PortRange{{}} }, "port range 0-0 is empty"},
		{"range backwards", func(r *Ruleset) { r.ExcludePorts = []PortRange{{9, 8}} }, "port range 9-8 is empty"},
		{"zero CIDR", func(r *Ruleset) { r.IncludeCIDRs = []netip.Prefix{{}} }, "not a canonical prefix"},
		{"host bits", func(r *Ruleset) {
			r.ExcludeCIDRs = cidrs("10.1.2.3/8")
		}, "CIDR 10.1.2.3/8 is not a canonical prefix"},
		{"IPv4 in IPv6", func(r *Ruleset) {
			r.IncludeCIDRs = cidrs("::ffff:10.0.0.0/104")
		}, "not a canonical prefix"},
	} {
		r := Provisional("eth0")
		tc.change(&r)
		wantError(t, tc.name, r.Validate(), tc.wantErr)
	}
}

// TestRulesetInJSON: a ruleset keeps its value on the agent socket and in records.
func TestRulesetInJSON(t *testing.T) {
	t.Parallel()
	for _, tc := range goldenCases {
		want := Provisional("eth0")
		tc.change(&want)
		data, err := json.Marshal(want)
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		var got Ruleset
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		equate := cmpopts.EquateComparable(netip.Prefix{}, netip.AddrPort{}, netip.Addr{})
		if diff := cmp.Diff(want, got, equate); diff != "" {
			t.Errorf("%s: %s (-want +got):\n%s", tc.name, data, diff)
		}
	}
	var r Ruleset
	err := json.Unmarshal([]byte(`{"interfaces":["eth0"],"includePorts":["90-80"]}`), &r)
	wantError(t, "a bad port range in JSON", err, "ends before it starts")
}

// wantError checks that err contains want, or that it is nil if want is empty.
func wantError(t *testing.T, subject string, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("%s: got error %q, want none", subject, err)
	case want != "" && err == nil:
		t.Errorf("%s: got no error, want one with %q", subject, want)
	case want != "" && !strings.Contains(err.Error(), want):
		t.Errorf("%s: got error %q, want one with %q", subject, err, want)
	}
}
