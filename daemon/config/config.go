// Package config reads the daemon's configuration file (`sluiced run --config FILE`). Every value is parsed into its
// type and checked here, so that no other package handles an invalid one.
package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Config is the parsed and checked configuration. Each field has the key of the same name in the file, unless its
// comment names another.
type Config struct {
	Upstream Upstream
	Capture  Capture
	// Late is the policy for new connections while the upstream is late, and its timeout (0: no limit).
	Late attach.Late
	// Trust is the treatment of TLS for pods without annotations about it. A policy that is not set is empty.
	Trust attach.Trust
	// CAFile (trust.caFile) is the file with the CA certificates that captured containers are to trust, in PEM. It may
	// come later than the daemon, and may change.
	CAFile string
	// NRISocket (trust.nriSocket) is the unix socket of the container runtime's NRI.
	NRISocket string
	// TaintAfter (late.taintAfter) is the time that the upstream may be late before the node is tainted again;
	// 0: the node is never tainted again.
	TaintAfter time.Duration
	// AgentSocket is the path of the unix socket on which the daemon serves the plugin and `sluiced status`.
	AgentSocket string
	// ProxySocket is the path of the unix socket to which proxies connect to take the listeners of pods (protocol
	// sockets). The default is proxy.sock in the directory of AgentSocket.
	ProxySocket string
	// StateDir is the directory of the attachment records.
	StateDir string
	// DataDir is the directory of the files that outlive the boot.
	DataDir string
	// MetricsAddress is the host:port at which Prometheus scrapes /metrics; empty: metrics are not served.
	MetricsAddress string
}

// Upstream describes the node's proxy. Exactly one of Address, Pods and Service locates it. With the protocol Sockets
// the proxy connects to the daemon instead; then Address and Pods are optional, and only identify the proxy's own pods,
// which are never captured.
type Upstream struct {
	// Address is host:port, with environment variables already expanded.
	Address string
	// Pods (podSelector) selects the proxy's pods. The daemon dials the ready one on this node, at Port.
	Pods Selector
	// Service selects the proxy's pods by the selector of a service. Port is then a port of the service.
	Service  Name
	Port     uint16
	Protocol Protocol
	// ProbeInterval is the time between two probes that test whether the proxy serves; 0: no probes.
	ProbeInterval time.Duration
}

// Selector selects pods of one namespace by their labels.
type Selector struct {
	Namespace string
	Labels    map[string]string
}

// Name identifies an object of the API server in its namespace.
type Name struct{ Namespace, Name string }

// String describes the upstream for logs and `sluiced status`.
func (u Upstream) String() string {
	switch {
	case u.Protocol == Sockets:
		return "proxies that connect to the proxy socket"
	case u.Address != "":
		return u.Address
	case u.Service.Name != "":
		return fmt.Sprintf("service %s/%s, port %d", u.Service.Namespace, u.Service.Name, u.Port)
	default:
		labels := make([]string, 0, len(u.Pods.Labels))
		for k, v := range u.Pods.Labels {
			labels = append(labels, k+"="+v)
		}
		slices.Sort(labels)
		return fmt.Sprintf("pod with %s in namespace %s on this node, port %d",
			strings.Join(labels, ","), u.Pods.Namespace, u.Port)
	}
}

// Protocol is the way in which the upstream learns a connection's original destination.
type Protocol string

// The protocols.
const (
	// Connect is HTTP CONNECT.
	Connect Protocol = "connect"
	SOCKS5  Protocol = "socks5"
	// ProxyV2 is a header before the app's bytes: version 2 of the PROXY protocol.
	ProxyV2 Protocol = "proxy-v2"
	// Sockets needs no request: proxies take the listeners of pods and accept on them, without a relay.
	Sockets Protocol = "sockets"
)

var protocols = []Protocol{Connect, SOCKS5, ProxyV2, Sockets}

// Capture selects the attachments that are captured, and the part of their traffic that is.
type Capture struct {
	Source Source
	// IncludePorts are the captured destination ports; empty: all ports.
	IncludePorts []ruleset.PortRange
	ExcludePorts []ruleset.PortRange
	ExcludeCIDRs []netip.Prefix
	// RejectQUIC (quic: reject) answers UDP to port 443 with port-unreachable, so that clients use TCP.
	RejectQUIC bool
	// Other is one of ruleset.Others: it says what pods may send that is neither TCP nor QUIC.
	Other string
	// Ports are the ports in pods to which connections are redirected.
	Ports ruleset.Ports
	// Namespaces selects namespaces for capture.
	Namespaces Namespaces
	// Annotations has the values that pods may ask for, by the name of the annotation without the prefix; nil: all. Of
	// an annotation that it does not have, no value is allowed.
	Annotations map[string][]Allowance
	// ToNode (nodeAddresses: allow) carries connections to addresses that mean the node, which are refused otherwise.
	ToNode bool
}

// Source is the value of capture.source: it selects the orchestrator that decides which attachments are captured.
type Source string

// The sources.
const (
	// All captures every attachment about which the plugin asks.
	All Source = "all"
	// Kubernetes captures the pods that opt in by a label, their own or their namespace's.
	Kubernetes Source = "kubernetes"
)

// Load reads the file at path. Errors name the file, and for an invalid value its key too. There may be several, joined
// by errors.Join.
func Load(path string) (Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("reading configuration: %w", err)
	}
	c, err := Parse(data, os.LookupEnv)
	if err != nil {
		return Config{}, prefix(path, err)
	}
	return c, nil
}

// prefix puts the path of the file before each of the joined errors.
func prefix(path string, err error) error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return fmt.Errorf("%s: %w", path, err)
	}
	var all []error
	for _, err := range joined.Unwrap() {
		all = append(all, prefix(path, err))
	}
	return errors.Join(all...)
}

// Parse reads a configuration in YAML. lookupEnv resolves the environment variables in upstream.address. An error names
// the invalid key and its value; several are joined. Whether keys go together is checked when each of them is valid.
func Parse(data []byte, lookupEnv func(string) (string, bool)) (Config, error) {
	c := Config{
		Upstream: Upstream{Protocol: Connect},
		Capture: Capture{
			ExcludeCIDRs: ruleset.LinkLocal(), RejectQUIC: true, Other: ruleset.OtherAllow, Ports: ruleset.DefaultPorts,
		},
		Late:           attach.Late{Policy: attach.Queue},
		Trust:          attach.Trust{CA: true},
		CAFile:         "/etc/sluice/ca/ca.crt",
		NRISocket:      "/var/run/nri/nri.sock",
		AgentSocket:    attach.DefaultSocket,
		StateDir:       attach.DefaultStateDir,
		DataDir:        attach.DefaultDataDir,
		MetricsAddress: "127.0.0.1:15090",
	}
	js, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return Config{}, err
	}
	keys := c.keys(lookupEnv)
	if err := walk("", js, keys); err != nil {
		return Config{}, err
	}
	if err := c.validate(); err != nil {
		return Config{}, err
	}
	if c.ProxySocket == "" {
		c.ProxySocket = filepath.Join(filepath.Dir(c.AgentSocket), "proxy.sock")
	}
	return c, nil
}

// validate reports the required keys that are missing, and the keys that exclude each other.
func (c *Config) validate() error {
	var errs []error
	u := c.Upstream
	sockets := u.Protocol == Sockets
	pods, service := u.Pods.Namespace != "" || u.Pods.Labels != nil, u.Service != Name{}
	for _, rule := range []struct {
		broken  bool
		message string
	}{
		{
			u.Address == "" && !pods && !service && !sockets,
			"upstream.address: missing; set it, upstream.podSelector or upstream.service",
		},
		{
			u.Address != "" && (pods || service) || pods && service,
			"upstream: set only one of address, podSelector and service",
		},
		{c.Capture.Source == "", "capture.source: missing"},
		{
			c.Capture.Ports.Outbound == c.Capture.Ports.Inbound,
			fmt.Sprintf("capture.ports: outbound and inbound are both %d, and must differ", c.Capture.Ports.Outbound),
		},
		{pods && u.Pods.Namespace == "", "upstream.podSelector.namespace: missing"},
		{pods && len(u.Pods.Labels) == 0, "upstream.podSelector.matchLabels: missing"},
		{service && u.Service.Namespace == "", "upstream.service.namespace: missing"},
		{service && u.Service.Name == "", "upstream.service.name: missing"},
		{(pods || service) && u.Port == 0 && !sockets, "upstream.port: missing"},
		{
			sockets && service,
			"upstream.service: cannot be used with protocol sockets; use upstream.podSelector",
		},
		{
			sockets && u.ProbeInterval != 0,
			fmt.Sprintf("upstream.probeInterval: %s: cannot be used with protocol sockets, "+
				"which checks every proxy once a second", u.ProbeInterval),
		},
		{
			u.Address != "" && u.Port != 0,
			"upstream.port: cannot be used with upstream.address, which contains the port",
		},
		{
			(pods || service) && c.Capture.Source != Kubernetes,
			fmt.Sprintf("capture.source: %q: upstream.podSelector and upstream.service need %q",
				c.Capture.Source, Kubernetes),
		},
		{
			len(c.Capture.Namespaces.Selected)+len(c.Capture.Namespaces.Enforced) > 0 && c.Capture.Source != Kubernetes,
			fmt.Sprintf("capture.namespaces: needs capture.source %q, not %q", Kubernetes, c.Capture.Source),
		},
		{
			c.TaintAfter != 0 && c.Capture.Source != Kubernetes,
			fmt.Sprintf("late.taintAfter: %s: needs capture.source %q, not %q",
				c.TaintAfter, Kubernetes, c.Capture.Source),
		},
	} {
		if rule.broken {
			errs = append(errs, errors.New(rule.message))
		}
	}
	return errors.Join(errs...)
}

// setter parses the value of one key and stores it in the configuration.
type setter func(json.RawMessage) error

// keys returns the setter of every key of the file, by the key's path.
func (c *Config) keys(lookupEnv func(string) (string, bool)) map[string]setter {
	address := func(s string) (string, error) { return Address(s, lookupEnv) }
	return map[string]setter{
		"upstream.address":                 text(&c.Upstream.Address, address),
		"upstream.protocol":                text(&c.Upstream.Protocol, oneOf(protocols)),
		"upstream.podSelector.namespace":   text(&c.Upstream.Pods.Namespace, named),
		"upstream.podSelector.matchLabels": matchLabels(&c.Upstream.Pods),
		"upstream.service.namespace":       text(&c.Upstream.Service.Namespace, named),
		"upstream.service.name":            text(&c.Upstream.Service.Name, named),
		"upstream.port":                    text(&c.Upstream.Port, port),
		"upstream.probeInterval":           text(&c.Upstream.ProbeInterval, Timeout),
		"capture.source":                   text(&c.Capture.Source, oneOf([]Source{All, Kubernetes})),
		"capture.includePorts":             list(&c.Capture.IncludePorts, ruleset.ParsePortRange),
		"capture.excludePorts":             list(&c.Capture.ExcludePorts, ruleset.ParsePortRange),
		"capture.excludeCIDRs":             list(&c.Capture.ExcludeCIDRs, ruleset.ParseCIDR),
		"capture.quic":                     text(&c.Capture.RejectQUIC, rejectQUIC),
		"capture.other":                    text(&c.Capture.Other, oneOf(ruleset.Others)),
		"capture.nodeAddresses":            text(&c.Capture.ToNode, toNode),
		"capture.ports.outbound":           text(&c.Capture.Ports.Outbound, port),
		"capture.ports.inbound":            text(&c.Capture.Ports.Inbound, port),
		"capture.namespaces.selected":      selectors(&c.Capture.Namespaces.Selected),
		"capture.namespaces.enforced":      selectors(&c.Capture.Namespaces.Enforced),
		"capture.annotations":              annotations(&c.Capture),
		"trust.ca":                         text(&c.Trust.CA, TrustCA),
		"trust.tls":                        text(&c.Trust.TLS, TLSPolicy),
		"trust.nested":                     text(&c.Trust.Nested, TLSPolicy),
		"trust.caFile":                     text(&c.CAFile, absolute),
		"trust.nriSocket":                  text(&c.NRISocket, absolute),
		"late.policy":                      text(&c.Late.Policy, LatePolicy),
		"late.timeout":                     text(&c.Late.Timeout, Timeout),
		"late.taintAfter":                  text(&c.TaintAfter, Timeout),
		"agentSocket":                      text(&c.AgentSocket, absolute),
		"proxySocket":                      text(&c.ProxySocket, absolute),
		"stateDir":                         text(&c.StateDir, absolute),
		"dataDir":                          text(&c.DataDir, absolute),
		"metricsAddress":                   text(&c.MetricsAddress, optional(hostPort)),
	}
}

// walk calls the setter of every key in value, the part of the document at path. Unknown keys are errors.
func walk(path string, value json.RawMessage, keys map[string]setter) error {
	if set, ok := keys[path]; ok {
		if err := set(value); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		return nil
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(value, &object); err != nil {
		if path == "" {
			return fmt.Errorf("%.100s is not a mapping of keys", value)
		}
		return fmt.Errorf("%s: %.100s is not a mapping of keys", path, value)
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(object)) {
		key := strings.TrimPrefix(path+"."+name, ".")
		if strings.Contains(name, ".") || !isPrefix(key, keys) {
			errs = append(errs, fmt.Errorf("%s: unknown key, with value %.100s; the known keys here are %s",
				key, object[name], strings.Join(knownKeys(path, keys), ", ")))
			continue
		}
		errs = append(errs, walk(key, object[name], keys))
	}
	return errors.Join(errs...)
}

// isPrefix tells whether key is one of keys, or a mapping that contains one.
func isPrefix(key string, keys map[string]setter) bool {
	for k := range keys {
		if k == key || strings.HasPrefix(k, key+".") {
			return true
		}
	}
	return false
}

// knownKeys lists the keys that the mapping at path may have.
func knownKeys(path string, keys map[string]setter) []string {
	found := map[string]bool{}
	for k := range keys {
		if rest, ok := strings.CutPrefix("."+k, strings.TrimSuffix("."+path, ".")+"."); ok {
			name, _, _ := strings.Cut(rest, ".")
			found[name] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// text returns the setter of a key with a scalar value.
func text[T any](to *T, parse func(string) (T, error)) setter {
	return func(raw json.RawMessage) error {
		v, err := parse(scalar(raw))
		if err != nil {
			return err
		}
		*to = v
		return nil
	}
}

// list returns the setter of a key with a list of scalars. The list in the file replaces the default.
func list[T any](to *[]T, parse func(string) (T, error)) setter {
	return func(raw json.RawMessage) error {
		var values []json.RawMessage
		if err := json.Unmarshal(raw, &values); err != nil {
			return fmt.Errorf("%.100s is not a list", raw)
		}
		*to = nil
		for _, value := range values {
			v, err := parse(scalar(value))
			if err != nil {
				return err
			}
			*to = append(*to, v)
		}
		return nil
	}
}

// scalar returns the text of a value, with or without quotes: a port needs none. null, lists and mappings are returned
// as JSON, so that the parser rejects them and its error shows them.
func scalar(raw json.RawMessage) string {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil || string(raw) == "null" {
		return string(raw)
	}
	return s
}

// rejectQUIC parses whether QUIC is rejected: reject or allow.
func rejectQUIC(s string) (bool, error) {
	_, err := oneOf([]string{"reject", "allow"})(s)
	return s == "reject", err
}

// toNode parses whether addresses that mean the node are connected to: refuse or allow.
func toNode(s string) (bool, error) {
	_, err := oneOf([]string{"refuse", "allow"})(s)
	return s == "allow", err
}

// LatePolicy parses the policy for new connections while the upstream is late: queue, hold or direct.
func LatePolicy(s string) (attach.LatePolicy, error) { return oneOf(attach.LatePolicies)(s) }

// TrustCA parses whether containers are given the CA: auto or off. In YAML 1.1, off without quotes is false.
func TrustCA(s string) (bool, error) {
	if s == "false" {
		return false, nil
	}
	_, err := oneOf([]string{"auto", "off"})(s)
	return s == "auto", err
}

// TLSPolicy parses the policy for TLS of containers that are not known to trust the CA: pass or inspect.
func TLSPolicy(s string) (attach.TLSPolicy, error) { return oneOf(attach.TLSPolicies)(s) }

func oneOf[T ~string](values []T) func(string) (T, error) {
	return func(s string) (T, error) {
		if slices.Contains(values, T(s)) {
			return T(s), nil
		}
		return "", fmt.Errorf("%q is not one of %v", s, values)
	}
}

func optional(parse func(string) (string, error)) func(string) (string, error) {
	return func(s string) (string, error) {
		if s == "" {
			return "", nil
		}
		return parse(s)
	}
}

// Timeout parses a duration of zero or more, such as 90s; 0 is "no limit" or "never", as its key says.
func Timeout(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a duration such as 90s or 10m", s)
	}
	return d, nil
}

func absolute(s string) (string, error) {
	if !filepath.IsAbs(s) {
		return "", fmt.Errorf("%q is not an absolute path", s)
	}
	return filepath.Clean(s), nil
}

func hostPort(s string) (string, error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil || host == "" {
		return "", fmt.Errorf("%q is not host:port", s)
	}
	if _, err := port(p); err != nil {
		return "", fmt.Errorf("%q: %w", s, err)
	}
	return s, nil
}

func port(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a port from 1 to 65535", s)
	}
	return uint16(n), nil
}

// named accepts any name of an object that is not empty. Only the API server knows whether the object exists.
func named(s string) (string, error) {
	if s == "" || s == "null" {
		return "", fmt.Errorf("%q is not a name", s)
	}
	return s, nil
}

// matchLabels returns the setter of a selector's labels.
func matchLabels(of *Selector) setter {
	return func(raw json.RawMessage) error {
		var values map[string]json.RawMessage
		if err := json.Unmarshal(raw, &values); err != nil || values == nil {
			return fmt.Errorf("%.100s is not a mapping of labels", raw)
		}
		of.Labels = map[string]string{}
		for k, v := range values {
			of.Labels[k] = scalar(v)
		}
		return nil
	}
}

// Address parses host:port, in which ${NAME} or $NAME is replaced by the value of that environment variable. A variable
// that is not set, or is empty, is an error.
func Address(s string, lookupEnv func(string) (string, bool)) (string, error) {
	s, err := expand(s, lookupEnv)
	if err != nil {
		return "", err
	}
	return hostPort(s)
}

// expand replaces ${NAME}. A variable that holds an IPv6 address is put in brackets, as the port after it requires.
func expand(s string, lookup func(string) (string, bool)) (string, error) {
	var errs []error
	bracketed := strings.HasPrefix(s, "[")
	out := os.Expand(s, func(name string) string {
		v, ok := lookup(name)
		if !ok || v == "" {
			errs = append(errs, fmt.Errorf("%q: environment variable %s is not set or empty", s, name))
		}
		if a, err := netip.ParseAddr(v); err == nil && a.Is6() && !bracketed {
			return "[" + v + "]"
		}
		return v
	})
	return out, errors.Join(errs...)
}
