package watch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newWatcher(t *testing.T) *Watcher {
	t.Helper()
	w := New()
	t.Cleanup(w.Close) // hangs if a reader does not end
	return w
}

func syncTo(t *testing.T, w *Watcher, paths map[attach.NetnsID]string) {
	t.Helper()
	if err := w.Sync(paths); err != nil {
		t.Error(err)
	}
}

// watch makes w watch the netns of hosts, and takes the changes that they are as new ones.
func watch(t *testing.T, w *Watcher, hosts ...*testbed.Host) []attach.NetnsID {
	t.Helper()
	paths := map[attach.NetnsID]string{}
	var all []attach.NetnsID
	for _, h := range hosts {
		id, err := attach.IdentifyNetns(h.Path())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, id)
		paths[id] = h.Path()
	}
	syncTo(t, w, paths)
	<-w.Changed()
	got := w.Take(start)
	slices.SortFunc(got, compare)
	if want := slices.SortedFunc(slices.Values(all), compare); !slices.Equal(got, want) {
		t.Fatalf("new netns: Take returns %v, want %v", got, want)
	}
	return all
}

func TestChangesAreNoted(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*testbed.Host){
		"rule of nftables": func(h *testbed.Host) {
			h.Exec("nft", "add table ip other; add chain ip other c; add rule ip other c drop")
		},
		"rule of iptables-nft":  func(h *testbed.Host) { h.Exec("iptables-nft", "-A", "OUTPUT", "-j", "DROP") },
		"rule of ip6tables-nft": func(h *testbed.Host) { h.Exec("ip6tables-nft", "-A", "OUTPUT", "-j", "DROP") },
		"address":               func(h *testbed.Host) { h.IP("addr", "add", "192.0.2.1/32", "dev", "lo") },
		"IPv6 address":          func(h *testbed.Host) { h.IP("addr", "add", "2001:db8::1/128", "dev", "lo", "nodad") },
		"interface":             func(h *testbed.Host) { h.IP("link", "add", "docker0", "type", "bridge") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWatcher(t)
			changed, same := testbed.NewHost(t, "changed"), testbed.NewHost(t, "same")
			want := watch(t, w, changed, same)[:1]
			change(changed)
			select {
			case <-w.Changed():
			case <-time.After(time.Minute):
				t.Fatal("nothing was noted")
			}
			if got := w.Take(start.Add(time.Hour)); !slices.Equal(got, want) {
				t.Errorf("Take returns %v, want the netns that has changed, %v", got, want)
			}
		})
	}
}

func TestTakeRestsAfterEachReturn(t *testing.T) {
	t.Parallel()
	w := newWatcher(t)
	id := watch(t, w, testbed.NewHost(t, "pod"))[0]
	take := func(at time.Duration, want ...attach.NetnsID) {
		t.Helper()
		if got := w.Take(start.Add(at)); !slices.Equal(got, want) {
			t.Errorf("Take after %s returns %v, want %v", at, got, want)
		}
	}
	take(time.Hour) // nothing has changed
	w.Again(id)
	take(rest - 1)
	take(rest, id)
	take(2 * rest) // once for each change
	w.Again(id)
	take(rest + 1)       // its rest begins when it was returned
	take(-time.Hour, id) // the clock was set back
	w.Again(attach.NetnsID{})
	take(time.Hour) // not watched
}

func TestNextGoesAround(t *testing.T) {
	t.Parallel()
	w := newWatcher(t)
	var r Round
	if got := w.Next(&r, 1); len(got) > 0 {
		t.Errorf("no netns: got %v", got)
	}
	hosts := []*testbed.Host{testbed.NewHost(t, "a"), testbed.NewHost(t, "b"), testbed.NewHost(t, "c")}
	all := slices.SortedFunc(slices.Values(watch(t, w, hosts...)), compare)
	var got []attach.NetnsID
	for range 2 * len(all) {
		got = append(got, w.Next(&r, 1)...)
	}
	if want := slices.Concat(all, all); !slices.Equal(got, want) {
		t.Errorf("one by one: got %v, want %v", got, want)
	}
	for _, want := range [][]attach.NetnsID{{all[0], all[1]}, {all[2], all[0]}, {all[1], all[2]}} {
		if got := w.Next(&r, 2); !slices.Equal(got, want) {
			t.Errorf("two at a time: got %v, want %v", got, want)
		}
	}
	if got := w.Next(&r, 10); !slices.Equal(got, all) {
		t.Errorf("ten of three: got %v, want each once, %v", got, all)
	}
	w.Next(&r, 1)
	syncTo(t, w, map[attach.NetnsID]string{all[2]: ""}) // the netns at which the round is goes
	if got := w.Next(&r, 1); !slices.Equal(got, all[2:]) {
		t.Errorf("got %v, want the one that is left, %v", got, all[2:])
	}
}

// pod is a netns with a link and a wall.
type pod struct {
	*testbed.Host
	t         *testing.T
	id        attach.NetnsID
	installed ruleset.Installed
}

func newPod(t *testing.T, w *Watcher) *pod {
	t.Helper()
	p := &pod{Host: testbed.NewHost(t, "pod"), t: t}
	p.IP("link", "add", "eth0", "up", "type", "veth", "peer", "name", "other")
	p.IP("addr", "add", "192.0.2.1/24", "dev", "eth0")
	p.install(nil)
	p.id = watch(t, w, p.Host)[0]
	return p
}

func (p *pod) install(previous *ruleset.Installed) {
	p.t.Helper()
	r := ruleset.Ruleset{Interfaces: []string{"eth0"}, RejectQUIC: true}
	var err error
	p.installed, err = ruleset.Apply(context.Background(), p.Path(), r, ruleset.BackendNFTables, previous)
	if err != nil {
		p.t.Fatal(err)
	}
}

// sendQUIC sends packets that are rejected.
func (p *pod) sendQUIC(count int) {
	p.t.Helper()
	err := p.Do(func() error {
		c, err := net.ListenPacket("udp4", "192.0.2.1:0") // not connected: it gets no error of another packet
		if err != nil {
			return err
		}
		defer c.Close() //nolint:errcheck // nothing is read
		for range count {
			_, err = c.WriteTo([]byte("initial"), &net.UDPAddr{IP: net.IPv4(192, 0, 2, 7), Port: ruleset.QUICPort})
			if !errors.Is(err, unix.EPERM) {
				return fmt.Errorf("a packet of QUIC was not rejected: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

// wantCount counts, and compares all counters with those that are not 0.
func wantCount(t *testing.T, w *Watcher, p *pod, first []ruleset.Cause, want map[ruleset.Cause]uint64) {
	t.Helper()
	got, err := w.Count(p.id)
	if err != nil || !slices.Equal(got, first) {
		t.Errorf("Count: got %v, %v; want the first packets of %v", got, err, first)
	}
	zero := func(_ ruleset.Cause, n uint64) bool { return n == 0 }
	for name, counts := range map[string]map[ruleset.Cause]uint64{"Stopped": w.Stopped(p.id), "Total": w.Total()} {
		maps.DeleteFunc(counts, zero)
		if !maps.Equal(counts, want) {
			t.Errorf("%s: got %v, want %v", name, counts, want)
		}
	}
}

func TestCountSumsUp(t *testing.T) {
	t.Parallel()
	w := newWatcher(t)
	p := newPod(t, w)
	wantCount(t, w, p, nil, map[ruleset.Cause]uint64{})
	p.sendQUIC(3)
	quic := []ruleset.Cause{ruleset.CauseQUIC}
	wantCount(t, w, p, quic, map[ruleset.Cause]uint64{ruleset.CauseQUIC: 3})
	wantCount(t, w, p, nil, map[ruleset.Cause]uint64{ruleset.CauseQUIC: 3})
	p.sendQUIC(2)
	wantCount(t, w, p, nil, map[ruleset.Cause]uint64{ruleset.CauseQUIC: 5})

	// The wall is deleted and installed anew, so its counters begin anew.
	p.Exec("nft", "delete table inet sluice-refuse")
	wantCount(t, w, p, nil, map[ruleset.Cause]uint64{ruleset.CauseQUIC: 5})
	p.install(&p.installed)
	p.sendQUIC(4)
	wantCount(t, w, p, nil, map[ruleset.Cause]uint64{ruleset.CauseQUIC: 9})

	syncTo(t, w, nil)
	if got := w.Stopped(p.id); got != nil {
		t.Errorf("not watched any more: Stopped returns %v", got)
	}
	if got := w.Total()[ruleset.CauseQUIC]; got != 9 {
		t.Errorf("not watched any more: the total is %d, want 9 as before", got)
	}
	if first, err := w.Count(p.id); first != nil || err != nil {
		t.Errorf("not watched any more: Count returns %v, %v", first, err)
	}
}

func TestSyncLetsNetnsGo(t *testing.T) {
	t.Parallel()
	w := newWatcher(t)
	node, gone, kept := testbed.NewHost(t, "node"), testbed.NewHost(t, "gone"), testbed.NewHost(t, "kept")
	node.IP("link", "add", "peer", "type", "veth", "peer", "name", "eth0", "netns", gone.Name)
	ids := watch(t, w, gone, kept)
	gone.Delete()
	syncTo(t, w, map[attach.NetnsID]string{ids[1]: kept.Path()})
	testbed.Eventually(t, "the netns ends, and its link with it", func() bool {
		_, err := node.TryExec("ip", "link", "show", "peer")
		var failed *exec.ExitError // TryExec also fails if the program cannot be started
		return errors.As(err, &failed)
	})
	if got := w.Next(&Round{}, 10); !slices.Equal(got, ids[1:]) {
		t.Errorf("still watched: %v, want %v", got, ids[1:])
	}
}

func TestSyncLeavesOutWhatIsGone(t *testing.T) {
	t.Parallel()
	w := newWatcher(t)
	h := testbed.NewHost(t, "pod")
	id, err := attach.IdentifyNetns(h.Path())
	if err != nil {
		t.Fatal(err)
	}
	syncTo(t, w, map[attach.NetnsID]string{id: "/run/netns/does-not-exist"})
	if got := w.Take(start); len(got) > 0 {
		t.Errorf("a netns that is gone: Take returns %v", got)
	}
	watch(t, w, h)
}
