package ruleset

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"
)

// Values of the configuration key `backend`. A record names the flavour of iptables that was used.
const (
	BackendAuto     = "auto"
	BackendIPTables = "iptables"
	BackendNFTables = "nftables"
)

// backend puts tables into the kernel. Its methods run on a thread that is in the pod's netns.
type backend interface {
	name() string
	// apply installs the tables in place of sluice's present ones; applying twice is harmless.
	apply(context.Context, Family, []table) error
	// check describes each difference between the kernel's rules and the tables; without one it returns none.
	check(context.Context, Family, []table) ([]string, error)
	// remove deletes the tables' chains and rules; an absent one is no error.
	remove(context.Context, Family, []table) error
}

// Installed is a ruleset as it was installed in a netns: enough to check, restore or remove it.
type Installed struct {
	Ruleset Ruleset `json:"ruleset"`
	// Backend installed it: iptables-nft, iptables-legacy, iptables or nftables.
	Backend string `json:"backend"`
	// SYNGate is false where the kernel lacks the socket match: a connection made while there is no
	// listener is then refused instead of waiting.
	SYNGate bool `json:"synGate"`
	// Revision is the constant Revision of the version that rendered it.
	Revision int `json:"revision,omitempty"`
	// IPv6 is false where the kernel runs without IPv6, or cannot filter it and the netns has no global
	// IPv6 address.
	IPv6 bool `json:"ipv6"`
	// Wall says which packets the wall sees.
	Wall Wall `json:"wall,omitempty"`
	// Interfaces are the CNI interfaces, with the addresses to which captured connections are sent.
	Interfaces []Interface `json:"interfaces,omitempty"`
	// Expires is the time at which a ruleset with ExpiresAfter expires, for people: the kernel counts the time itself.
	Expires time.Time `json:"expires,omitzero"`
}

// Wall says which packets the wall sees.
type Wall string

// The extents of the wall.
const (
	WallNone   Wall = ""       // none: the kernel has no nftables. Only SYNs and invalid segments are stopped.
	WallRouted Wall = "routed" // those of the netns' own stack, not those of packet sockets (before Linux 5.16)
	WallFull   Wall = "full"   // all
)

func (i Installed) facts() facts {
	return facts{synGate: i.SYNGate, wall: i.Wall != WallNone, interfaces: i.Interfaces}
}

func (i Installed) wall() []table { return i.lasting().wall(i.Wall, i.Interfaces) }

// lasting returns the ruleset with the rest of its time: rules that are installed again do not last longer.
func (i Installed) lasting() Ruleset {
	r := i.Ruleset
	if r.ExpiresAfter > 0 {
		r.ExpiresAfter = max(time.Until(i.Expires), time.Millisecond)
	}
	return r
}

func (i Installed) families() []Family {
	if i.IPv6 {
		return []Family{IPv4, IPv6}
	}
	return []Family{IPv4}
}

// backends lists the backends that name (auto, iptables, nftables, or the name in a record) allows on this
// node, the best first. It never returns an empty list: the error then says how to get a backend.
func backends(name string) ([]backend, error) {
	var found []backend
	switch name {
	case BackendAuto:
		found = append(findIPTables(), nftablesBackend{})
	case BackendIPTables:
		found = findIPTables()
	case BackendNFTables:
		found = []backend{nftablesBackend{}}
	default:
		if !strings.HasPrefix(name, "iptables-") {
			return nil, fmt.Errorf("unknown backend %q", name)
		}
		found = []backend{iptablesBackend(name)}
	}
	if len(found) == 0 {
		return nil, errors.New("no iptables-restore in PATH: " +
			"install iptables on the node, or set backend to auto or nftables")
	}
	return found, nil
}

// Available reports why the backend with this name (a value of the configuration key `backend`) cannot be used on
// this node. It looks at the node only: a netns may still lack a table or a match.
func Available(name string) error {
	candidates, err := backends(name)
	if err != nil {
		return err
	}
	if len(candidates) == 1 && candidates[0] == (nftablesBackend{}) {
		return nftablesWorks()
	}
	return nil
}

// Apply installs r in the netns at path, in one atomic step for each family. It uses the first backend that name
// allows and that takes all of r, and prefers every backend with a SYN gate to one without. previous is the ruleset
// that is installed there now, or nil; its backend is used again, and name is not used then. After an error the netns
// is as it was.
func Apply(ctx context.Context, netns string, r Ruleset, name string, previous *Installed) (Installed, error) {
	if err := r.Validate(); err != nil {
		return Installed{}, fmt.Errorf("ruleset: %w", err)
	}
	if previous != nil {
		name, r = previous.Backend, r.Inherit(previous) // replaced in place: there is no moment without capture
	}
	var installed Installed
	err := within(netns, func() (err error) {
		installed, err = applyHere(ctx, r, name, previous)
		return err
	})
	return installed, err
}

// applyHere is Apply in the netns of the calling thread.
func applyHere(ctx context.Context, r Ruleset, name string, previous *Installed) (Installed, error) {
	candidates, err := backends(name)
	if err != nil {
		return Installed{}, err
	}
	in := Installed{Ruleset: r, Revision: Revision}
	if in.Interfaces, err = findInterfaces(r.Interfaces, previous); err != nil {
		return Installed{}, err
	}
	if r.ExpiresAfter > 0 {
		in.Expires = time.Now().Add(r.ExpiresAfter)
		if previous != nil && !previous.Expires.IsZero() {
			in.Expires = previous.Expires
		}
	}
	if previous == nil && candidates[0] == (nftablesBackend{}) {
		if whole, err := applyWhole(in); err == nil {
			return whole, nil
		} // else step by step: the kernel lacks something, or there are tables already
	}
	// The wall comes first. Until the other rules are there it drops SYNs, which the clients send again.
	var wallErr error
	if in.Wall, wallErr = raiseWall(in.lasting(), in.Interfaces, previous); wallErr != nil {
		if previous == nil {
			return Installed{}, wallErr
		}
		in.Wall = previous.Wall // the other rules are brought in line all the same
	}
	if in.Wall == WallNone { // only the wall can hold, and expire
		in.Ruleset.ExpiresAfter, in.Expires = 0, time.Time{}
	}
	var failures []error
	// The SYN gate, then IPv6, then both are given up only if no backend can install them. applyWith allows IPv6 to
	// be given up only if the netns has no global IPv6 address; one may still come, by router advertisement.
	for _, without := range []struct{ synGate, ipv6 bool }{{}, {synGate: true}, {ipv6: true}, {true, true}} {
		in.SYNGate = !without.synGate
		for _, b := range candidates {
			in.Backend = b.name()
			in.IPv6, err = applyWith(ctx, b, in, !without.ipv6)
			if err == nil {
				err = loopbackUp()
			}
			if err == nil {
				err = removeStandIn(ctx, b, in, previous)
			}
			if err == nil {
				return in, wallErr
			}
			failures = append(failures, fmt.Errorf("%s: %w", b.name(), err))
			if previous == nil {
				// Some tables may be installed. If removing fails it fails for the reason above, which is reported.
				_ = removeWith(ctx, b, []Family{IPv4, IPv6}, in.facts().wall, nil)
			}
		}
	}
	failures = failures[len(failures)-len(candidates):] // of the last round: it asked for the least
	if previous != nil {
		if err := putBack(ctx, candidates[0], *previous); err != nil {
			failures = append(failures, fmt.Errorf("putting back the previous ruleset: %w", err))
		}
	} else {
		failures = append(failures, in.lowerWall())
	}
	return Installed{}, errors.Join(failures...)
}

// applyWhole installs in with nftables, wall and all, in one transaction. It fails if a table of sluice exists.
func applyWhole(in Installed) (Installed, error) {
	in.Backend, in.Wall, in.SYNGate, in.IPv6 = BackendNFTables, WallFull, true, kernelHasIPv6()
	tables := in.wall()
	for _, f := range in.families() {
		tables = append(tables, in.Ruleset.tables(f, in.facts())...)
	}
	if err := loopbackUp(); err != nil {
		return in, err
	}
	return in, replaceTables(nil, tables)
}

// removeStandIn removes the rules that stood in for a wall which there is now: those of a version without one.
func removeStandIn(ctx context.Context, b backend, in Installed, previous *Installed) error {
	if previous == nil || previous.Wall != WallNone || in.Wall == WallNone {
		return nil
	}
	for _, f := range in.families() {
		if err := b.remove(ctx, f, []table{in.Ruleset.filter(f)}); err != nil {
			return fmt.Errorf("removing the rules of filter: %w", err)
		}
	}
	return nil
}

func putBack(ctx context.Context, b backend, previous Installed) error {
	_, err := applyWith(ctx, b, previous, false)
	if previous.Wall == WallNone {
		return err
	}
	return errors.Join(err, replaceTables(previous.Ruleset.wall(WallFull, nil), previous.wall()))
}

// raiseWall installs as much of the wall as the kernel can have. A kernel that lacks a part of it refuses the whole
// transaction. If it refuses for another reason, that is an error. A wall that is there already keeps its counters.
func raiseWall(r Ruleset, interfaces []Interface, previous *Installed) (Wall, error) {
	if previous != nil && previous.Wall != WallNone {
		drift, err := nftablesBackend{}.check(context.Background(), link, r.wall(previous.Wall, interfaces))
		if err == nil && len(drift) == 0 {
			return previous.Wall, nil
		}
	}
	for _, extent := range []Wall{WallFull, WallRouted} {
		err := replaceTables(r.wall(WallFull, nil), r.wall(extent, interfaces))
		if err == nil {
			return extent, nil
		}
		lacks := lacksNFT(err) || errors.Is(err, unix.ENOENT) // ENOENT: an expression or a hook that it does not have
		had := previous != nil && previous.Wall == extent     // then an interface has just gone, most likely
		if !lacks || had || !stillThere(interfaces) {
			return WallNone, fmt.Errorf("the wall: %w", err)
		}
	}
	return WallNone, nil
}

func stillThere(interfaces []Interface) bool {
	return !slices.ContainsFunc(interfaces, func(i Interface) bool {
		_, err := net.InterfaceByName(i.Name)
		return err != nil
	})
}

// lowerWall removes the wall.
func (i Installed) lowerWall() error {
	if i.Wall == WallNone {
		return nil
	}
	if err := replaceTables(i.wall(), nil); err != nil {
		return fmt.Errorf("removing the wall: %w", err)
	}
	return nil
}

// findInterfaces returns those of the interfaces that exist. Addresses that previous has stay, as long as the interface
// has them: a pod with IPv6 may get a new one every day.
func findInterfaces(names []string, previous *Installed) ([]Interface, error) {
	links, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	var found []Interface
	for _, l := range links {
		if !slices.Contains(names, l.Name) {
			continue
		}
		addrs, err := l.Addrs()
		if err != nil {
			return nil, fmt.Errorf("addresses of %s: %w", l.Name, err)
		}
		i := Interface{Name: l.Name}
		if len(l.HardwareAddr) == sizeMAC {
			i.MAC = l.HardwareAddr.String()
		}
		var was Interface
		if previous != nil {
			n := slices.IndexFunc(previous.Interfaces, func(p Interface) bool { return p.Name == l.Name })
			if n >= 0 {
				was = previous.Interfaces[n]
			}
		}
		for _, a := range slices.Backward(addrs) { // the first of each family stays
			p, ok := a.(*net.IPNet)
			if !ok || !p.IP.IsGlobalUnicast() {
				continue
			}
			ip, _ := netip.AddrFromSlice(p.IP)
			ip = ip.Unmap()
			switch {
			case ip.Is4() && (was.IPv4 != i.IPv4 || !i.IPv4.IsValid()):
				i.IPv4 = ip
			case ip.Is6() && (was.IPv6 != i.IPv6 || !i.IPv6.IsValid()):
				i.IPv6 = ip
			}
		}
		found = append(found, i)
	}
	return found, nil
}

// applyWith installs in with b, apart from the wall, and reports whether the rules cover IPv6. If IPv6 cannot be
// filtered, that is an error if the caller needs it, or if the netns has a global IPv6 address: the pod could bypass
// capture with that.
func applyWith(ctx context.Context, b backend, in Installed, needIPv6 bool) (ipv6 bool, err error) {
	if err := b.apply(ctx, IPv4, in.Ruleset.tables(IPv4, in.facts())); err != nil {
		return false, err
	}
	if !kernelHasIPv6() {
		return false, nil
	}
	if err := b.apply(ctx, IPv6, in.Ruleset.tables(IPv6, in.facts())); err != nil {
		has, aerr := hasGlobalIPv6()
		if aerr != nil || has || needIPv6 {
			return false, errors.Join(fmt.Errorf("the pod has an IPv6 address that cannot be captured: %w", err), aerr)
		}
		// The tables before the one that failed; it may fail the same way.
		_ = removeWith(ctx, b, []Family{IPv6}, in.facts().wall, nil)
		return false, nil
	}
	return true, nil
}

func kernelHasIPv6() bool {
	_, err := os.Stat("/proc/thread-self/net/if_inet6")
	return !errors.Is(err, os.ErrNotExist)
}

// loopbackUp brings lo up, since redirected packets take it. Runtimes bring lo up themselves, but not every
// runtime does so before it runs the chain of plugins.
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

// Check describes each difference between the rules in the netns at path and the installed ones, in words for
// people; without a difference it returns none.
func (i Installed) Check(ctx context.Context, netns string) ([]string, error) {
	var drift []string
	err := within(netns, func() (err error) {
		drift, err = i.checkHere(ctx)
		return err
	})
	return drift, err
}

func (i Installed) checkHere(ctx context.Context) ([]string, error) {
	candidates, err := backends(i.Backend)
	if err != nil {
		return nil, err
	}
	drift, err := i.checkInterfacesHere()
	if err != nil {
		return nil, err
	}
	for _, f := range i.families() {
		d, err := candidates[0].check(ctx, f, i.Ruleset.tables(f, i.facts()))
		if err != nil {
			return nil, fmt.Errorf("checking with %s: %w", i.Backend, err)
		}
		drift = append(drift, d...)
	}
	if i.Wall != WallNone {
		d, err := nftablesBackend{}.check(ctx, link, i.wall())
		if err != nil {
			return nil, fmt.Errorf("checking the wall: %w", err)
		}
		drift = append(drift, d...)
	}
	return drift, nil
}

// CheckInterfaces returns that part of Check that is about interfaces and addresses which came or went.
func (i Installed) CheckInterfaces(netns string) (drift []string, err error) {
	err = within(netns, func() (err error) {
		drift, err = i.checkInterfacesHere()
		return err
	})
	return drift, err
}

func (i Installed) checkInterfacesHere() (drift []string, err error) {
	now, err := findInterfaces(i.Ruleset.Interfaces, &i)
	if err != nil {
		return nil, err
	}
	for _, was := range i.Interfaces {
		if !slices.Contains(now, was) {
			drift = append(drift, fmt.Sprintf("the rules are for %s, which is not there any more", was))
		}
	}
	for _, is := range now {
		if !slices.Contains(i.Interfaces, is) {
			drift = append(drift, fmt.Sprintf("the rules are not for %s", is))
		}
		if !i.IPv6 && is.IPv6.IsValid() {
			drift = append(drift, fmt.Sprintf("IPv6 is not captured, and there is %s", is))
		}
	}
	return drift, nil
}

// Remove deletes every rule of sluice from the netns at path. Capture ends first; then released, if it is not nil,
// runs in the netns, while the SYN gate still stands. This is the time to delete the conntrack entries of waiting
// connections: without that their next SYN follows a stale entry to a closed port and is refused.
func (i Installed) Remove(ctx context.Context, netns string, released func() error) error {
	return within(netns, func() error {
		candidates, err := backends(i.Backend)
		if err != nil {
			return err
		}
		return errors.Join(i.lowerWall(), removeWith(ctx, candidates[0], i.families(), i.facts().wall, released))
	})
}

// removeWith deletes the tables that capture, runs released, and then deletes the table of the guard, which tables
// puts first. wall says that there are no tables that stand in for the wall.
func removeWith(ctx context.Context, b backend, families []Family, wall bool, released func() error) error {
	var errs []error
	remove := func(tables func(Family) []table) {
		for _, f := range families {
			if err := b.remove(ctx, f, tables(f)); err != nil {
				errs = append(errs, fmt.Errorf("removing with %s: %w", b.name(), err))
			}
		}
	}
	var empty Ruleset // every ruleset has the same chains
	all := func(f Family) []table { return empty.tables(f, facts{synGate: true, wall: wall}) }
	remove(func(f Family) []table { return all(f)[1:] })
	if released != nil {
		errs = append(errs, released())
	}
	remove(func(f Family) []table { return all(f)[:1] })
	return errors.Join(errs...)
}

// within runs do on a thread that is in the netns at path.
func within(netns string, do func() error) error {
	if err := ns.WithNetNSPath(netns, func(ns.NetNS) error { return do() }); err != nil {
		return fmt.Errorf("in netns %s: %w", netns, err)
	}
	return nil
}
