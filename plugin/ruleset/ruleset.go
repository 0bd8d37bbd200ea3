// Package ruleset describes the netfilter rules of one pod netns, each with its reason, and applies, checks and
// removes them.
//
// A [Ruleset] is plain data. It is turned into tables, chains and rules in one place (rules.go and wall.go), and two
// backends put those into the kernel: iptables (legacy or nft) and nftables. The chains and their tables:
//
//	nat     OUTPUT ─────▶ SLUICE_OUTPUT ─────┐
//	nat     PREROUTING ─▶ SLUICE_PREROUTING ─┴▶ SLUICE_OUTBOUND ─▶ SLUICE_CAPTURE ─▶ SLUICE_GATE: to port 15001
//	                           └▶ inbound ports: REDIRECT to 15006
//	filter  OUTPUT ─────▶ SLUICE_OUTPUT ─────┐
//	filter  FORWARD ────▶ SLUICE_FORWARD ────┴▶ SLUICE_OUTBOUND ─▶ SLUICE_CAPTURE: reject QUIC, and more if asked to
//	mangle  INPUT ──────▶ SLUICE_INPUT: the guard and the SYN gate of ports 15001 and 15006
//
// SLUICE_OUTPUT, SLUICE_PREROUTING and SLUICE_FORWARD return packets that are not outbound, SLUICE_OUTBOUND
// returns excluded ones, and SLUICE_CAPTURE acts on the rest. OUTPUT sees the packets that the pod itself sends;
// PREROUTING and FORWARD see those that containers nested in the pod send.
//
// The rules above divert connections. The wall (wall.go) stops all other packets that must not leave; it consists of
// nftables, whichever backend has the rest.
//
// A ruleset with ExpiresAfter only holds: the wall drops all captured TCP, and nothing is redirected. A redirected SYN
// would leave a conntrack entry that leads it to the gate for as long as it is sent again, whatever the rules say then.
// So once the rules have expired, the next SYN of each waiting connection leaves the pod.
//
// The names of the chains that the built-in ones jump to never change: an upgraded sluice must find the
// jumps that an older version left.
package ruleset

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Ports are the ports in the pod netns that captured connections are redirected to.
type Ports struct {
	Outbound uint16 `json:"outbound"`
	Inbound  uint16 `json:"inbound"`
}

// DefaultPorts are the ports of a Ruleset that has none.
var DefaultPorts = Ports{Outbound: 15001, Inbound: 15006}

// Marks of conntrack entries. Setting one takes CAP_NET_ADMIN.
const (
	// letOut is a bit in the mark of each connection that the wall has let out. It is valid for packets of the end that
	// began the connection: a raw socket in the pod can pretend to be the other end.
	letOut = 1 << 29
	// fromOutside is a bit in the mark of each connection from outside. It is valid for packets that answer.
	fromOutside = 1 << 27
	// DirectMark is the mark of a connection that sluiced lets go direct. It includes letOut.
	DirectMark = letOut | 0x3a99
)

// Marks of packets. The rules clear the bits before they set them: since Linux 5.17 CAP_NET_RAW suffices for SO_MARK.
const (
	// passed is a bit in the mark of each packet that the wall has let pass on its way to a CNI interface.
	passed = 1 << 30
	// inside is a bit in the mark of each packet that stays in the pod: it goes to a container nested in it.
	inside = 1 << 28
)

// QUICPort is the UDP port that HTTP/3 uses (RFC 9114, section 3.1.2 leaves others to Alt-Svc).
const QUICPort = 443

// Revision is raised whenever a Ruleset renders to other rules than before: the daemon then replaces the rules that an
// earlier version installed.
const Revision = 4

// Ruleset describes which connections of one pod netns are captured.
type Ruleset struct {
	// Interfaces are the pod's CNI interfaces. Packets that arrive through them were not sent from
	// inside the pod and are not captured as outbound.
	Interfaces []string `json:"interfaces"`
	// Upstream is the proxy's address if the pod can reach the proxy itself; otherwise the zero value.
	// The pod's own connections to it are not captured, for pods that use the proxy explicitly.
	Upstream netip.AddrPort `json:"upstream,omitzero"`
	// IncludePorts are the destination ports that are captured; empty means all.
	IncludePorts []PortRange `json:"includePorts,omitempty"`
	// ExcludePorts are destination ports that are not captured, even if IncludePorts has them.
	ExcludePorts []PortRange `json:"excludePorts,omitempty"`
	// IncludeCIDRs are the destinations that are captured, of either family; empty means all.
	IncludeCIDRs []netip.Prefix `json:"includeCIDRs,omitempty"`
	// ExcludeCIDRs are destinations that are not captured, even if IncludeCIDRs has them.
	ExcludeCIDRs []netip.Prefix `json:"excludeCIDRs,omitempty"`
	// ExcludeInterfaces are interfaces in the pod netns: packets that the pod sends out through them
	// and packets that nested containers send in through them are not captured.
	ExcludeInterfaces []string `json:"excludeInterfaces,omitempty"`
	// InboundPorts are ports of the pod: connections from outside to them are captured; empty means none.
	InboundPorts []PortRange `json:"inboundPorts,omitempty"`
	// ExcludeSources are the sources from which connections to InboundPorts are not captured: the addresses
	// of the node, as its kubelet probes the pod, and of the proxy, as it connects to the pod in the end.
	ExcludeSources []netip.Prefix `json:"excludeSources,omitempty"`
	// RejectQUIC answers captured UDP 443 with port-unreachable, so that clients fall back to TCP at once.
	RejectQUIC bool `json:"rejectQUIC"`
	// Other says whether captured destinations may be sent packets that are neither TCP nor QUIC. Empty means
	// OtherAllow.
	Other string `json:"other,omitempty"`
	// Resolvers are the pod's name servers: OtherDNS lets out UDP to their port 53.
	Resolvers []netip.Addr `json:"resolvers,omitempty"`
	// Ports are the ports that captured connections are redirected to; zero means DefaultPorts. They never change while
	// the pod lives, since its listeners have them.
	Ports Ports `json:"ports,omitzero"`
	// KeepOlder lets connections go on that are older than the rules, for a pod that ran before it was captured, or was
	// captured by a version without the wall. Only its SYNs are captured and stopped then.
	KeepOlder bool `json:"keepOlder,omitempty"`
	// ExpiresAfter, unless it is 0, is how long the rules hold captured TCP back, from their installation on. Then they
	// let everything pass, without a process that ends them. It needs the wall.
	ExpiresAfter time.Duration `json:"expiresAfter,omitempty"`
}

// Values of Other.
const (
	OtherAllow = "allow" // anything may be sent
	OtherDNS   = "dns"   // only questions to the pod's resolvers; the rest is rejected
	OtherDeny  = "deny"  // nothing; all of it is rejected
)

// Others are the values of Other, each stricter than the one before.
var Others = []string{OtherAllow, OtherDNS, OtherDeny}

// CapturePorts returns the ports that captured connections are redirected to.
func (r Ruleset) CapturePorts() Ports {
	return Ports{
		Outbound: cmp.Or(r.Ports.Outbound, DefaultPorts.Outbound),
		Inbound:  cmp.Or(r.Ports.Inbound, DefaultPorts.Inbound),
	}
}

// wallRevision is the first Revision with the wall. Connections that rules of an earlier one let out have no mark.
const wallRevision = 3

// Inherit returns r with the properties of previous that never change while the pod lives. previous is the ruleset that
// is installed in the netns, or nil.
func (r Ruleset) Inherit(previous *Installed) Ruleset {
	if previous != nil {
		r.Ports = previous.Ruleset.Ports
		r.KeepOlder = previous.Ruleset.KeepOlder || previous.Revision < wallRevision
	}
	return r
}

// LinkLocal returns the CIDRs that are excluded by default. If sluiced relayed a connection to the cloud's
// metadata service from the host, the service would give the pod the node's credentials.
func LinkLocal() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10")}
}

// Provisional is the ruleset of a pod with unknown labels: it captures everything until they are known.
func Provisional(ifName string) Ruleset {
	return Ruleset{Interfaces: []string{ifName}, ExcludeCIDRs: LinkLocal(), RejectQUIC: true}
}

// Validate returns an error that names the first value that a backend could not render faithfully.
func (r Ruleset) Validate() error {
	if len(r.Interfaces) == 0 {
		return fmt.Errorf("interfaces: none given")
	}
	for _, name := range slices.Concat(r.Interfaces, r.ExcludeInterfaces) {
		if err := ValidateInterface(name); err != nil {
			return err
		}
	}
	for _, p := range slices.Concat(r.IncludePorts, r.ExcludePorts, r.InboundPorts) {
		if p.First == 0 || p.Last < p.First {
			return fmt.Errorf("port range %d-%d is empty", p.First, p.Last)
		}
	}
	for _, c := range slices.Concat(r.IncludeCIDRs, r.ExcludeCIDRs, r.ExcludeSources) {
		if !c.IsValid() || c != c.Masked() || c.Addr().Is4In6() {
			return fmt.Errorf("CIDR %s is not a canonical prefix", c)
		}
	}
	if r.Other != "" && !slices.Contains(Others, r.Other) {
		return fmt.Errorf("other: %q is not one of %s", r.Other, strings.Join(Others, ", "))
	}
	for _, a := range r.Resolvers {
		if !a.IsValid() || a.Is4In6() || a.Zone() != "" {
			return fmt.Errorf("resolver %s is not a canonical address", a)
		}
	}
	if r.ExpiresAfter < 0 {
		return fmt.Errorf("expiresAfter: %s is negative", r.ExpiresAfter)
	}
	if p := r.CapturePorts(); p.Outbound == p.Inbound {
		return fmt.Errorf("ports: outbound and inbound are both %d", p.Outbound)
	}
	return nil
}

// capturesPort reports whether the port lists capture p.
func (r Ruleset) capturesPort(p uint16) bool {
	has := func(ranges []PortRange) bool {
		return slices.ContainsFunc(ranges, func(pr PortRange) bool { return pr.First <= p && p <= pr.Last })
	}
	return !has(r.ExcludePorts) && (len(r.IncludePorts) == 0 || has(r.IncludePorts))
}

// PortRange is one port, or the ports from First to Last, both included.
type PortRange struct{ First, Last uint16 }

// ParsePortRange reads "80" or "8000-8999".
func ParsePortRange(s string) (PortRange, error) {
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	f, ferr := parsePort(first)
	l, lerr := parsePort(last)
	if err := cmp.Or(ferr, lerr); err != nil {
		return PortRange{}, fmt.Errorf("port %q: %w", s, err)
	}
	if l < f {
		return PortRange{}, fmt.Errorf("port range %q ends before it starts", s)
	}
	return PortRange{f, l}, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("not a port from 1 to 65535")
	}
	return uint16(n), nil
}

// String is the form that ParsePortRange reads.
func (p PortRange) String() string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}

// MarshalText makes a port range a string in JSON.
func (p PortRange) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads the form that ParsePortRange reads.
func (p *PortRange) UnmarshalText(b []byte) (err error) {
	*p, err = ParsePortRange(string(b))
	return err
}

// ParseCIDR reads a prefix, or an address that stands for itself alone. Host bits must be zero: a
// prefix such as 10.1.2.3/8 is more likely a mistake than intended.
func ParseCIDR(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" && !a.Is4In6() {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR such as 10.0.0.0/8 or fd00::/8", s)
	}
	if p.Addr().Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%q: write the IPv4 prefix itself", s)
	}
	if p != p.Masked() {
		return netip.Prefix{}, fmt.Errorf("%q has host bits set; did you mean %s?", s, p.Masked())
	}
	return p, nil
}

// interfaceName is stricter than the kernel: no quote or space that would need escaping in an
// iptables-restore document, and no trailing '+', which iptables reads as a wildcard. The length is checked separately:
// compiling `{1,15}` would take 0.1 ms at every start of the plugin.
var interfaceName = regexp.MustCompile(`^[A-Za-z0-9_.:@-]+$`)

// maxInterfaceName is the longest name that the kernel allows (IFNAMSIZ, without the zero at its end).
const maxInterfaceName = 15

// ValidateInterface returns an error for a name that cannot be used in a rule.
func ValidateInterface(name string) error {
	if len(name) > maxInterfaceName || !interfaceName.MatchString(name) {
		return fmt.Errorf("%q is not an interface name: 1 to 15 letters, digits or any of _ . : @ -", name)
	}
	return nil
}
