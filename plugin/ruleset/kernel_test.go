package ruleset_test

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

// kernelBackends are the backends that every test of the kernel's rules runs with.
var kernelBackends = []string{"iptables-nft", "iptables-legacy", "nftables"}

// rich returns a ruleset with every kind of rule.
func rich() ruleset.Ruleset {
	return ruleset.Ruleset{
		Interfaces: []string{"eth0", "net1"},
		Upstream:   netip.MustParseAddrPort("192.0.2.1:18080"),
		IncludePorts: []ruleset.PortRange{
			{First: 80, Last: 80}, {First: 443, Last: 443}, {First: 8000, Last: 8999},
		},
		ExcludePorts:      []ruleset.PortRange{{First: 22, Last: 22}, {First: 9000, Last: 9999}},
		IncludeCIDRs:      cidrs("198.51.100.0/24", "2000::/3", "203.0.113.7/32"),
		ExcludeCIDRs:      append(ruleset.LinkLocal(), cidrs("10.0.0.0/8", "2001:db8::7/128")...),
		ExcludeInterfaces: []string{"wg0", "docker0"},
		InboundPorts:      []ruleset.PortRange{{First: 80, Last: 80}, {First: 1, Last: 65535}},
		ExcludeSources:    cidrs("192.0.2.1/32", "0.0.0.0/0", "2001:db8::/32"),
		RejectQUIC:        true,
		Other:             ruleset.OtherDNS,
		Resolvers:         []netip.Addr{netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("2001:db8::53")},
		Ports:             ruleset.Ports{Outbound: 16001, Inbound: 16006},
		KeepOlder:         true,
	}
}

func cidrs(texts ...string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, s := range texts {
		prefixes = append(prefixes, netip.MustParsePrefix(s))
	}
	return prefixes
}

// forBackends runs f for each backend with a netns of its own.
func forBackends(t *testing.T, f func(t *testing.T, h *testbed.Host, backend string)) {
	t.Helper()
	t.Parallel()
	for _, backend := range kernelBackends {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			f(t, newPod(t), backend)
		})
	}
}

// newPod makes a netns with the interface eth0, as CNI leaves it.
func newPod(t *testing.T) *testbed.Host {
	t.Helper()
	h := testbed.NewHost(t, "ruleset")
	h.IP("link", "add", "eth0", "address", eth0().MAC, "type", "veth", "peer", "name", "peer")
	h.IP("addr", "add", "192.0.2.2/24", "dev", "eth0")
	h.IP("addr", "add", "2001:db8::2/64", "dev", "eth0", "nodad")
	h.IP("link", "set", "eth0", "up")
	return h
}

// eth0 is the interface of newPod.
func eth0() ruleset.Interface {
	return ruleset.Interface{
		Name: "eth0", MAC: "02:00:00:00:00:02",
		IPv4: netip.MustParseAddr("192.0.2.2"), IPv6: netip.MustParseAddr("2001:db8::2"),
	}
}

func apply(
	t *testing.T, h *testbed.Host, r ruleset.Ruleset, backend string, previous *ruleset.Installed,
) ruleset.Installed {
	t.Helper()
	in, err := ruleset.Apply(t.Context(), h.Path(), r, backend, previous)
	if err != nil {
		t.Fatalf("Apply: %v", err)
	}
	return in
}

func checkNoDrift(t *testing.T, h *testbed.Host, in ruleset.Installed) {
	t.Helper()
	drift, err := in.Check(t.Context(), h.Path())
	if err != nil || len(drift) > 0 {
		t.Errorf("Check: got %q, %v; want no drift", drift, err)
	}
}

// rules lists all netfilter rules in the netns of h, those of other programs too.
func rules(h *testbed.Host) string {
	var all strings.Builder
	for _, list := range []string{"nft list ruleset", "iptables-legacy-save", "ip6tables-legacy-save"} {
		words := strings.Fields(list)
		all.WriteString(h.Exec(words[0], words[1:]...))
	}
	return all.String()
}

func checkNothingLeft(t *testing.T, h *testbed.Host) {
	t.Helper()
	if got := rules(h); strings.Contains(strings.ToLower(got), "sluice") {
		t.Errorf("want no rule of sluice left, got:\n%s", got)
	}
}

func TestApplyCheckRemove(t *testing.T) {
	for name, r := range map[string]ruleset.Ruleset{"provisional": ruleset.Provisional("eth0"), "rich": rich()} {
		t.Run(name, func(t *testing.T) {
			forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
				in := apply(t, h, r, backend, nil)
				want := ruleset.Installed{
					Ruleset: r, Backend: backend, SYNGate: true, Revision: ruleset.Revision, IPv6: true,
					Wall: ruleset.WallFull, Interfaces: []ruleset.Interface{eth0()},
				}
				equate := cmpopts.EquateComparable(netip.Prefix{}, netip.AddrPort{}, netip.Addr{})
				if diff := cmp.Diff(want, in, equate); diff != "" {
					t.Errorf("Apply (-want +got):\n%s", diff)
				}
				checkNoDrift(t, h, in)
				for range 2 {
					if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
						t.Fatalf("Remove: %v", err)
					}
					checkNothingLeft(t, h)
				}
			})
		})
	}
}

// TestCheckKnowsHowRulesAreListed has the values that the iptables tools print in an unusual form.
func TestCheckKnowsHowRulesAreListed(t *testing.T) {
	for name, change := range map[string]func(*ruleset.Ruleset){
		"CIDRs of a whole family": func(r *ruleset.Ruleset) {
			r.IncludeCIDRs = cidrs("0.0.0.0/0", "::/0")
			r.InboundPorts = []ruleset.PortRange{{First: 80, Last: 80}}
			r.ExcludeSources = r.IncludeCIDRs
		},
		"every port": func(r *ruleset.Ruleset) { r.IncludePorts = []ruleset.PortRange{{First: 1, Last: 65535}} },
		"a port named twice": func(r *ruleset.Ruleset) {
			r.ExcludePorts = []ruleset.PortRange{{First: 22, Last: 22}, {First: 22, Last: 22}}
		},
		"odd interface names": func(r *ruleset.Ruleset) {
			r.ExcludeInterfaces = []string{"eth0:1", "veth@1", "a.b_c-d", "-x"}
		},
		"long IPv6 CIDRs": func(r *ruleset.Ruleset) {
			r.ExcludeCIDRs = cidrs(
				"2001:db8:0:0:1::/80", "2001:db8:1:2:3:4:5:6/128", "2001:0:0:1::1/128", "fd00:0:1::/48",
			)
		},
		"an IPv4-compatible IPv6 address": func(r *ruleset.Ruleset) { r.ExcludeCIDRs = cidrs("::192.0.2.1/128") },
	} {
		t.Run(name, func(t *testing.T) {
			forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
				r := ruleset.Provisional("eth0")
				change(&r)
				checkNoDrift(t, h, apply(t, h, r, backend, nil))
			})
		})
	}
}

func TestApplyTwiceIsHarmless(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		in := apply(t, h, rich(), backend, nil)
		before := rules(h)
		for name, previous := range map[string]*ruleset.Installed{"unknown": nil, "known": &in} {
			again := apply(t, h, rich(), backend, previous)
			checkNoDrift(t, h, again)
			if diff := cmp.Diff(withoutCounters(before), withoutCounters(rules(h))); diff != "" {
				t.Errorf("applied again, the previous ruleset being %s (-before +after):\n%s", name, diff)
			}
		}
	})
}

// withoutCounters leaves out the lines that change by themselves: comments with the time, and chains with counters. It
// sorts the tables: a table that was replaced is listed last.
func withoutCounters(rules string) string {
	var kept []string
	for line := range strings.Lines(rules) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
			kept = append(kept, line)
		}
	}
	tables := strings.Split(strings.Join(kept, ""), "\n}\n") // a table ends there
	slices.Sort(tables)
	return strings.Join(tables, "\n}\n")
}

func TestApplyReplaces(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		previous := apply(t, h, rich(), backend, nil)
		changed := rich()
		changed.IncludePorts = []ruleset.PortRange{{First: 8443, Last: 8443}}
		in := apply(t, h, changed, "auto", &previous)
		if in.Backend != backend {
			t.Errorf("replaced with %s, want it in place with %s", in.Backend, backend)
		}
		checkNoDrift(t, h, in)
		drift, err := previous.Check(t.Context(), h.Path())
		if err != nil || len(drift) == 0 {
			t.Errorf("Check of the replaced ruleset: got %q, %v; want drift", drift, err)
		}
		if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
			t.Fatalf("Remove: %v", err)
		}
		checkNothingLeft(t, h)
	})
}

// TestUpgradeToAWall: the rules of filter that stood in for the wall in older versions go.
func TestUpgradeToAWall(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		previous := apply(t, h, rich(), backend, nil)
		previous.Wall = ruleset.WallNone
		if backend == ruleset.BackendNFTables {
			h.Exec("nft", "add table ip sluice-filter")
		} else {
			h.Exec(backend, "-t", "filter", "-N", "SLUICE_OUTPUT")
			h.Exec(backend, "-t", "filter", "-A", "SLUICE_OUTPUT", "-j", "DROP")
			h.Exec(backend, "-t", "filter", "-I", "OUTPUT", "-j", "SLUICE_OUTPUT")
		}
		checkNoDrift(t, h, apply(t, h, rich(), backend, &previous))
		if backend == ruleset.BackendNFTables {
			if got := h.Exec("nft", "list", "tables"); strings.Contains(got, "sluice-filter") {
				t.Errorf("the table of the older version is still there:\n%s", got)
			}
		} else if got := h.Exec(backend, "-t", "filter", "-S"); strings.Contains(got, "SLUICE") {
			t.Errorf("the rules of the older version are still there:\n%s", got)
		}
	})
}

// TestManyCIDRs: a long list of exclusions makes a ruleset of thousands of rules.
func TestManyCIDRs(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		r := rich()
		for i := range 300 {
			r.ExcludeCIDRs = append(r.ExcludeCIDRs,
				netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}), 32),
				netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 8), 15: byte(i)}), 128))
		}
		in := apply(t, h, r, backend, nil)
		checkNoDrift(t, h, in)
		checkNoDrift(t, h, apply(t, h, r, backend, &in))
	})
}

func TestForeignRulesStay(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		tool := "iptables-nft"
		if backend == "iptables-legacy" {
			tool = backend
		}
		h.Exec(tool, "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")
		h.Exec(tool, "-t", "nat", "-A", "OUTPUT", "-d", "192.0.2.99/32", "-j", "ACCEPT")
		h.Exec(tool, "-t", "filter", "-N", "OTHERS")
		before := h.Exec(tool, "-t", "nat", "-S") + h.Exec(tool, "-t", "filter", "-S")
		in := apply(t, h, rich(), backend, nil)
		checkNoDrift(t, h, in)
		if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
			t.Fatalf("Remove: %v", err)
		}
		if diff := cmp.Diff(before, h.Exec(tool, "-t", "nat", "-S")+h.Exec(tool, "-t", "filter", "-S")); diff != "" {
			t.Errorf("rules of other programs (-before +after):\n%s", diff)
		}
	})
}

// TestRemoveReleasesBeforeTheGateGoes: when released runs, capture has ended, but the port is still guarded.
func TestRemoveReleasesBeforeTheGateGoes(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		in := apply(t, h, rich(), backend, nil)
		ran := false
		err := in.Remove(t.Context(), h.Path(), func() error {
			ran = true
			got := rules(h)
			if strings.Contains(got, "SLUICE_CAPTURE") || !strings.Contains(got, "SLUICE_INPUT") {
				t.Errorf("want only the SYN gate, got these rules:\n%s", got)
			}
			return nil
		})
		if err != nil || !ran {
			t.Errorf("Remove: got %v, released called: %t", err, ran)
		}
		checkNothingLeft(t, h)
	})
}

func TestRemoveGoesOnWhenReleasedFails(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		in := apply(t, h, rich(), backend, nil)
		broken := errors.New("conntrack is broken")
		if err := in.Remove(t.Context(), h.Path(), func() error { return broken }); !errors.Is(err, broken) {
			t.Errorf("Remove: got %v, want %v", err, broken)
		}
		checkNothingLeft(t, h)
	})
}

func TestApplyBringsLoUp(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "ruleset")
	h.IP("link", "set", "lo", "down")
	apply(t, h, rich(), "auto", nil)
	if got := h.Exec("ip", "-br", "link", "show", "lo"); !strings.Contains(got, "UP") {
		t.Errorf("got %q, want lo up", got)
	}
}

func TestNoSuchNetns(t *testing.T) {
	t.Parallel()
	const path = "/run/netns/there-is-no-such-netns"
	in := ruleset.Installed{Ruleset: rich(), Backend: "nftables"}
	_, aerr := ruleset.Apply(t.Context(), path, rich(), "auto", nil)
	_, cerr := in.Check(t.Context(), path)
	rerr := in.Remove(t.Context(), path, nil)
	for verb, err := range map[string]error{"Apply": aerr, "Check": cerr, "Remove": rerr} {
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, want an error that names %s", verb, err, path)
		}
	}
}

func TestApplyRefusesInvalidArguments(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "ruleset")
	if _, err := ruleset.Apply(t.Context(), h.Path(), ruleset.Ruleset{}, "auto", nil); err == nil {
		t.Error("a ruleset without interfaces: got no error")
	}
	_, err := ruleset.Apply(t.Context(), h.Path(), rich(), "ebtables", nil)
	if err == nil || !strings.Contains(err.Error(), `"ebtables"`) {
		t.Errorf("an unknown backend: got %v, want an error that names it", err)
	}
	checkNothingLeft(t, h)
}
