package ruleset_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// The tests of this file put failing tools before the real ones in PATH, so they do not run in parallel.

// breakTool makes tool fail for documents that match the shell pattern. The tool commits the first table before it
// fails, unless the pattern is everything.
func breakTool(t *testing.T, tool, pattern string) {
	t.Helper()
	tool += "-restore"
	path, err := exec.LookPath(tool)
	if err != nil {
		t.Fatal(err)
	}
	firstTable := `printf '%s\n' "$doc" | sed /^COMMIT/q | ` + path + ` "$@"`
	if pattern == everything {
		firstTable = ":"
	}
	script := fmt.Sprintf(`#!/bin/sh
doc=$(cat)
case "$doc" in
%s)
	%s
	echo "broken by a test" >&2
	exit 1
esac
printf '%%s\n' "$doc" | exec %s "$@"
`, pattern, firstTable, path)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, tool), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

const (
	everything = "*"
	ofCapture  = "*REDIRECT*"
	ofSYNGate  = "*'-m socket'*"
)

func TestWithoutSocketMatchThereIsNoSYNGate(t *testing.T) {
	for _, tool := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(tool, func(t *testing.T) {
			breakTool(t, tool, ofSYNGate)
			breakTool(t, strings.Replace(tool, "ip", "ip6", 1), ofSYNGate)
			h := testbed.NewHost(t, "broken")
			in := apply(t, h, rich(), tool, nil)
			if in.SYNGate || !in.IPv6 {
				t.Errorf("got SYNGate %t, IPv6 %t; want only IPv6", in.SYNGate, in.IPv6)
			}
			checkNoDrift(t, h, in)
			if got := rules(h); strings.Contains(got, `match "socket"`) || strings.Contains(got, "-m socket") ||
				!strings.Contains(got, "SLUICE_INPUT") {
				t.Errorf("want the guard without a SYN gate, got these rules:\n%s", got)
			}
			if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
				t.Errorf("Remove: %v", err)
			}
			checkNothingLeft(t, h)
		})
	}
}

func TestAutoPrefersAnyBackendWithSYNGate(t *testing.T) {
	for _, tc := range []struct {
		broken []string
		want   string
	}{
		{[]string{"iptables-nft"}, "iptables-legacy"},
		{[]string{"iptables-legacy"}, "iptables-nft"},
		{[]string{"iptables-nft", "iptables-legacy"}, "nftables"},
		{[]string{"ip6tables-nft", "ip6tables-legacy"}, "nftables"},
	} {
		t.Run("without "+strings.Join(tc.broken, " and "), func(t *testing.T) {
			for _, tool := range tc.broken {
				breakTool(t, tool, ofSYNGate)
			}
			h := testbed.NewHost(t, "broken")
			h.IP("addr", "add", "2001:db8::2/128", "dev", "lo")
			in := apply(t, h, rich(), "auto", nil)
			if in.Backend != tc.want || !in.SYNGate || !in.IPv6 {
				t.Errorf("got %s, SYNGate %t, IPv6 %t; want %s with both", in.Backend, in.SYNGate, in.IPv6, tc.want)
			}
			checkNoDrift(t, h, in)
			if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
				t.Errorf("Remove: %v", err)
			}
			checkNothingLeft(t, h)
		})
	}
}

func TestFailureHalfWayLeavesNothing(t *testing.T) {
	for _, tool := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(tool, func(t *testing.T) {
			breakTool(t, tool, ofCapture)
			h := testbed.NewHost(t, "broken")
			_, err := ruleset.Apply(t.Context(), h.Path(), rich(), tool, nil)
			if err == nil || !strings.Contains(err.Error(), tool+"-restore") ||
				!strings.Contains(err.Error(), "broken by a test") {
				t.Errorf("Apply: got %v, want an error with the tool's name and its output", err)
			}
			checkNothingLeft(t, h)
		})
	}
}

func TestFailureToReplacePutsBack(t *testing.T) {
	for _, tool := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(tool, func(t *testing.T) {
			breakTool(t, tool, "*'--dport 8443 '*")
			h := testbed.NewHost(t, "broken")
			previous := apply(t, h, rich(), tool, nil)
			changed := rich()
			changed.Interfaces = []string{"eth0"}
			changed.IncludePorts = []ruleset.PortRange{{First: 8443, Last: 8443}}
			if _, err := ruleset.Apply(t.Context(), h.Path(), changed, tool, &previous); err == nil {
				t.Fatal("Apply: got no error")
			}
			checkNoDrift(t, h, previous)
		})
	}
}

func TestIPv6ThatCannotBeFiltered(t *testing.T) {
	for _, tool := range []string{"iptables-nft", "iptables-legacy"} {
		tool6 := strings.Replace(tool, "ip", "ip6", 1)
		t.Run("with an address fails/"+tool, func(t *testing.T) {
			breakTool(t, tool6, everything)
			h := testbed.NewHost(t, "broken")
			h.IP("addr", "add", "2001:db8::2/128", "dev", "lo")
			_, err := ruleset.Apply(t.Context(), h.Path(), rich(), tool, nil)
			if err == nil || !strings.Contains(err.Error(), "IPv6 address that cannot be captured") {
				t.Errorf("Apply: got %v, want an error about the IPv6 address", err)
			}
			checkNothingLeft(t, h)
		})
		t.Run("without an address is left out/"+tool, func(t *testing.T) {
			breakTool(t, tool6, everything)
			h := testbed.NewHost(t, "broken")
			in := apply(t, h, rich(), tool, nil)
			if in.IPv6 || !in.SYNGate {
				t.Errorf("got IPv6 %t, SYNGate %t; want only the SYN gate", in.IPv6, in.SYNGate)
			}
			checkNoDrift(t, h, in)
			if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
				t.Errorf("Remove: %v", err)
			}
			checkNothingLeft(t, h)
		})
	}
}

// TestIPv6LeftOutIsLeftClean: Remove does not look at IPv6 then, so no rule of the failed attempt may stay.
func TestIPv6LeftOutIsLeftClean(t *testing.T) {
	for _, tool := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(tool, func(t *testing.T) {
			breakTool(t, strings.Replace(tool, "ip", "ip6", 1), ofCapture)
			h := testbed.NewHost(t, "broken")
			in := apply(t, h, rich(), tool, nil)
			if in.IPv6 {
				t.Errorf("got IPv6, want it left out")
			}
			if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
				t.Errorf("Remove: %v", err)
			}
			checkNothingLeft(t, h)
		})
	}
}

func TestCancelledContextLeavesNothing(t *testing.T) {
	h := testbed.NewHost(t, "broken")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := ruleset.Apply(ctx, h.Path(), rich(), "iptables-nft", nil); err == nil {
		t.Error("Apply: got no error")
	}
	checkNothingLeft(t, h)
}

func TestWithoutTools(t *testing.T) {
	h := testbed.NewHost(t, "without")
	t.Setenv("PATH", t.TempDir())
	for backend, want := range map[string]string{
		"auto": "", "nftables": "", "iptables": "install iptables", "ebtables": `unknown backend "ebtables"`,
	} {
		err := ruleset.Available(backend)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("Available(%s) without tools: got %v, want %q", backend, err, want)
		}
	}
	in, err := ruleset.Apply(t.Context(), h.Path(), rich(), "auto", nil)
	if err != nil || in.Backend != "nftables" {
		t.Errorf("Apply without tools: got %s, %v; want nftables", in.Backend, err)
	}
}
