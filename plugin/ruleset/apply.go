package ruleset

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"
)

// Values of the configuration key `backend`. A record names the flavour of iptables that was used.
const (
	BackendAuto     = "auto"
	BackendIPTables = "iptables"
	BackendNFTables = "nftables"
)

// backend puts tables into the kernel. All of it runs on a thread that is in the pod's netns.
type backend interface {
	name() string
	// apply replaces whatever of ours is there; to apply twice is harmless.
	apply(context.Context, Family, []table) error
	// check describes each difference between the kernel's rules and ours; none is no difference.
	check(context.Context, Family, []table) ([]string, error)
	// remove takes away what is there of tables; what is not there is no error.
	remove(context.Context, Family, []table) error
}

// Installed is a ruleset as it went into a netns: all that is needed to check, restore or remove it.
type Installed struct {
	Ruleset Ruleset `json:"ruleset"`
	// Backend is iptables-nft, iptables-legacy, iptables or nftables.
	Backend string `json:"backend"`
	// SYNGate is false where the kernel lacks the socket match: a connection made while nobody
	// listens is then refused instead of waiting.
	SYNGate bool `json:"synGate"`
	// Revision is that of whoever rendered it.
	Revision int `json:"revision,omitempty"`
	// IPv6 is false where the netns has no IPv6, or cannot filter it and has no address of it.
	IPv6 bool `json:"ipv6"`
}

func (in Installed) families() []Family {
	if in.IPv6 {
		return []Family{IPv4, IPv6}
	}
	return []Family{IPv4}
}

// backends lists what `want` (auto, iptables, nftables, or the name in a record) may use on this node,
// the best first. An empty list is an error that says what to install.
func backends(want string) ([]backend, error) {
	var found []backend
	switch want {
	case BackendAuto:
		found = append(findIPTables(), nftablesBackend{})
	case BackendIPTables:
		found = findIPTables()
	case BackendNFTables:
		found = []backend{nftablesBackend{}}
	default:
		if !strings.HasPrefix(want, "iptables-") {
			return nil, fmt.Errorf("unknown backend %q", want)
		}
		found = []backend{iptablesBackend(want)}
	}
	if len(found) == 0 {
		return nil, errors.New("no iptables-restore in PATH: install iptables on the node, or set backend to auto or nftables")
	}
	return found, nil
}

// Available reports why a backend cannot be used on this node, as far as can be told without a netns.
func Available(want string) error {
	candidates, err := backends(want)
	if err != nil {
		return err
	}
	if len(candidates) == 1 && candidates[0] == (nftablesBackend{}) {
		return nftablesWorks()
	}
	return nil
}

// Apply installs r in the netns at path with the first backend that takes all of it, one atomic step a
// family. It prefers any backend with a SYN gate to one without. was is what is installed there now, or
// nil; after an error the netns is as it was.
func Apply(ctx context.Context, netns string, r Ruleset, want string, was *Installed) (Installed, error) {
	if err := r.Validate(); err != nil {
		return Installed{}, fmt.Errorf("ruleset: %w", err)
	}
	if was != nil {
		want = was.Backend // replaced in place: there is no moment without capture
	}
	var in Installed
	err := within(netns, func() (err error) {
		in, err = applyHere(ctx, r, want, was)
		return err
	})
	return in, err
}

func applyHere(ctx context.Context, r Ruleset, want string, was *Installed) (Installed, error) {
	candidates, err := backends(want)
	if err != nil {
		return Installed{}, err
	}
	var failures []error
	// What can be done without is done without only when no backend has it. IPv6 can be if the netns has no
	// address of it; one may still come, by router advertisement.
	for _, without := range []struct{ synGate, ipv6 bool }{{}, {synGate: true}, {ipv6: true}, {true, true}} {
		synGate := !without.synGate
		for _, b := range candidates {
			ipv6, err := applyWith(ctx, b, r, synGate, !without.ipv6)
			if err == nil {
				err = loopbackUp()
			}
			if err == nil {
				return Installed{Ruleset: r, Backend: b.name(), SYNGate: synGate, Revision: Revision, IPv6: ipv6}, nil
			}
			failures = append(failures, fmt.Errorf("%s: %w", b.name(), err))
			if was == nil {
				// Some of it may be in. This fails for what fails above, and that is reported.
				_ = removeWith(ctx, b, []Family{IPv4, IPv6}, nil)
			}
		}
	}
	failures = failures[len(failures)-len(candidates):] // the round that asked for the least says what stands in the way
	if was != nil {
		if _, err := applyWith(ctx, candidates[0], was.Ruleset, was.SYNGate, false); err != nil {
			failures = append(failures, fmt.Errorf("putting back what was there: %w", err))
		}
	}
	return Installed{}, errors.Join(failures...)
}

// applyWith reports whether IPv6 is covered. Where IPv6 cannot be filtered that is an error if it is needed: by
// the caller, or by an address in the netns that could be used to go round.
func applyWith(ctx context.Context, b backend, r Ruleset, synGate, needIPv6 bool) (ipv6 bool, err error) {
	if err := b.apply(ctx, IPv4, r.tables(IPv4, synGate)); err != nil {
		return false, err
	}
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); errors.Is(err, os.ErrNotExist) {
		return false, nil // this kernel runs without IPv6
	}
	if err := b.apply(ctx, IPv6, r.tables(IPv6, synGate)); err != nil {
		has, aerr := hasGlobalIPv6()
		if aerr != nil || has || needIPv6 {
			return false, errors.Join(fmt.Errorf("the pod has an IPv6 address that cannot be captured: %w", err), aerr)
		}
		_ = removeWith(ctx, b, []Family{IPv6}, nil) // what went in before it failed; it may fail the same way
		return false, nil
	}
	return true, nil
}

// loopbackUp makes sure of the way that redirected packets take. Runtimes bring lo up themselves, but not
// every one before the chain runs.
func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	defer unix.Close(s) //nolint:errcheck // nothing was written
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	if err := unix.IoctlIfreq(s, unix.SIOCGIFFLAGS, lo); err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	lo.SetUint16(lo.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo); err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	return nil
}

func hasGlobalIPv6() (bool, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false, fmt.Errorf("listing addresses: %w", err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() == nil && n.IP.IsGlobalUnicast() {
			return true, nil
		}
	}
	return false, nil
}

// Check describes each difference between what the netns at path holds and what was installed.
func (in Installed) Check(ctx context.Context, netns string) ([]string, error) {
	var drift []string
	err := within(netns, func() error {
		candidates, err := backends(in.Backend)
		if err != nil {
			return err
		}
		for _, f := range in.families() {
			d, err := candidates[0].check(ctx, f, in.Ruleset.tables(f, in.SYNGate))
			if err != nil {
				return fmt.Errorf("checking with %s: %w", in.Backend, err)
			}
			drift = append(drift, d...)
		}
		return nil
	})
	return drift, err
}

// Remove takes every rule of ours out of the netns at path. Capture ends first; released, if given, then
// runs in the netns, before the gate goes: that is when the conntrack entries of connections that still
// wait must be dropped, or their next SYN follows a stale entry to a closed port and is refused.
func (in Installed) Remove(ctx context.Context, netns string, released func() error) error {
	return within(netns, func() error {
		candidates, err := backends(in.Backend)
		if err != nil {
			return err
		}
		return removeWith(ctx, candidates[0], in.families(), released)
	})
}

func removeWith(ctx context.Context, b backend, families []Family, released func() error) error {
	var errs []error
	remove := func(tables func(Family) []table) {
		for _, f := range families {
			if err := b.remove(ctx, f, tables(f)); err != nil {
				errs = append(errs, fmt.Errorf("removing with %s: %w", b.name(), err))
			}
		}
	}
	var empty Ruleset // which chains there are does not depend on what is captured
	remove(func(f Family) []table { return empty.tables(f, true)[1:] })
	if released != nil {
		errs = append(errs, released())
	}
	remove(func(f Family) []table { return empty.tables(f, true)[:1] })
	return errors.Join(errs...)
}

func within(netns string, do func() error) error {
	if err := ns.WithNetNSPath(netns, func(ns.NetNS) error { return do() }); err != nil {
		return fmt.Errorf("in netns %s: %w", netns, err)
	}
	return nil
}
