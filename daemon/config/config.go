// Package config reads the file that `sluiced run --config` is given.
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

// Config is the configuration, every value parsed and checked.
type Config struct {
	Upstream Upstream
	Capture  Capture
	Late     attach.Late
	// TaintAfter is how long the upstream is late before the node gets its taint back; 0 for never.
	TaintAfter time.Duration
	// AgentSocket is where the plugin and `sluiced status` find the daemon.
	AgentSocket string
	// ProxySocket is where proxies find it that take the listeners of pods (protocol sockets): proxy.sock beside the
	// agent socket unless it is given.
	ProxySocket string
	StateDir    string
	// MetricsAddress is where Prometheus scrapes; empty for nowhere.
	MetricsAddress string
}

// Upstream is the node's proxy. It is found by exactly one of Address, Pods and Service; with the protocol Sockets
// it finds us, and they only tell what it is, so that it is not captured itself.
type Upstream struct {
	// Address is host:port, environment variables expanded.
	Address string
	// Pods are found by their labels: the ready one on this node is dialled, at Port.
	Pods Selector
	// Service stands for the pods that it selects, and Port for its own port.
	Service  Name
	Port     uint16
	Protocol Protocol
	// ProbeInterval is how often something is asked of it, to see that it serves; 0 for never.
	ProbeInterval time.Duration
}

// Selector chooses pods of one namespace by their labels.
type Selector struct {
	Namespace string
	Labels    map[string]string
}

// Name is that of an object in a namespace.
type Name struct{ Namespace, Name string }

func (u Upstream) String() string {
	switch {
	case u.Protocol == Sockets:
		return "proxies that come for the sockets"
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
		return fmt.Sprintf("pod %s of this node in %s, port %d", strings.Join(labels, ","), u.Pods.Namespace, u.Port)
	}
}

// Protocol is how the upstream is asked for the original destination.
type Protocol string

// The protocols.
const (
	Connect Protocol = "connect"
	SOCKS5  Protocol = "socks5"
	// Sockets is not to ask: proxies come for the listeners of pods and accept on them themselves.
	Sockets Protocol = "sockets"
)

// Capture says which attachments are captured, and what of their traffic.
type Capture struct {
	Source       Source
	IncludePorts []ruleset.PortRange
	ExcludePorts []ruleset.PortRange
	ExcludeCIDRs []netip.Prefix
	RejectQUIC   bool
}

// Source is who says whether an attachment is captured.
type Source string

// The sources: every attachment that the plugin asks about, or those that labels opt in.
const (
	All        Source = "all"
	Kubernetes Source = "kubernetes"
)

// Load reads the file at path.
func Load(path string) (Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("reading configuration: %w", err)
	}
	c, err := Parse(data, os.LookupEnv)
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// Parse reads a configuration in YAML. An error names the key and the value that are wrong.
func Parse(data []byte, lookupEnv func(string) (string, bool)) (Config, error) {
	c := Config{
		Upstream:       Upstream{Protocol: Connect},
		Capture:        Capture{ExcludeCIDRs: ruleset.LinkLocal(), RejectQUIC: true},
		Late:           attach.Late{Policy: attach.Queue},
		AgentSocket:    attach.DefaultSocket,
		StateDir:       attach.DefaultStateDir,
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
	if err := c.complete(); err != nil {
		return Config{}, err
	}
	if c.ProxySocket == "" {
		c.ProxySocket = filepath.Join(filepath.Dir(c.AgentSocket), "proxy.sock")
	}
	return c, nil
}

// complete reports what is missing, and what does not go together.
func (c *Config) complete() error {
	u := c.Upstream
	comes := u.Protocol == Sockets
	pods, service := u.Pods.Namespace != "" || u.Pods.Labels != nil, u.Service != Name{}
	for _, rule := range []struct {
		broken bool
		says   string
	}{
		{u.Address == "" && !pods && !service && !comes, "upstream.address: missing, and neither upstream.podSelector nor upstream.service is given"},
		{u.Address != "" && (pods || service) || pods && service, "upstream: want one of address, podSelector and service"},
		{c.Capture.Source == "", "capture.source: missing"},
		{pods && u.Pods.Namespace == "", "upstream.podSelector.namespace: missing"},
		{pods && len(u.Pods.Labels) == 0, "upstream.podSelector.matchLabels: missing"},
		{service && u.Service.Namespace == "", "upstream.service.namespace: missing"},
		{service && u.Service.Name == "", "upstream.service.name: missing"},
		{(pods || service) && u.Port == 0 && !comes, "upstream.port: missing"},
		{comes && service, "upstream.service: a proxy that comes for sockets is known by its podSelector"},
		{comes && u.ProbeInterval != 0, fmt.Sprintf("upstream.probeInterval: %s: proxies that come for sockets are asked every second as it is", u.ProbeInterval)},
		{u.Address != "" && u.Port != 0, "upstream.port: the address has one"},
		{(pods || service) && c.Capture.Source != Kubernetes, fmt.Sprintf("capture.source: %q knows no pods and services", c.Capture.Source)},
		{c.TaintAfter != 0 && c.Capture.Source != Kubernetes, fmt.Sprintf("late.taintAfter: %s, but capture.source %q knows no node to taint", c.TaintAfter, c.Capture.Source)},
	} {
		if rule.broken {
			return errors.New(rule.says)
		}
	}
	return nil
}

// setter takes the value of one key.
type setter func(json.RawMessage) error

// keys is every key of the file, by its path, and where its value goes.
func (c *Config) keys(lookupEnv func(string) (string, bool)) map[string]setter {
	return map[string]setter{
		"upstream.address":                 text(&c.Upstream.Address, func(s string) (string, error) { return Address(s, lookupEnv) }),
		"upstream.protocol":                text(&c.Upstream.Protocol, oneOf([]Protocol{Connect, SOCKS5, Sockets})),
		"upstream.podSelector.namespace":   text(&c.Upstream.Pods.Namespace, named),
		"upstream.podSelector.matchLabels": labels(&c.Upstream.Pods),
		"upstream.service.namespace":       text(&c.Upstream.Service.Namespace, named),
		"upstream.service.name":            text(&c.Upstream.Service.Name, named),
		"upstream.port":                    text(&c.Upstream.Port, port),
		"upstream.probeInterval":           text(&c.Upstream.ProbeInterval, Timeout),
		"capture.source":                   text(&c.Capture.Source, oneOf([]Source{All, Kubernetes})),
		"capture.includePorts":             list(&c.Capture.IncludePorts, ruleset.ParsePortRange),
		"capture.excludePorts":             list(&c.Capture.ExcludePorts, ruleset.ParsePortRange),
		"capture.excludeCIDRs":             list(&c.Capture.ExcludeCIDRs, ruleset.ParseCIDR),
		"capture.quic": text(&c.Capture.RejectQUIC, func(s string) (bool, error) {
			_, err := oneOf([]string{"reject", "allow"})(s)
			return s == "reject", err
		}),
		"late.policy":     text(&c.Late.Policy, LatePolicy),
		"late.timeout":    text(&c.Late.Timeout, Timeout),
		"late.taintAfter": text(&c.TaintAfter, Timeout),
		"agentSocket":     text(&c.AgentSocket, absolute),
		"proxySocket":     text(&c.ProxySocket, absolute),
		"stateDir":        text(&c.StateDir, absolute),
		"metricsAddress":  text(&c.MetricsAddress, optional(hostPort)),
	}
}

// walk descends into the document and hands each leaf to its key.
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
	for _, name := range slices.Sorted(maps.Keys(object)) {
		key := strings.TrimPrefix(path+"."+name, ".")
		if strings.Contains(name, ".") || !leads(key, keys) {
			return fmt.Errorf("%s: unknown key, with value %.100s; known are %s", key, object[name], strings.Join(near(path, keys), ", "))
		}
		if err := walk(key, object[name], keys); err != nil {
			return err
		}
	}
	return nil
}

// leads tells whether key is a key, or on the way to one.
func leads(key string, keys map[string]setter) bool {
	for k := range keys {
		if k == key || strings.HasPrefix(k, key+".") {
			return true
		}
	}
	return false
}

// near lists the keys in the mapping at path.
func near(path string, keys map[string]setter) []string {
	found := map[string]bool{}
	for k := range keys {
		if rest, ok := strings.CutPrefix("."+k, strings.TrimSuffix("."+path, ".")+"."); ok {
			name, _, _ := strings.Cut(rest, ".")
			found[name] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

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

func list[T any](to *[]T, parse func(string) (T, error)) setter {
	return func(raw json.RawMessage) error {
		var values []json.RawMessage
		if err := json.Unmarshal(raw, &values); err != nil {
			return fmt.Errorf("%.100s is not a list", raw)
		}
		*to = nil // what is given replaces the default
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

// scalar is a string, or what else was written where one belongs: a port needs no quotes, and whatever is no
// value at all is for the parser to name.
func scalar(raw json.RawMessage) string {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil || string(raw) == "null" {
		return string(raw)
	}
	return s
}

// LatePolicy reads what becomes of connections while the upstream is late.
func LatePolicy(s string) (attach.LatePolicy, error) { return oneOf(attach.LatePolicies)(s) }

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

// Timeout reads how long to wait.
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

// named takes the name of an object; the API server knows which there are.
func named(s string) (string, error) {
	if s == "" || s == "null" {
		return "", fmt.Errorf("%q is not a name", s)
	}
	return s, nil
}

func labels(of *Selector) setter {
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

// Address parses host:port, in which ${NAME} is a variable of the environment.
func Address(s string, lookupEnv func(string) (string, bool)) (string, error) {
	s, err := expand(s, lookupEnv)
	if err != nil {
		return "", err
	}
	return hostPort(s)
}

// expand replaces ${NAME}. An IPv6 address gets the brackets that a port behind it needs.
func expand(s string, lookup func(string) (string, bool)) (string, error) {
	var errs []error
	bracketed := strings.HasPrefix(s, "[")
	out := os.Expand(s, func(name string) string {
		v, ok := lookup(name)
		if !ok || v == "" {
			errs = append(errs, fmt.Errorf("%q: the environment has no %s", s, name))
		}
		if a, err := netip.ParseAddr(v); err == nil && a.Is6() && !bracketed {
			return "[" + v + "]"
		}
		return v
	})
	return out, errors.Join(errs...)
}
