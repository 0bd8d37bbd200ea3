package escape

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// mutant is one change of the rules in the kernel.
type mutant struct {
	name  string
	apply func(*lab) error
}

// quiet is how long a test waits for traffic that must not come.
const quiet = 150 * time.Millisecond

// How long a test waits for traffic that must come: at first, and at most on a busy machine.
const leastPatience, mostPatience = 1500 * time.Millisecond, 12 * time.Second

// TestMutants takes away every rule, one by one, and swaps every two neighbours, and tests that each such change is
// noticed: a packet escapes, allowed traffic does not pass, or captured traffic is not served. A change without any of
// these effects must at least be named by CHECK, and is listed in excused with the reason.
func TestMutants(t *testing.T) {
	t.Parallel()
	flavours := testbed.Flavours
	if !*every {
		flavours = flavours[len(flavours)-1:] // one of them suffices for every change of the sources
	}
	for _, f := range flavours {
		t.Run(f.Name, func(t *testing.T) { testMutants(t, f) }) // one after the other: the probes have little time
	}
}

// outcome is what noticed a mutant.
type outcome struct{ mutant, escape, traffic, check string }

func testMutants(t *testing.T, f testbed.Flavour) {
	t.Helper()
	const labs = 6
	rules, s := withPorts()
	var workers []*lab
	for range labs {
		l := newLab(t, f, rules, s)
		unchanged := mutant{name: "no change", apply: func(*lab) error { return nil }}
		// The first packets wait for the neighbours' addresses, and on a busy machine a probe may take longer.
		var o outcome
		for l.patience = leastPatience; l.patience <= mostPatience; l.patience *= 2 {
			if o = l.notice(unchanged); o == (outcome{mutant: o.mutant}) {
				break
			}
		}
		if l.patience > mostPatience {
			t.Fatalf("without a change, this is noticed: %+v", o)
		}
		workers = append(workers, l)
	}
	all := workers[0].mutants()
	outcomes := make([]outcome, len(all))
	var next atomic.Int64
	var wg sync.WaitGroup
	for _, l := range workers {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(all)); i = next.Add(1) - 1 {
				outcomes[i] = l.notice(all[i])
			}
		})
	}
	wg.Wait()
	slices.SortFunc(outcomes, func(a, b outcome) int { return strings.Compare(a.mutant, b.mutant) })
	report(t, outcomes)
}

// report prints the table of mutants, and fails the test for those that were not noticed.
func report(t *testing.T, outcomes []outcome) {
	t.Helper()
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, o := range outcomes {
		noticed := o.escape
		if noticed == "" {
			noticed = o.traffic
		}
		if noticed == "" && o.check != "" {
			reason := unnoticed(o.mutant)
			if reason == "" {
				t.Errorf("only CHECK notices: %s", o.mutant)
			}
			noticed = "CHECK only: " + reason
		}
		if noticed == "" {
			t.Errorf("nothing notices: %s", o.mutant)
		} else if o.check == "" {
			t.Errorf("CHECK does not notice: %s", o.mutant)
		}
		fmt.Fprintf(w, "%s\t%s\n", o.mutant, noticed)
	}
	_ = w.Flush() // to memory
	t.Logf("%d mutants\n%s", len(outcomes), b.String())
}

// notice changes the rules, finds out what notices it, and puts the rules back.
func (l *lab) notice(m mutant) outcome {
	l.t.Helper()
	o := outcome{mutant: m.name}
	if err := m.apply(l); err != nil {
		l.t.Errorf("%s: %v", m.name, err)
		return o
	}
	drift, err := l.installed.Check(context.Background(), l.pod.Path())
	if err != nil {
		l.t.Errorf("%s: CHECK: %v", m.name, err)
	}
	if len(drift) > 0 {
		o.check = drift[0]
	}
	if !l.settle() { // without markers each attempt would wait for one
		o.traffic = "LLDP does not leave"
	} else if o.escape = l.escape(); o.escape == "" {
		o.traffic = l.traffic()
	}
	l.forget()
	l.install(l.rules)
	l.escapes()
	l.tap.forget()
	return o
}

// escape tries all ways out, and returns the first that leads out.
func (l *lab) escape() string {
	l.t.Helper()
	for _, a := range attempts {
		if len(l.attempt(a)) > 0 {
			return "escape: " + a.name
		}
	}
	return ""
}

// traffic returns a probe that fails.
func (l *lab) traffic() string {
	l.t.Helper()
	for name, frame := range plainFrames(l.scene) {
		before := l.tap.seen(frame)
		l.ways["packet"].mark(0)
		l.ways["packet"].send(frame, unix.ETH_P_ALL)
		if !l.settle() {
			return "other EtherTypes do not leave"
		}
		if l.tap.seen(frame) == before {
			return name + " does not leave"
		}
	}
	if failed := l.first(l.probes()); failed != "" {
		return failed
	}
	if failed := l.first([]probe{l.forgotten()}); failed != "" {
		return failed
	}
	l.closeGates()
	failed := l.first(l.waits())
	l.openGates()
	if failed != "" {
		return failed
	}
	return l.first([]probe{l.goesOn()})
}

// first names a probe that fails.
func (l *lab) first(probes []probe) string {
	failed := check(l.patience, probes)
	if len(failed) == 0 {
		return ""
	}
	name := slices.Sorted(maps.Keys(failed))[0]
	return fmt.Sprintf("%s: %v (%d of %d probes)", name, failed[name], len(failed), len(probes))
}

// probes are those of the rules.
func (l *lab) probes() []probe {
	all := append(l.quic(), l.inboundCaptured()...)
	all = append(append(all, l.between()), l.passing()...)
	for _, f := range l.families() {
		all = append(all,
			reads("captured "+f.name, l.pod.Host, at(f.world, webPort), "gate 15001"),
			reads("captured, nested "+f.name, l.nested, at(f.world, webPort), "gate 15001"),
			l.captured("bound to eth0 "+f.name, at(f.world, webPort), func(fd int) error {
				return unix.BindToDevice(fd, "eth0")
			}),
			l.captured("with a forged mark "+f.name, at(f.world, webPort), func(fd int) error {
				return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, 1<<28)
			}),
			l.direct(f),
			reads("excluded port "+f.name, l.pod.Host, at(f.world, freePort), f.pod),
			reads("a port that is not included "+f.name, l.pod.Host, at(f.world, missingPort), f.pod),
			reads("captured by another range "+f.name, l.pod.Host, at(f.world, highPort), "gate 15001"),
			echoes("UDP 443 excluded "+f.name, l.pod.Host, "udp", at(f.excluded, 443)),
			echoes("UDP 443 pod to itself "+f.name, l.pod.Host, "udp", at(f.pod, 443)),
			echoes("UDP 443 pod to nested "+f.name, l.pod.Host, "udp", at(f.nested, 443)),
			closed("the gate is no way in, pod "+f.name, l.pod.Host, at(f.pod, 15001)),
			closed("the gate is no way in, nested "+f.name, l.nested, at(f.bridge, 15001)),
			closed("the gate is no way in, world "+f.name, l.n.World, at(f.pod, 15001)),
			closed("the inbound gate is no way in, pod "+f.name, l.pod.Host, at(f.pod, 15006)),
			closed("the inbound gate is no way in, world "+f.name, l.n.World, at(f.pod, 15006)),
		)
	}
	return all
}

// captured is a probe of a captured connection with options of its socket.
func (l *lab) captured(name, address string, options func(fd int) error) probe {
	return probe{"captured, " + name, func(ctx context.Context) error {
		got, err := dialWith(ctx, l.pod.Host, address, options)
		if err == nil && got != "gate 15001" {
			err = fmt.Errorf("got %q", got)
		}
		return err
	}}
}

// inboundCaptured are the probes of connections from outside to a captured port.
func (l *lab) inboundCaptured() []probe {
	var all []probe
	for _, f := range l.families() {
		all = append(all,
			reads("inbound "+f.name, l.n.World, at(f.pod, podPort), "gate 15006"),
			echoes("inbound from the node "+f.name, l.n.Host, "tcp", at(f.pod, podPort)),
		)
	}
	return all
}

// closed is a probe of an address that nothing answers at, not even with a refusal.
func closed(name string, h *testbed.Host, address string) probe {
	return probe{name, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, quiet)
		defer cancel()
		c, err := h.Dial(ctx, "tcp", address)
		if err == nil {
			_ = c.Close() // nothing is asked of it
		}
		if err == nil {
			return fmt.Errorf("%s answers", address)
		}
		if timeout := net.Error(nil); !errors.As(err, &timeout) || !timeout.Timeout() {
			return fmt.Errorf("%s answers: %w", address, err)
		}
		return nil
	}}
}

// forgotten is a probe of captured connections whose entries conntrack has lost, and whose server speaks first then.
func (l *lab) forgotten() probe {
	return probe{"captured, forgotten by conntrack", func(ctx context.Context) error {
		var clients []net.Conn
		for _, f := range l.families() {
			for _, c := range []struct {
				from    *testbed.Host
				address string
			}{{l.pod.Host, at(f.world, heldPort)}, {l.n.World, at(f.pod, heldInbound)}} {
				c, err := c.from.Dial(ctx, "tcp", c.address)
				if err != nil {
					return err
				}
				defer c.Close() //nolint:errcheck // all has been read
				clients = append(clients, c)
			}
		}
		var servers []heldConn
		for _, held := range l.held {
			select {
			case h := <-held:
				defer close(h.release)
				servers = append(servers, h)
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		l.forget()
		for _, s := range servers { // the segment is dropped, and sent again
			if _, err := io.WriteString(s, "echo"); err != nil {
				return err
			}
		}
		failures := make(chan error)
		for _, c := range clients {
			go func() { failures <- echo(ctx, c) }()
		}
		var errs []error
		for range clients {
			errs = append(errs, <-failures)
		}
		return errors.Join(errs...)
	}}
}

// direct is a probe of a connection that sluiced lets go direct.
func (l *lab) direct(f family) probe {
	return probe{"direct " + f.name, func(ctx context.Context) error {
		source := netip.AddrPortFrom(netip.MustParseAddr(f.pod), uint16(21000+l.number%8000)) // not in TIME_WAIT
		flow := conntrack.Flow{
			Source: source, Destination: netip.MustParseAddrPort(at(f.world, webPort)),
		}
		l.tap.mu.Lock()
		l.tap.model.letOut[connection{inside: flow.Source, outside: flow.Destination}] = true
		l.tap.mu.Unlock()
		if err := l.pod.Do(flow.Exempt); err != nil {
			return err
		}
		got, err := dialWith(ctx, l.pod.Host, at(f.world, webPort), func(fd int) error {
			_, from := sockaddr(f.pod, int(flow.Source.Port()))
			return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, from))
		})
		if err == nil && got != f.pod {
			err = fmt.Errorf("got %q", got)
		}
		return err
	}}
}

// between are probes of traffic between two nested containers. The first contact makes the second one's bridge known.
func (l *lab) between() probe {
	return probe{"between nested containers", func(ctx context.Context) error {
		for _, c := range []struct {
			from        *testbed.Host
			network, to string
		}{
			{l.second, "tcp", at("172.31.0.1", podPort)}, {l.second, "tcp", at("fd00:31::1", podPort)},
			{l.nested, "tcp", at("172.31.0.2", podPort)}, {l.nested, "tcp", at("fd00:31::2", podPort)},
			{l.nested, "udp", at("172.31.0.2", 443)}, {l.nested, "udp", at("fd00:31::2", 443)},
		} {
			if err := echoes("", c.from, c.network, c.to).try(ctx); err != nil {
				return fmt.Errorf("%s: %w", c.to, err)
			}
		}
		return nil
	}}
}

// goesOn is a probe of connections to excluded destinations that the next rules capture. It replaces the rules.
func (l *lab) goesOn() probe {
	return probe{"goes on when the rules change", func(ctx context.Context) error {
		var open []net.Conn
		for _, f := range l.families() {
			c, err := l.pod.Dial(ctx, "tcp", at(f.excluded, echoPort))
			if err != nil {
				return err
			}
			defer c.Close() //nolint:errcheck // all has been read
			open = append(open, c)
		}
		next := l.rules
		next.ExcludeCIDRs = nil
		if _, err := l.apply(ctx, next); err != nil {
			return err
		}
		for _, c := range open {
			if err := echo(ctx, c); err != nil {
				return err
			}
		}
		return nil
	}}
}

// waits are the probes of connections that wait because nothing listens at the gate.
func (l *lab) waits() []probe {
	var all []probe
	for _, f := range l.families() {
		all = append(all, closed("waits without a listener "+f.name, l.pod.Host, at(f.world, webPort)))
	}
	return all
}

// excused are changes that only CHECK notices, and the reasons.
var excused = []struct{ pattern, reason string }{
	{`refuse SLUICE_FORWARD .*without "from outside, to the pod"`,
		"it concerns packets from outside to a container that is routed, not published"},
	{`nat .*PREROUTING .*without .*("from outside, to the pod"|-i eth0 -j RETURN)`,
		"it concerns packets from outside to a container that is routed, not published"},
	{`mangle .*("not redirected.*" after "redirected|DROP" after .*15006 .*RETURN)`,
		"the rules are about different ports"},
	{`wall SLUICE_CAPTURE .*without "QUIC: rejected`,
		"the table sluice-refuse has rejected it before"},
	{`wall SLUICE_CAPTURE .*"no TCP" after "it may not show`,
		"the rules are about different protocols"},
	{`wall SLUICE_GATE 02.*without "the conntrack entry`,
		"conntrack takes the segment for invalid only if nf_conntrack_tcp_loose is 0"},
	{`wall (OUTPUT|POSTROUTING|PREROUTING) .*"from (the pod to itself|outside)"`,
		"it saves the time of the rules after it"},
	{`wall POSTROUTING .*"a mark that the sender`,
		"it matters for a VLAN interface in the pod's netns, which the kernel of these tests does not have"},
	{`wall (OUTPUT|PREROUTING) .*"(a mark that the sender .*|nested containers are behind bridges)" after`,
		"the rules do not depend on each other"},
	{`wall PREROUTING .*without "nested containers are behind bridges"`,
		"the bridge becomes known by packets of the other direction too"},
	{`wall PREROUTING .*without "a mark that the sender`,
		"no mark outlives the veth of a nested container"},
	{`wall SLUICE_STOP .*without "sent by a nested container"`,
		"the next rule stops it, and counts it as sent by the pod"},
	{`SLUICE_EGRESS .*" after`,
		"a frame that both rules match is accepted by either, or is never routed"},
	{`SLUICE_EGRESS .*without "the stack's rules have not`,
		"the next rule stops it, and counts it as sent by a packet socket"},
	{`SLUICE_EGRESS .*"DHCP`,
		"with the default settings all UDP may leave"},
}

// unnoticed says why no traffic notices a change.
func unnoticed(mutant string) string {
	for _, e := range excused {
		if regexp.MustCompile(e.pattern).MatchString(mutant) {
			return e.reason
		}
	}
	return ""
}
