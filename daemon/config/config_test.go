package config

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

var (
	comparePrefixes  = cmpopts.EquateComparable(netip.Prefix{})
	compareSelectors = cmp.Comparer(func(x, y labels.Selector) bool { return x.String() == y.String() })
)

// parseSelectors parses selectors in the syntax of kubectl; the empty one selects everything.
func parseSelectors(texts ...string) (all []labels.Selector) {
	for _, text := range texts {
		s, err := labels.Parse(text)
		if err != nil {
			panic(err)
		}
		all = append(all, s)
	}
	return all
}

// minimal is the shortest valid configuration.
const minimal = "upstream: {address: '127.0.0.1:18080'}\ncapture: {source: all}\n"

// environment has the environment variables of these tests.
func environment(name string) (string, bool) {
	v, ok := map[string]string{
		"HOST_IP": "192.0.2.1", "HOST_IP6": "2001:db8::1", "PORT": "18080",
		"EMPTY": "", "NAME": "proxy.example", "BOTH": "[2001:db8::1]:1",
	}[name]
	return v, ok
}

// defaults is the configuration of minimal.
func defaults() Config {
	return Config{
		Upstream: Upstream{Address: "127.0.0.1:18080", Protocol: Connect},
		Capture: Capture{
			Source: All, ExcludeCIDRs: ruleset.LinkLocal(), RejectQUIC: true, Other: ruleset.OtherAllow,
			Ports: ruleset.Ports{Outbound: 15001, Inbound: 15006},
		},
		Late:           attach.Late{Policy: attach.Queue},
		Trust:          attach.Trust{CA: true},
		CAFile:         "/etc/sluice/ca/ca.crt",
		NRISocket:      "/var/run/nri/nri.sock",
		AgentSocket:    "/run/sluice/agent.sock",
		ProxySocket:    "/run/sluice/proxy.sock",
		StateDir:       "/run/sluice",
		DataDir:        "/var/lib/sluice",
		MetricsAddress: "127.0.0.1:15090",
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, yaml string
		change     func(*Config) // of the defaults
	}{
		{"minimal", minimal, func(*Config) {}},
		{"in JSON", `{"upstream":{"address":"127.0.0.1:18080"},"capture":{"source":"all"}}`, func(*Config) {}},
		{"empty mappings", minimal + "late: {}\n", func(*Config) {}},
		{"a mapping without a value", minimal + "late:\n", func(*Config) {}},
		{"everything", `
upstream:
  address: proxy.example:3128
  protocol: socks5
capture:
  source: all
  includePorts: [80, 443, "8000-8999"]
  excludePorts: ["22"]
  excludeCIDRs: [10.0.0.0/8, "fd00::/8", 203.0.113.7]
  quic: allow
  nodeAddresses: allow
  other: dns
  ports: {outbound: 16001, inbound: "16006"}
trust:
  ca: off
  tls: inspect
  nested: inspect
  caFile: /ca.pem
  nriSocket: /nri.sock
late:
  policy: hold
  timeout: 90s
agentSocket: /s/../a.sock
proxySocket: /p.sock
stateDir: /d/
dataDir: /data
metricsAddress: "[::1]:9090"
`, func(c *Config) {
			c.Upstream = Upstream{Address: "proxy.example:3128", Protocol: SOCKS5}
			c.Capture = Capture{
				Source: All,
				IncludePorts: []ruleset.PortRange{
					{First: 80, Last: 80}, {First: 443, Last: 443}, {First: 8000, Last: 8999},
				},
				ExcludePorts: []ruleset.PortRange{{First: 22, Last: 22}},
				ExcludeCIDRs: []netip.Prefix{
					netip.MustParsePrefix("10.0.0.0/8"),
					netip.MustParsePrefix("fd00::/8"),
					netip.MustParsePrefix("203.0.113.7/32"),
				},
				Other: ruleset.OtherDNS, Ports: ruleset.Ports{Outbound: 16001, Inbound: 16006}, ToNode: true,
			}
			c.Trust = attach.Trust{TLS: attach.Inspect, Nested: attach.Inspect}
			c.CAFile, c.NRISocket = "/ca.pem", "/nri.sock"
			c.Late = attach.Late{Policy: attach.Hold, Timeout: 90 * time.Second}
			c.AgentSocket, c.ProxySocket, c.StateDir, c.MetricsAddress = "/a.sock", "/p.sock", "/d", "[::1]:9090"
			c.DataDir = "/data"
		}},
		{"the upstream by pod labels", `
upstream:
  podSelector: {namespace: proxies, matchLabels: {app: mitmproxy, generation: 2}}
  port: 8080
capture: {source: kubernetes}
`, func(c *Config) {
			labels := map[string]string{"app": "mitmproxy", "generation": "2"}
			c.Upstream = Upstream{
				Pods: Selector{Namespace: "proxies", Labels: labels}, Port: 8080, Protocol: Connect,
			}
			c.Capture.Source = Kubernetes
		}},
		{"the upstream by service", `
upstream: {service: {namespace: proxies, name: mitmproxy}, port: '80'}
capture: {source: kubernetes}
`, func(c *Config) {
			c.Upstream = Upstream{
				Service: Name{Namespace: "proxies", Name: "mitmproxy"}, Port: 80, Protocol: Connect,
			}
			c.Capture.Source = Kubernetes
		}},
		{
			"sockets", "upstream: {protocol: sockets}\ncapture: {source: all}\n",
			func(c *Config) { c.Upstream = Upstream{Protocol: Sockets} },
		},
		{"sockets, with the proxy's pods", `
upstream: {protocol: sockets, podSelector: {namespace: p, matchLabels: {a: b}}}
capture: {source: kubernetes}
`, func(c *Config) {
			pods := Selector{Namespace: "p", Labels: map[string]string{"a": "b"}}
			c.Upstream = Upstream{Protocol: Sockets, Pods: pods}
			c.Capture.Source = Kubernetes
		}},
		{"the node is tainted again", `
upstream: {address: '127.0.0.1:18080'}
capture: {source: kubernetes}
late: {taintAfter: 5m}
`, func(c *Config) { c.Capture.Source, c.TaintAfter = Kubernetes, 5*time.Minute }},
		{"no CA, in quotes", minimal + "trust: {ca: 'off'}\n", func(c *Config) { c.Trust.CA = false }},
		{
			"namespaces and annotations", `
upstream: {address: '127.0.0.1:18080'}
capture:
  source: kubernetes
  namespaces:
    selected: [{matchLabels: {team: ci}}, {matchExpressions: [{key: tier, operator: NotIn, values: [system]}]}]
    enforced: [{}]
  annotations:
    exclude-outbound-ports: [5432, 8000-8999]
    exclude-outbound-cidrs: [10.0.0.0/8]
    when-late: [hold]
    late-timeout: any
    ca: [off]
    quic: []
`, func(c *Config) {
				c.Capture.Source = Kubernetes
				c.Capture.Namespaces = Namespaces{
					Selected: parseSelectors("team=ci", "tier notin (system)"), Enforced: parseSelectors(""),
				}
				c.Capture.Annotations = map[string][]Allowance{
					"exclude-outbound-ports": {
						{Ports: ruleset.PortRange{First: 5432, Last: 5432}},
						{Ports: ruleset.PortRange{First: 8000, Last: 8999}},
					},
					"exclude-outbound-cidrs": {{CIDR: netip.MustParsePrefix("10.0.0.0/8")}},
					"when-late":              {{Text: "hold"}}, "late-timeout": {{Any: true}}, "ca": {{Text: "off"}},
					"quic": nil,
				}
			},
		},
		{
			"no annotations", "upstream: {address: '127.0.0.1:18080'}\ncapture: {source: all, annotations: {}}\n",
			func(c *Config) { c.Capture.Annotations = map[string][]Allowance{} },
		},
		{"the node is never tainted again", minimal + "late: {taintAfter: 0s}\n", func(*Config) {}},
		{
			"one of the capture ports",
			"upstream: {address: '127.0.0.1:18080'}\ncapture: {source: all, ports: {inbound: 1}}\n",
			func(c *Config) { c.Capture.Ports.Inbound = 1 },
		},
		{
			"an empty value replaces the default", minimal + "metricsAddress: ''\n",
			func(c *Config) { c.MetricsAddress = "" },
		},
		{
			"no excluded CIDRs", "upstream: {address: '127.0.0.1:18080'}\ncapture: {source: all, excludeCIDRs: []}\n",
			func(c *Config) { c.Capture.ExcludeCIDRs = nil },
		},
	} {
		want := defaults()
		tc.change(&want)
		got, err := Parse([]byte(tc.yaml), environment)
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		if diff := cmp.Diff(want, got, comparePrefixes, compareSelectors); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
}

func TestUpstreamString(t *testing.T) {
	t.Parallel()
	for want, up := range map[string]Upstream{
		"127.0.0.1:18080": {Address: "127.0.0.1:18080", Protocol: SOCKS5},
		"pod with app=x,tier=y in namespace ns on this node, port 1": {
			Pods: Selector{Namespace: "ns", Labels: map[string]string{"tier": "y", "app": "x"}}, Port: 1,
		},
		"service ns/web, port 80":                  {Service: Name{Namespace: "ns", Name: "web"}, Port: 80},
		"proxies that connect to the proxy socket": {Protocol: Sockets},
	} {
		if got := up.String(); got != want {
			t.Errorf("%+v: got %q, want %q", up, got, want)
		}
	}
}

// TestParseErrors checks that each error names the key and the value.
func TestParseErrors(t *testing.T) {
	t.Parallel()
	const upstream = "upstream: {address: '127.0.0.1:18080'}\n"
	const source = "capture: {source: all}\n"
	pods := func(upstream string) string { return "upstream: {" + upstream + "}\ncapture: {source: kubernetes}\n" }
	const selector = "podSelector: {namespace: p, matchLabels: {a: b}}"
	for _, tc := range []struct{ yaml, want string }{
		{"", "upstream.address: missing"},
		{"[]", "[] is not a mapping of keys"},
		{"sluice", `"sluice" is not a mapping of keys`},
		{"a: b: c", "yaml"},
		{"upstream: {}\n" + source, "upstream.address: missing"},
		{source, "upstream.address: missing"},
		{upstream, "capture.source: missing"},
		{upstream + upstream + source, `"upstream" already set in map`},
		{upstream + "capture: all\n", `capture: "all" is not a mapping of keys`},
		{
			minimal + "metrics: x\n", `metrics: unknown key, with value "x"; the known keys here are ` +
				`agentSocket, capture, dataDir, late, metricsAddress, proxySocket, stateDir, trust, upstream`,
		},
		{
			minimal + "late: {polcy: queue}\n",
			`late.polcy: unknown key, with value "queue"; the known keys here are policy, taintAfter, timeout`,
		},
		{minimal + "upstream.address: x\n", `upstream.address: unknown key`},
		{minimal + "Late: {}\n", `Late: unknown key`},

		{"upstream: {address: localhost}\n" + source, `upstream.address: "localhost" is not host:port`},
		{"upstream: {address: ''}\n" + source, `upstream.address: "" is not host:port`},
		{"upstream: {address: null}\n" + source, `upstream.address: "null" is not host:port`},
		{"upstream: {address: 18080}\n" + source, `upstream.address: "18080" is not host:port`},
		{"upstream: {address: ':18080'}\n" + source, `upstream.address: ":18080" is not host:port`},
		{
			"upstream: {address: '127.0.0.1:0'}\n" + source,
			`upstream.address: "127.0.0.1:0": "0" is not a port from 1 to 65535`,
		},
		{"upstream: {address: '127.0.0.1:65536'}\n" + source, `"65536" is not a port`},
		{"upstream: {address: '127.0.0.1:http'}\n" + source, `"http" is not a port`},
		{"upstream: {address: '2001:db8::1:80'}\n" + source, `upstream.address: "2001:db8::1:80" is not host:port`},
		{"upstream: {address: ['a:1']}\n" + source, `upstream.address: "[\"a:1\"]" is not host:port`},
		{
			"upstream: {address: '${ABSENT}:1'}\n" + source,
			`upstream.address: "${ABSENT}:1": environment variable ABSENT is not set or empty`,
		},
		{"upstream: {address: '${EMPTY}:1'}\n" + source, `environment variable EMPTY is not set or empty`},
		{
			"upstream: {address: 'a:1', protocol: http}\n" + source,
			`upstream.protocol: "http" is not one of [connect socks5 proxy-v2 sockets]`,
		},
		{
			pods(`service: {namespace: p, name: n}, protocol: sockets`),
			"upstream.service: cannot be used with protocol sockets",
		},
		{pods(`podSelector: {namespace: p}, protocol: sockets`), "upstream.podSelector.matchLabels: missing"},
		{minimal + "proxySocket: proxy.sock\n", `proxySocket: "proxy.sock" is not an absolute path`},

		{pods(selector + `, address: 'a:1'`), "upstream: set only one of address, podSelector and service"},
		{pods(selector + `, service: {namespace: p, name: n}, port: 1`), "upstream: set only one of"},
		{pods(`podSelector: {matchLabels: {a: b}}, port: 1`), "upstream.podSelector.namespace: missing"},
		{pods(`podSelector: {namespace: p}, port: 1`), "upstream.podSelector.matchLabels: missing"},
		{pods(`podSelector: {namespace: p, matchLabels: {}}, port: 1`), "upstream.podSelector.matchLabels: missing"},
		{
			pods(`podSelector: {namespace: p, matchLabels: [a]}, port: 1`),
			`upstream.podSelector.matchLabels: ["a"] is not a mapping of labels`,
		},
		{
			pods(`podSelector: {namespace: '', matchLabels: {a: b}}, port: 1`),
			`upstream.podSelector.namespace: "" is not a name`,
		},
		{pods(selector), "upstream.port: missing"},
		{pods(`podSelector: {namespace: p, labels: {a: b}}, port: 1`), "upstream.podSelector.labels: unknown key"},
		{pods(`service: {name: n}, port: 1`), "upstream.service.namespace: missing"},
		{pods(`service: {namespace: p}, port: 1`), "upstream.service.name: missing"},
		{pods(`service: {namespace: p, name: n}, port: http`), `upstream.port: "http" is not a port`},
		{pods(`address: 'a:1', port: 1`), "upstream.port: cannot be used with upstream.address"},
		{
			"upstream: {service: {namespace: p, name: n}, port: 1}\n" + source,
			`capture.source: "all": upstream.podSelector and upstream.service need "kubernetes"`,
		},

		{upstream + "capture: {source: some}\n", `capture.source: "some" is not one of`},
		{upstream + "capture: {source: all, includePorts: 80}\n", `capture.includePorts: 80 is not a list`},
		{upstream + "capture: {source: all, includePorts: [0]}\n", `capture.includePorts: port "0"`},
		{upstream + "capture: {source: all, includePorts: [null]}\n", `capture.includePorts: port "null"`},
		{upstream + "capture: {source: all, includePorts: [8.5]}\n", `capture.includePorts: port "8.5"`},
		{upstream + "capture: {source: all, excludePorts: ['90-80']}\n", `capture.excludePorts: port range "90-80"`},
		{
			upstream + "capture: {source: all, excludeCIDRs: [10.1.2.3/8]}\n",
			`capture.excludeCIDRs: "10.1.2.3/8" has host bits set`,
		},
		{upstream + "capture: {source: all, excludeCIDRs: [x]}\n", `capture.excludeCIDRs: "x" is not a CIDR`},
		{upstream + "capture: {source: all, quic: no}\n", `capture.quic: "false" is not one of [reject allow]`},
		{
			upstream + "capture: {source: all, nodeAddresses: true}\n",
			`capture.nodeAddresses: "true" is not one of [refuse allow]`,
		},
		{upstream + "capture: {source: all, other: none}\n", `capture.other: "none" is not one of [allow dns deny]`},
		{
			upstream + "capture: {source: all, ports: {outbound: 0}}\n",
			`capture.ports.outbound: "0" is not a port from 1 to 65535`,
		},
		{
			upstream + "capture: {source: all, ports: {inbound: 65536}}\n",
			`capture.ports.inbound: "65536" is not a port from 1 to 65535`,
		},
		{
			upstream + "capture: {source: all, ports: {outbound: 15006}}\n",
			"capture.ports: outbound and inbound are both 15006, and must differ",
		},
		{upstream + "capture: {source: all, ports: [1, 2]}\n", "capture.ports: [1,2] is not a mapping of keys"},
		{
			upstream + "capture: {source: all, ports: {outboud: 1}}\n",
			"capture.ports.outboud: unknown key, with value 1; the known keys here are inbound, outbound",
		},
		{
			upstream + "capture: {source: all, namespaces: {selected: [{matchLabels: {a: b}}]}}\n",
			`capture.namespaces: needs capture.source "kubernetes", not "all"`,
		},
		{
			upstream + "capture: {source: kubernetes, namespaces: {selected: {a: b}}}\n",
			`capture.namespaces.selected: {"a":"b"} is not a list`,
		},
		{
			upstream + "capture: {source: kubernetes, namespaces: {enforced: [{matchLabel: {a: b}}]}}\n",
			`capture.namespaces.enforced: {"matchLabel":{"a":"b"}} is not a label selector: `,
		},
		{
			upstream + "capture: {source: kubernetes, namespaces: {enforced: [null]}}\n",
			`capture.namespaces.enforced: null is not a label selector`,
		},
		{
			upstream + "capture: {source: kubernetes, namespaces: {enforced: [{matchLabels: {a: 'b c'}}]}}\n",
			`capture.namespaces.enforced: {"matchLabels":{"a":"b c"}} is not a label selector: `,
		},
		{
			upstream + "capture: {source: kubernetes, namespaces: {enforced: " +
				"[{matchExpressions: [{key: a, operator: Is, values: [b]}]}]}}\n",
			`is not a label selector: "Is" is not a valid label selector operator`,
		},
		{
			upstream + "capture: {source: all, annotations: none}\n",
			`capture.annotations: "none" is neither any nor a mapping of annotations`,
		},
		{
			upstream + "capture: {source: all, annotations: {exclude-ports: any}}\n",
			`capture.annotations: exclude-ports: unknown; the known ones are ca, capture-inbound-ports, `,
		},
		{
			upstream + "capture: {source: all, annotations: {quic: [maybe]}}\n",
			`capture.annotations: quic: "maybe" is not one of [reject allow]`,
		},
		{
			upstream + "capture: {source: all, annotations: {exclude-outbound-cidrs: [10.1.2.3/8]}}\n",
			`capture.annotations: exclude-outbound-cidrs: "10.1.2.3/8" has host bits set`,
		},
		{
			upstream + "capture: {source: all, annotations: {late-timeout: 5m}}\n",
			`capture.annotations: late-timeout: "5m" is not a list`,
		},

		{
			"upstream: {protocol: sockets, probeInterval: 5s}\n" + source,
			"upstream.probeInterval: 5s: cannot be used with protocol sockets",
		},
		{
			"upstream: {address: '127.0.0.1:1', probeInterval: often}\n" + source,
			`upstream.probeInterval: "often" is not a duration`,
		},
		{minimal + "trust: {ca: on}\n", `trust.ca: "true" is not one of [auto off]`},
		{minimal + "trust: {tls: break}\n", `trust.tls: "break" is not one of [pass inspect]`},
		{minimal + "trust: {nested: ''}\n", `trust.nested: "" is not one of [pass inspect]`},
		{minimal + "trust: {caFile: ca.pem}\n", `trust.caFile: "ca.pem" is not an absolute path`},
		{minimal + "trust: {nriSocket: ''}\n", `trust.nriSocket: "" is not an absolute path`},
		{minimal + "late: {policy: wait}\n", `late.policy: "wait" is not one of [queue hold direct]`},
		{minimal + "late: {timeout: forever}\n", `late.timeout: "forever" is not a duration`},
		{minimal + "late: {timeout: -1s}\n", `late.timeout: "-1s" is not a duration`},
		{pods(`address: 'a:1'`) + "late: {taintAfter: 5}\n", `late.taintAfter: "5" is not a duration`},
		{pods(`address: 'a:1'`) + "late: {taintAfter: -1s}\n", `late.taintAfter: "-1s" is not a duration`},
		{minimal + "late: {taintAfter: 5m}\n", `late.taintAfter: 5m0s: needs capture.source "kubernetes", not "all"`},
		{minimal + "agentSocket: agent.sock\n", `agentSocket: "agent.sock" is not an absolute path`},
		{minimal + "stateDir: ''\n", `stateDir: "" is not an absolute path`},
		{minimal + "dataDir: data\n", `dataDir: "data" is not an absolute path`},
		{minimal + "metricsAddress: 9090\n", `metricsAddress: "9090" is not host:port`},
	} {
		_, err := Parse([]byte(tc.yaml), environment)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: got %v, want an error with %q", tc.yaml, err, tc.want)
		}
	}
}

func TestUpstreamAddressExpands(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"${HOST_IP}:18080":     "192.0.2.1:18080",
		"$HOST_IP:18080":       "192.0.2.1:18080",
		"${HOST_IP}:${PORT}":   "192.0.2.1:18080",
		"${HOST_IP6}:18080":    "[2001:db8::1]:18080",
		"[${HOST_IP6}]:18080":  "[2001:db8::1]:18080",
		"${HOST_IP6}:${PORT}":  "[2001:db8::1]:18080",
		"${NAME}:3128":         "proxy.example:3128",
		"${BOTH}":              "[2001:db8::1]:1",
		"proxy.${NAME}:1":      "proxy.proxy.example:1",
		"[fe80::1%eth0]:18080": "[fe80::1%eth0]:18080",
	} {
		c, err := Parse([]byte("upstream: {address: '"+address+"'}\ncapture: {source: all}\n"), environment)
		if err != nil || c.Upstream.Address != want {
			t.Errorf("%s: got %q, %v; want %q", address, c.Upstream.Address, err, want)
		}
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.yaml"), filepath.Join(dir, "bad.yaml")
	for path, content := range map[string]string{good: minimal, bad: "late: {policy: wait}\n"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Load(good)
	if diff := cmp.Diff(defaults(), got, comparePrefixes); err != nil || diff != "" {
		t.Errorf("Load: %v (-want +got):\n%s", err, diff)
	}
	if _, err := Load(bad); err == nil || !strings.Contains(err.Error(), bad+": late.policy") {
		t.Errorf("a bad file: got %v, want the file and the key", err)
	}
	none := filepath.Join(dir, "none.yaml")
	if _, err := Load(none); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), none) {
		t.Errorf("no file: got %v, want os.ErrNotExist and the file", err)
	}
}

// FuzzParse checks that any file gives an error, or a configuration in which every value is valid.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		minimal,
		"upstream: {address: '${HOST_IP6}:1', protocol: socks5}\ncapture: {source: all, includePorts: [1, '2-3']}\n",
		minimal + "late: {policy: queue, timeout: 0s}\nagentSocket: /a\nstateDir: /b\nmetricsAddress: ''\n",
		"a: &a [*a]", "? {}\n: 1", "1: 2", "\x00", "upstream: !!binary x",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data, environment)
		if err != nil {
			return
		}
		late := slices.Contains(attach.LatePolicies, c.Late.Policy) && c.Late.Timeout >= 0
		if c.Upstream.Address == "" || c.Capture.Source != All || !late {
			t.Errorf("%q: got %+v", data, c)
		}
		if !filepath.IsAbs(c.AgentSocket) || !filepath.IsAbs(c.StateDir) {
			t.Errorf("%q: got paths %q and %q", data, c.AgentSocket, c.StateDir)
		}
		r := ruleset.Ruleset{
			Interfaces: []string{"eth0"}, IncludePorts: c.Capture.IncludePorts, ExcludePorts: c.Capture.ExcludePorts,
			ExcludeCIDRs: c.Capture.ExcludeCIDRs,
		}
		if err := r.Validate(); err != nil {
			t.Errorf("%q: no ruleset can be made of it: %v", data, err)
		}
	})
}
