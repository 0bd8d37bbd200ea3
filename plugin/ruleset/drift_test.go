package ruleset_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// damage is a change that commands make to the rules of Provisional("eth0"), and the drift that Check then reports.
type damage struct {
	name     string
	commands []string // IPT and IP6T stand for the tools of the flavour
	want     []string // every line of the drift
}

// Parts of the rules of Provisional("eth0").
const (
	redirect    = "-p tcp -j REDIRECT --to-ports "
	jumpToInput = "-A INPUT -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j SLUICE_INPUT"
	synGate     = "-A SLUICE_INPUT -p tcp -m tcp --dport 15001 " +
		"-m conntrack --ctstate DNAT -m socket --nowildcard -j RETURN"
)

var iptablesDamages = []damage{
	{
		"a rule is deleted",
		[]string{"IPT -t nat -D SLUICE_OUTPUT -o lo -j RETURN"},
		[]string{"IPv4 nat SLUICE_OUTPUT: missing or changed: -A SLUICE_OUTPUT -o lo -j RETURN"},
	},
	{
		"a rule of IPv6 is deleted",
		[]string{"IP6T -t nat -D SLUICE_GATE " + redirect + "15001"},
		[]string{"IPv6 nat SLUICE_GATE: missing or changed: -A SLUICE_GATE " + redirect + "15001"},
	},
	{
		"a rule is changed",
		[]string{"IPT -t nat -R SLUICE_GATE 2 " + redirect + "15002"},
		[]string{
			"IPv4 nat SLUICE_GATE: missing or changed: -A SLUICE_GATE " + redirect + "15001",
			"IPv4 nat SLUICE_GATE: unexpected: -A SLUICE_GATE " + redirect + "15002",
		},
	},
	{
		"a jump is deleted",
		[]string{"IPT -t nat -D OUTPUT 1"},
		[]string{"IPv4 nat: missing: -A OUTPUT -p tcp -j SLUICE_OUTPUT"},
	},
	{
		"a chain is deleted, and the jump to it",
		[]string{"IPT -t mangle -D INPUT 1", "IPT -t mangle -F SLUICE_INPUT", "IPT -t mangle -X SLUICE_INPUT"},
		[]string{
			"IPv4 mangle: missing: " + jumpToInput,
			"IPv4 mangle SLUICE_INPUT: chain missing",
		},
	},
	{
		"a foreign rule is inserted",
		[]string{"IPT -t nat -I SLUICE_CAPTURE -p tcp -m tcp --dport 22 -j RETURN"},
		[]string{"IPv4 nat SLUICE_CAPTURE: unexpected: -A SLUICE_CAPTURE -p tcp -m tcp --dport 22 -j RETURN"},
	},
	{
		"a rule stands before our jump",
		[]string{"IPT -t nat -I OUTPUT -j ACCEPT"},
		[]string{"IPv4 nat: before ours: -A OUTPUT -j ACCEPT"},
	},
	{
		"a rule is repeated",
		[]string{"IPT -t nat -A SLUICE_OUTPUT -o lo -j RETURN"},
		[]string{"IPv4 nat SLUICE_OUTPUT: rules out of order or repeated"},
	},
	{
		"rules change places",
		[]string{
			"IPT -t mangle -D SLUICE_INPUT -p tcp --dport 15001 -j DROP",
			"IPT -t mangle -I SLUICE_INPUT -p tcp --dport 15001 -j DROP",
		},
		[]string{"IPv4 mangle SLUICE_INPUT: rules out of order or repeated"},
	},
}

var nftablesDamages = []damage{
	{
		"a rule is deleted",
		[]string{"nft flush chain ip sluice-nat SLUICE_CAPTURE"},
		[]string{
			"IPv4 table sluice-nat chain SLUICE_CAPTURE: missing or changed: -A SLUICE_CAPTURE -p tcp -j SLUICE_GATE",
		},
	},
	{
		"a rule is changed",
		[]string{
			"nft flush chain ip sluice-nat SLUICE_CAPTURE",
			"nft add rule ip sluice-nat SLUICE_CAPTURE meta l4proto tcp redirect to :15002",
		},
		[]string{
			"IPv4 table sluice-nat chain SLUICE_CAPTURE: missing or changed: -A SLUICE_CAPTURE -p tcp -j SLUICE_GATE",
			"IPv4 table sluice-nat chain SLUICE_CAPTURE: unexpected: a rule that is not ours, handle ",
		},
	},
	{
		"a jump is deleted",
		[]string{"nft flush chain ip6 sluice-nat OUTPUT"},
		[]string{"IPv6 table sluice-nat chain OUTPUT: missing or changed: -A OUTPUT -p tcp -j SLUICE_OUTPUT"},
	},
	{
		"a chain is deleted",
		[]string{"nft delete chain ip sluice-mangle INPUT"},
		[]string{"IPv4 table sluice-mangle chain INPUT: missing or changed: " + jumpToInput},
	},
	{
		"a table is deleted",
		[]string{"nft delete table ip6 sluice-mangle"},
		[]string{
			"IPv6 table sluice-mangle chain SLUICE_INPUT: missing or changed: " + synGate,
			"IPv6 table sluice-mangle chain SLUICE_INPUT: missing or changed: " +
				"-A SLUICE_INPUT -p tcp -m tcp --dport 15001 -j DROP",
			"IPv6 table sluice-mangle chain INPUT: missing or changed: " + jumpToInput,
		},
	},
	{
		"a foreign rule is inserted",
		[]string{"nft insert rule ip sluice-nat SLUICE_CAPTURE tcp dport 22 return"},
		[]string{"IPv4 table sluice-nat chain SLUICE_CAPTURE: unexpected: a rule that is not ours, handle "},
	},
	{
		"a rule stands before our jump",
		[]string{"nft insert rule ip sluice-nat OUTPUT accept"},
		[]string{"IPv4 table sluice-nat chain OUTPUT: unexpected: a rule that is not ours, handle "},
	},
	{
		"a rule is repeated",
		[]string{`nft add rule ip sluice-nat SLUICE_OUTPUT oifname "lo" return`},
		[]string{"IPv4 table sluice-nat chain SLUICE_OUTPUT: rules out of order or repeated"},
	},
	{
		// Without the socket match the guard would let SYNs to a closed port through.
		"the SYN gate is removed from the guard",
		[]string{
			"nft flush chain ip sluice-mangle SLUICE_INPUT",
			"nft add rule ip sluice-mangle SLUICE_INPUT tcp dport 15001 ct status dnat return",
			"nft add rule ip sluice-mangle SLUICE_INPUT tcp dport 15001 drop",
		},
		[]string{
			"IPv4 table sluice-mangle chain SLUICE_INPUT: missing or changed: " + synGate,
			"IPv4 table sluice-mangle chain SLUICE_INPUT: unexpected: a rule that is not ours, handle ",
		},
	},
}

const egressMissing = "link table sluice-wall chain EGRESS_eth0: missing or changed: EGRESS_eth0: "

// damages of the parts that every backend has.
var commonDamages = []damage{
	{
		"a rule of the wall is deleted",
		[]string{"nft flush chain inet sluice-wall SLUICE_STOP"},
		[]string{
			"inet table sluice-wall chain SLUICE_STOP: missing or changed: SLUICE_STOP: sent by a nested container",
			"inet table sluice-wall chain SLUICE_STOP: missing or changed: SLUICE_STOP: " +
				"sent by a socket in the pod's netns",
		},
	},
	{
		"the wall sleeps",
		[]string{"nft add table inet sluice-wall { flags dormant; }"},
		[]string{"inet table sluice-wall: it has flags, such as dormant"},
	},
	{
		"counters are added",
		[]string{"nft add counter inet sluice-wall more", "nft add counter netdev sluice-wall quic"},
		[]string{
			"inet table sluice-wall: 3 counters instead of 2", "link table sluice-wall: 3 counters instead of 2",
		},
	},
	{
		"the wall stands elsewhere",
		[]string{
			"nft delete chain inet sluice-refuse OUTPUT",
			"nft add chain inet sluice-refuse OUTPUT { type filter hook output priority 10; }",
			"nft add rule inet sluice-refuse OUTPUT meta l4proto != tcp jump SLUICE_OUTPUT",
		},
		[]string{"inet table sluice-refuse chain OUTPUT: not at its hook"},
	},
	{
		"the wall's hook is deleted",
		[]string{"nft delete chain netdev sluice-wall EGRESS_eth0"},
		[]string{
			egressMissing + "the stack's rules have let it pass", // of IPv4
			egressMissing + "the stack's rules have let it pass", // of IPv6
			egressMissing + "another frame",
		},
	},
}

// TestCheckNamesDrift also repairs the drift: Apply and Remove work on damaged rules too.
func TestCheckNamesDrift(t *testing.T) {
	t.Parallel()
	damages := map[string][]damage{
		"iptables-nft": iptablesDamages, "iptables-legacy": iptablesDamages, "nftables": nftablesDamages,
	}
	for _, backend := range kernelBackends {
		tools := strings.NewReplacer("IPT", backend, "IP6T", strings.Replace(backend, "iptables", "ip6tables", 1))
		for _, d := range slices.Concat(damages[backend], commonDamages) {
			t.Run(backend+"/"+d.name, func(t *testing.T) {
				t.Parallel()
				h := newPod(t)
				in := apply(t, h, ruleset.Provisional("eth0"), backend, nil)
				for _, repair := range []func(){
					func() {
						in = apply(t, h, in.Ruleset, backend, &in)
						checkNoDrift(t, h, in)
					},
					func() {
						if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
							t.Errorf("Remove: %v", err)
						}
						checkNothingLeft(t, h)
					},
				} {
					for _, c := range d.commands {
						words := strings.Fields(tools.Replace(c))
						h.Exec(words[0], words[1:]...)
					}
					checkDrift(t, h, in, d.want)
					repair()
				}
			})
		}
	}
}

var handle = regexp.MustCompile(`handle \d+$`)

func checkDrift(t *testing.T, h *testbed.Host, in ruleset.Installed, want []string) {
	t.Helper()
	got, err := in.Check(t.Context(), h.Path())
	if err != nil {
		t.Fatalf("Check: %v", err)
	}
	for i := range got {
		got[i] = handle.ReplaceAllString(got[i], "handle ")
	}
	if !slices.Equal(got, want) {
		t.Errorf("Check: got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

func TestCheckNamesAddresses(t *testing.T) {
	t.Parallel()
	h := newPod(t)
	in := apply(t, h, ruleset.Provisional("eth0"), "auto", nil)
	h.IP("addr", "del", "192.0.2.2/24", "dev", "eth0")
	h.IP("addr", "add", "192.0.2.3/24", "dev", "eth0")
	checkDrift(t, h, in, []string{
		"the rules are for eth0 02:00:00:00:00:02 with 192.0.2.2 with 2001:db8::2, which is not there any more",
		"the rules are not for eth0 02:00:00:00:00:02 with 192.0.2.3 with 2001:db8::2",
	})
	checkNoDrift(t, h, apply(t, h, in.Ruleset, "auto", &in))
}
