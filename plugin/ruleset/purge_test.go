package ruleset_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// foreign installs rules as Docker and a service mesh would, and returns them.
func foreign(h *testbed.Host, tool string) string {
	for _, rule := range []string{
		"-t nat -N DOCKER", "-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER",
		"-t nat -A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER",
		"-t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
		"-t nat -A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80",
		"-t filter -N DOCKER-USER", "-t filter -A FORWARD -j DOCKER-USER", "-t filter -A DOCKER-USER -j RETURN",
		"-t filter -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-t filter -A OUTPUT -m owner --uid-owner 1337 -m comment --comment SLUICE_INPUT -j ACCEPT",
		"-t mangle -A INPUT -p tcp -m mark --mark 0x1/0xff -m multiport --dports 80,443 -j ACCEPT",
		"-t mangle -A POSTROUTING -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu",
	} {
		h.Exec(tool, strings.Fields(rule)...)
	}
	return h.Rules()
}

// toolOf is the tool with which rules beside those of the backend are installed.
func toolOf(backend string) string {
	if backend == ruleset.BackendNFTables {
		return "iptables-nft"
	}
	return backend
}

func checkLeftover(t *testing.T, h *testbed.Host, want bool) {
	t.Helper()
	if got, err := ruleset.Leftover(t.Context(), h.Path()); err != nil || got != want {
		t.Errorf("Leftover: got %t, %v; want %t", got, err, want)
	}
}

// TestPurge finds rules by their names, and leaves those of other programs.
func TestPurge(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		before := foreign(h, toolOf(backend))
		checkLeftover(t, h, false)
		apply(t, h, rich(), backend, nil)
		checkLeftover(t, h, true)
		for range 2 {
			if err := ruleset.Purge(t.Context(), h.Path()); err != nil {
				t.Fatalf("Purge: %v", err)
			}
			checkNoChainLeft(t, h)
			checkLeftover(t, h, false)
		}
		after := h.Rules()
		for line := range strings.Lines(before) {
			if !strings.Contains(after, line) {
				t.Errorf("a rule of another program is gone: %s", line)
			}
		}
	})
}

// TestPurgeOfSeveralBackends: an ADD that was killed may have used another backend than the next.
func TestPurgeOfSeveralBackends(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "several")
	for _, backend := range []string{"iptables-nft", "iptables-legacy", "nftables"} {
		apply(t, h, rich(), backend, nil)
	}
	if err := ruleset.Purge(t.Context(), h.Path()); err != nil {
		t.Errorf("Purge: %v", err)
	}
	checkNothingLeft(t, h)
}

// TestPurgeOfAPart of the rules, as an ADD that was killed leaves it.
func TestPurgeOfAPart(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		apply(t, h, rich(), backend, nil)
		if backend == ruleset.BackendNFTables {
			h.Exec("nft", "delete table ip6 sluice-nat; delete table ip sluice-mangle")
		} else {
			tool6 := strings.Replace(backend, "ip", "ip6", 1)
			for _, table := range []string{"nat", "mangle", "filter"} {
				h.Exec(tool6, "-t", table, "-F")
				h.Exec(tool6, "-t", table, "-X")
			}
			h.Exec(backend, "-t", "nat", "-D", "OUTPUT", "1")
		}
		if err := ruleset.Purge(t.Context(), h.Path()); err != nil {
			t.Errorf("Purge: %v", err)
		}
		checkNothingLeft(t, h)
	})
}

// TestPurgeChangesNothing in a netns without rules of sluice: a table that the legacy tools list is there from then on.
func TestPurgeChangesNothing(t *testing.T) {
	t.Parallel()
	h := testbed.NewHost(t, "untouched")
	before := h.Rules()
	checkLeftover(t, h, false)
	if err := ruleset.Purge(t.Context(), h.Path()); err != nil {
		t.Errorf("Purge: %v", err)
	}
	if after := h.Rules(); after != before {
		t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
	}
	for _, file := range []string{"ip_tables_names", "ip6_tables_names"} {
		if names, err := h.TryExec("cat", filepath.Join("/proc/net", file)); err == nil && names != "" {
			t.Errorf("the netns has legacy tables: %s", names)
		}
	}
}

// TestPurgeWithoutTools: only the legacy tables need one. Not parallel: it sets PATH.
func TestPurgeWithoutTools(t *testing.T) {
	path := os.Getenv("PATH")
	for _, backend := range []string{"iptables-nft", "nftables", "iptables-legacy"} {
		t.Run(backend, func(t *testing.T) {
			h := testbed.NewHost(t, "without")
			apply(t, h, rich(), backend, nil)
			t.Setenv("PATH", t.TempDir())
			err := ruleset.Purge(t.Context(), h.Path())
			t.Setenv("PATH", path)
			if backend == "iptables-legacy" {
				if err == nil || !strings.Contains(err.Error(), "iptables-legacy, and the tool is not in PATH") {
					t.Errorf("Purge: got %v, want an error that names the tool", err)
				}
				if err := ruleset.Purge(t.Context(), h.Path()); err != nil {
					t.Errorf("Purge, with the tool: %v", err)
				}
			} else if err != nil {
				t.Errorf("Purge: %v", err)
			}
			checkNothingLeft(t, h)
		})
	}
}

// checkNoChainLeft is checkNothingLeft where another program has the name of a chain in a comment.
func checkNoChainLeft(t *testing.T, h *testbed.Host) {
	t.Helper()
	for line := range strings.Lines(rules(h)) {
		if strings.Contains(strings.ToLower(line), "sluice") && !strings.Contains(line, "1337") {
			t.Errorf("want no rule of sluice left, got %s", line)
		}
	}
}
