package escape

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"testing"

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
	outer     way    // from outside, to the pod
	number    uint64 // of the last marker
}

// newLab makes a lab in which rules are installed.
func newLab(t *testing.T, f testbed.Flavour, rules ruleset.Ruleset, s settings) *lab {
	t.Helper()
	l := &lab{scene: newScene(t, f), rules: rules, ways: map[string]way{}}
	l.current = s
	pod := l.n.NewPod("lab").InNamespace("kube-system") // not captured by the plugin
	if err := pod.Add(); err != nil {
		t.Fatalf("ADD: %s", testbed.Describe(err))
	}
	t.Cleanup(func() { _ = pod.Del() })
	f.Prepare(pod)
	l.furnish(pod)
	for _, port := range []int{15001, 15006} {
		pod.Serve(":"+strconv.Itoa(port), func(c net.Conn) { fmt.Fprintf(c, "gate %d", port) })
	}
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

// install installs rules in place of those that are there, whatever is left of them.
func (l *lab) install(rules ruleset.Ruleset) {
	l.t.Helper()
	in, err := ruleset.Apply(context.Background(), l.pod.Path(), rules, l.flavour.Backend, l.installed)
	if err != nil {
		l.t.Fatalf("installing rules: %v", err)
	}
	if in.Backend != l.flavour.Name || in.Wall != ruleset.WallFull {
		l.t.Fatalf("installed with %s and wall %q, want %s and a full wall", in.Backend, in.Wall, l.flavour.Name)
	}
	l.installed = &in
}

// escapes returns the frames that left the pod since the last call and must not have left.
func (l *lab) escapes() []string {
	l.t.Helper()
	l.number++
	l.tap.settle(l.t, l.ways["packet"], l.macs, l.number)
	return l.tap.breaches()
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
