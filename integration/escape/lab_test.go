package escape

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/conntrack"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// lab is a scene without a daemon: the test itself installs the rules and listens at the gate, so nothing restores a
// rule that the test takes away.
type lab struct {
	*scene
	rules     ruleset.Ruleset
	installed *ruleset.Installed
	ways      map[string]way
	gates     []net.Listener
	held      map[heldBy]chan heldConn // captured connections that the test serves
	second    *testbed.Host            // a nested container behind another bridge
	macvlan   *testbed.Host            // a nested container with a macvlan interface over eth0
	outer     way                      // from outside, to the pod
	number    uint64                   // of the last marker
	patience  time.Duration            // with traffic that must come
}

// newLab makes a lab in which rules are installed.
func newLab(t *testing.T, f testbed.Flavour, rules ruleset.Ruleset, s settings) *lab {
	t.Helper()
	l := &lab{scene: newScene(t, f), rules: rules, ways: map[string]way{},
		held: map[heldBy]chan heldConn{}, patience: leastPatience}
	for _, v6 := range []bool{false, true} {
		for _, gate := range []int{15001, 15006} {
			l.held[heldBy{v6, gate}] = make(chan heldConn)
		}
	}
	l.current = s
	pod := l.n.NewPod("lab").InNamespace("kube-system") // not captured by the plugin
	if err := pod.Add(); err != nil {
		t.Fatalf("ADD: %s", testbed.Describe(err))
	}
	t.Cleanup(func() { _ = pod.Del() })
	f.Prepare(pod)
	l.furnish(pod)
	l.addSecondNested()
	l.addMacvlan()
	for _, h := range []*testbed.Host{pod.Host, l.nested} {
		for _, f := range l.families() {
			serveUDP(t, h, at(map[*testbed.Host]string{pod.Host: f.pod, l.nested: f.nested}[h], 443))
		}
	}
	l.openGates()
	for _, ip := range []string{excludedIPv4, excludedIPv6} {
		serveUDP(t, l.n.World, at(ip, 443))
	}
	l.n.World.Serve(":"+strconv.Itoa(echoPort), echoConn)
	for _, w := range openWays(t, pod.Host, "", ways) {
		l.ways[w.name] = w
	}
	for _, w := range openWays(t, l.nested, "nested: ", ways) {
		l.ways[w.name] = w
	}
	l.outer = openWays(t, l.n.Host, "", []wayConfig{{name: "outside", kind: frames, device: "lo"}})[0]
	l.outer.index, _ = link(t, pod.Host, "eth0")
	l.install(rules)
	return l
}

// apply replaces all rules, even those that CHECK thinks to be there.
func (l *lab) apply(ctx context.Context, rules ruleset.Ruleset) (ruleset.Installed, error) {
	return ruleset.Apply(ctx, l.pod.Path(), rules, l.flavour.Name, nil)
}

// install installs rules in place of those that are there, whatever is left of them.
func (l *lab) install(rules ruleset.Ruleset) {
	l.t.Helper()
	in, err := l.apply(context.Background(), rules)
	if err != nil {
		l.t.Fatalf("installing rules: %v", err)
	}
	if in.Backend != l.flavour.Name || in.Wall != ruleset.WallFull {
		l.t.Fatalf("installed with %s and wall %q, want %s and a full wall", in.Backend, in.Wall, l.flavour.Name)
	}
	l.installed = &in
}

// echoPort is where the world echoes.
const echoPort = 7000

func (l *lab) openGates() {
	l.t.Helper()
	l.gates = nil
	for _, port := range []int{15001, 15006} {
		var g net.Listener
		testbed.Eventually(l.t, "the former listener's port is free", func() bool {
			return l.pod.Do(func() (err error) {
				g, err = net.Listen("tcp", ":"+strconv.Itoa(port))
				return err
			}) == nil
		})
		l.t.Cleanup(func() { _ = g.Close() }) // it may be closed already
		l.gates = append(l.gates, g)
		go l.serveGate(g, port)
	}
}

// serveGate serves the connections of a gate until it is closed.
func (l *lab) serveGate(g net.Listener, port int) {
	for {
		c, err := g.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close() //nolint:errcheck // all has been written
			l.serve(c.(*net.TCPConn), port)
		}()
	}
}

func (l *lab) closeGates() {
	for _, g := range l.gates {
		_ = g.Close() // opened again later
	}
}

// heldPort of the world and heldInbound of the pod are the ports of captured connections that the test serves.
const heldPort, heldInbound = 443, podPort + 1

// heldBy is the family of a connection, and its gate.
type heldBy struct {
	v6   bool
	gate int
}

// heldConn is a captured connection that lasts until release is closed.
type heldConn struct {
	net.Conn
	release chan struct{}
}

// serve serves a captured connection: with the name of the gate, or as the test does.
func (l *lab) serve(c *net.TCPConn, gate int) {
	to, err := conntrack.OriginalDestination(c)
	if err != nil || to.Port() != heldPort && to.Port() != heldInbound {
		fmt.Fprintf(c, "gate %d", gate)
		return
	}
	h := heldConn{c, make(chan struct{})}
	select {
	case l.held[heldBy{to.Addr().Is6(), gate}] <- h:
		<-h.release
	case <-time.After(mostPatience):
	}
}

// settle waits until the tap has seen all frames that were sent before. It returns false if they cannot leave.
func (l *lab) settle() bool {
	l.number++
	return l.tap.settle(l.ways["packet"], l.macs, l.number, l.patience)
}

// escapes returns the frames that left the pod since the last call and must not have left.
func (l *lab) escapes() []string {
	l.settle()
	return l.tap.breaches()
}

// addSecondNested adds a container behind a bridge of its own.
func (l *lab) addSecondNested() {
	l.t.Helper()
	c := testbed.NewHost(l.t, "second-nested")
	l.pod.IP("link", "add", "br1", "type", "bridge")
	l.pod.IP("addr", "add", "172.31.0.1/24", "dev", "br1")
	l.pod.IP("addr", "add", "fd00:31::1/64", "dev", "br1", "nodad")
	l.pod.IP("link", "set", "br1", "up")
	l.pod.IP("link", "add", "v1", "type", "veth", "peer", "name", "eth0", "netns", c.Name)
	l.pod.IP("link", "set", "v1", "master", "br1", "up")
	c.IP("addr", "add", "172.31.0.2/24", "dev", "eth0")
	c.IP("addr", "add", "fd00:31::2/64", "dev", "eth0", "nodad")
	c.IP("link", "set", "eth0", "up")
	c.IP("route", "add", "default", "via", "172.31.0.1")
	c.IP("-6", "route", "add", "default", "via", "fd00:31::1")
	c.Serve(":"+strconv.Itoa(podPort), echoConn)
	for _, ip := range []string{"172.31.0.2", "fd00:31::2"} {
		serveUDP(l.t, c, at(ip, 443))
	}
	l.second = c
}

// addMacvlan adds a container whose packets do not pass the stack of the pod, but come to its eth0 with a route.
func (l *lab) addMacvlan() {
	l.t.Helper()
	c := testbed.NewHost(l.t, "macvlan")
	l.pod.IP("link", "add", "link", "eth0", "name", "mv0", "type", "macvlan", "mode", "bridge")
	l.pod.IP("link", "set", "mv0", "netns", c.Name)
	c.IP("addr", "add", "10.88.77.2/16", "dev", "mv0")
	c.IP("link", "set", "mv0", "up")
	c.IP("neigh", "add", "10.88.0.1", "lladdr", net.HardwareAddr(l.macs[0]).String(), "dev", "mv0")
	c.IP("route", "add", "default", "via", "10.88.0.1")
	l.macvlan = c
}

// dialWith connects from h with options of the socket, and reads to the end.
func dialWith(ctx context.Context, h *testbed.Host, address string, options func(fd int) error) (string, error) {
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = options(int(fd)) }), err)
	}}
	var c net.Conn
	err := h.Do(func() (err error) {
		c, err = d.DialContext(ctx, "tcp", address)
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close() //nolint:errcheck // read to its end
	return testbed.ReadAll(ctx, c)
}
