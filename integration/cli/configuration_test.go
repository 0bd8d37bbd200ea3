package cli

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMalformedDaemonConfiguration(t *testing.T) {
	t.Parallel()
	const right = "upstream: {address: '127.0.0.1:18080'}\ncapture: {source: all}\n"
	n := testbed.New(t)
	own := fmt.Sprintf("agentSocket: %s\nstateDir: %s\nmetricsAddress: ''\n", n.AgentSocket(), n.StateDir())
	const toA, all = "upstream: {address: 'a:1'}\n", "\ncapture: {source: all}"
	for _, c := range []struct{ name, text, names string }{
		{"nothing", "", "missing|not a mapping"},
		{"no mapping", "[a, b]", "not a mapping"},
		{"no YAML", own + "\tupstream: {", "yaml"},
		{"the same key twice", own + right + "capture: {source: all}\n", "capture"},
		{"no upstream", own + "capture: {source: all}", "upstream.address: missing"},
		{"no source", own + "upstream: {address: '127.0.0.1:18080'}", "capture.source: missing"},
		{"unknown key", own + right + "late: {polcy: queue}", `late.polcy.*queue`},
		{"unknown key at the top", own + right + "upstreams: 3", `upstreams.*3`},
		{"a mapping where a value belongs", own + "upstream: {address: {host: a}}" + all, `upstream.address.*host`},
		{"a value where a mapping belongs", own + "upstream: 127.0.0.1:18080" + all, `upstream.*127.0.0.1:18080`},
		{"no port", own + "upstream: {address: localhost}" + all, `upstream.address.*localhost`},
		{"a port out of range", own + "upstream: {address: 'a:99999'}" + all, `upstream.address.*99999`},
		{
			"an environment variable that is not set",
			own + "upstream: {address: '${NO_SUCH_VARIABLE}:80'}" + all,
			`upstream.address.*NO_SUCH_VARIABLE`,
		},
		{"a protocol", own + "upstream: {address: 'a:1', protocol: ftp}" + all, `upstream.protocol.*ftp`},
		{"a source", own + toA + "capture: {source: some}", `capture.source.*some`},
		{
			"a CIDR",
			own + toA + "capture: {source: all, excludeCIDRs: [10.0.0.0/8, 10.0.0.1/8]}",
			`capture.excludeCIDRs.*10.0.0.1/8`,
		},
		{"no list", own + toA + "capture: {source: all, includePorts: 80}", `capture.includePorts.*80`},
		{
			"a port range",
			own + toA + "capture: {source: all, excludePorts: [80, 90-80]}",
			`capture.excludePorts.*90-80`,
		},
		{"null", own + toA + "capture: {source: all, excludePorts: [null]}", `capture.excludePorts.*null`},
		{"QUIC", own + toA + "capture: {source: all, quic: drop}", `capture.quic.*drop`},
		{"other", own + toA + "capture: {source: all, other: drop}", `capture.other.*drop`},
		{
			"a capture port",
			own + toA + "capture: {source: all, ports: {outbound: 70000}}", `capture.ports.outbound.*70000`,
		},
		{
			"capture ports that are the same",
			own + toA + "capture: {source: all, ports: {inbound: 15001}}", `capture.ports: .* both 15001`,
		},
		{"a policy", own + right + "late: {policy: never}", `late.policy.*never`},
		{"a timeout", own + right + "late: {timeout: 5 minutes}", `late.timeout.*5 minutes`},
		{
			"a relative path",
			right + fmt.Sprintf("stateDir: %s\nmetricsAddress: ''\nagentSocket: agent.sock", n.StateDir()),
			`agentSocket.*agent.sock`,
		},
		{
			"a metrics address",
			right + fmt.Sprintf("stateDir: %s\nagentSocket: %s\nmetricsAddress: 15090", n.StateDir(), n.AgentSocket()),
			`metricsAddress.*15090`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, command := range []string{"check-config", "run"} {
				out, err := n.Sluiced(command, "--config", testbed.ConfigFile(t, c.text))
				if err == nil {
					t.Errorf("%s ended with success", command)
				}
				testbed.WantMatch(t, out, c.names)
			}
			for _, path := range []string{n.AgentSocket(), n.StateDir()} {
				if _, err := os.Stat(path); err == nil {
					t.Errorf("it made %s", path)
				}
			}
		})
	}
	t.Run("no file", func(t *testing.T) {
		out, err := n.Sluiced("run", "--config", "/no/such/file")
		if err == nil {
			t.Error("the daemon ended with success")
		}
		testbed.WantMatch(t, out, "/no/such/file")
	})
}

func TestCheckConfig(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	file := testbed.ConfigFile(t, n.Config)
	if got, want := testbed.MustSluiced(t, n, "check-config", "--config", file), file+" is valid\n"; got != want {
		t.Errorf("a valid file: got %q, want %q", got, want)
	}
	for name, tc := range map[string]struct {
		text string
		want []string // a line each
	}{
		"values": {
			"upstream: {address: 'a:1', protocol: ftp}\n" +
				"capture: {source: all, excludePorts: [0], quic: no way}\nlog: 1",
			[]string{
				`capture.excludePorts: .*0`, `capture.quic: .*no way`, `log: unknown key`, `upstream.protocol: .*ftp`,
			},
		},
		"keys that do not go together": {
			"upstream: {address: 'a:1', port: 2}\ncapture: {source: all}\nlate: {taintAfter: 5m}",
			[]string{`upstream.port: cannot be used`, `late.taintAfter: 5m0s: needs`},
		},
	} {
		file := testbed.ConfigFile(t, tc.text)
		out, err := n.Sluiced("check-config", "--config", file)
		lines := strings.Split(strings.TrimPrefix(strings.TrimSpace(out), "sluiced: "), "\n")
		if err == nil || len(lines) != len(tc.want) {
			t.Fatalf("%s: got %v, %q; want an error in %d lines", name, err, lines, len(tc.want))
		}
		for i, want := range tc.want {
			testbed.WantMatch(t, lines[i], "^"+file+": "+want)
		}
	}
}
