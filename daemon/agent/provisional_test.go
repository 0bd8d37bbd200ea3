package agent

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// testPod is a pod with a link to the world, where servers answer with the client's address.
type testPod struct {
	*testbed.Host
	world  *testbed.Host
	served atomic.Int32 // connections that reached a server
}

const server = "198.51.100.10"

func newTestPod(t *testing.T) *testPod {
	t.Helper()
	world := testbed.NewHost(t, "world")
	p := &testPod{Host: testbed.NewHost(t, "pod"), world: world}
	p.IP("link", "add", "eth0", "index", "1000", "type", "veth", "peer", "name", "eth0", "netns", world.Name)
	for h, address := range map[*testbed.Host]string{p.Host: "198.51.100.2", world: server} {
		h.IP("addr", "add", address+"/24", "dev", "eth0")
		h.IP("addr", "add", strings.Replace(address, "198.51.100.", "2001:db8::", 1)+"/64", "dev", "eth0", "nodad")
		h.IP("link", "set", "eth0", "up")
	}
	for _, address := range []string{server + ":80", server + ":81", "[2001:db8::10]:80"} {
		world.Serve(address, func(c net.Conn) {
			p.served.Add(1)
			_, _ = fmt.Fprintf(c, "hello %s", c.RemoteAddr().(*net.TCPAddr).IP)
		})
	}
	return p
}

// apply installs the rules that the plugin installs while the daemon is down.
func (p *testPod) apply(t *testing.T, backend string) *ruleset.Installed {
	t.Helper()
	in, err := ruleset.Apply(t.Context(), p.Path(), ruleset.Provisional("eth0"), backend, nil)
	if err != nil {
		t.Fatal(err)
	}
	return &in
}

// ask dials address. The channel receives the server's answer, or the error.
func (p *testPod) ask(t *testing.T, address string) <-chan string {
	t.Helper()
	got := make(chan string, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		c, err := p.Dial(ctx, "tcp", address)
		if err != nil {
			got <- err.Error()
			return
		}
		defer c.Close() //nolint:errcheck // read to its end
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		b, err := io.ReadAll(c)
		if err != nil {
			got <- err.Error()
			return
		}
		got <- string(b)
	}()
	return got
}

// waitForSYNs waits until the SYNs of n connections have been redirected. The SYN gate drops them: no socket listens.
func (p *testPod) waitForSYNs(t *testing.T, n int) {
	t.Helper()
	testbed.Eventually(t, fmt.Sprintf("%d SYNs wait", n), func() bool {
		waiting := 0
		err := p.Do(func() error {
			h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
			if err != nil {
				return err
			}
			defer h.Close()
			for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
				flows, err := h.ConntrackTableList(netlink.ConntrackTable, family)
				if err != nil {
					return err
				}
				for _, f := range flows {
					if f.Reverse.SrcPort == ruleset.DefaultPorts.Outbound {
						waiting++
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return waiting == n
	})
	if got := p.served.Load(); got != 0 {
		t.Errorf("%d connections bypassed the gate, want none", got)
	}
}

// rules lists the rules of every backend.
func (p *testPod) rules() string {
	return p.Exec("nft", "list", "ruleset") + p.Exec("iptables-legacy-save") + p.Exec("ip6tables-legacy-save")
}

// forBackends runs f as a parallel subtest for every backend.
func forBackends(t *testing.T, f func(t *testing.T, backend string)) {
	t.Helper()
	t.Parallel()
	for _, backend := range []string{"iptables-nft", "iptables-legacy", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			f(t, backend)
		})
	}
}

func TestProvisionalPodIsReleased(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newTestPod(t)
		a := newAgent(t, pass)
		r := a.write(t, p.Host, attach.Provisional, p.apply(t, backend))
		ipv4, ipv6 := p.ask(t, server+":80"), p.ask(t, "[2001:db8::10]:80")
		p.waitForSYNs(t, 2)
		a.Reconcile(t.Context())
		if got, want := <-ipv4, "hello 198.51.100.2"; got != want {
			t.Errorf("IPv4: got %q, want %q", got, want)
		}
		if got, want := <-ipv6, "hello 2001:db8::2"; got != want {
			t.Errorf("IPv6: got %q, want %q", got, want)
		}
		if rules := p.rules(); strings.Contains(strings.ToLower(rules), "sluice") {
			t.Errorf("rules are left:\n%s", rules)
		}
		got, err := a.store.Read(r.ID)
		if err != nil || got.State != attach.Passed || got.Installed != nil {
			t.Errorf("record: got %+v, %v; want it passed, without rules", got, err)
		}
		if s, ok := a.statusOf(r.ID); !ok || s.State != attach.Passed || listening(t, p.Host) {
			t.Errorf("got %+v, listening %t; want the attachment passed, without a gate", s, listening(t, p.Host))
		}
	})
}

func TestProvisionalPodIsCaptured(t *testing.T) {
	forBackends(t, func(t *testing.T, backend string) {
		p := newTestPod(t)
		a := newAgent(t, func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
			d, err := capture(at, interfaces)
			d.Ruleset.ExcludePorts = []ruleset.PortRange{{First: 81, Last: 81}}
			return d, err
		})
		r := a.write(t, p.Host, attach.Provisional, p.apply(t, backend))
		p.ask(t, server+":80")
		p.ask(t, "[2001:db8::10]:80")
		excluded := p.ask(t, server+":81")
		p.waitForSYNs(t, 3)
		a.Reconcile(t.Context())
		testbed.Eventually(t, "the captured connections wait for the upstream", func() bool {
			s, ok := a.statusOf(r.ID)
			return ok && s.Waiting == 2
		})
		if got, want := <-excluded, "hello 198.51.100.2"; got != want {
			t.Errorf("to the excluded port: got %q, want %q", got, want)
		}
		if got := p.served.Load(); got != 1 {
			t.Errorf("%d connections reached the server, want only the excluded one", got)
		}
		got, err := a.store.Read(r.ID)
		if err != nil || got.State != attach.Captured || got.Installed == nil || got.Installed.Backend != backend ||
			len(got.Installed.Ruleset.ExcludePorts) != 1 {
			t.Fatalf("record: got %+v, %v; want it captured, with the new ruleset", got, err)
		}
		if drift, err := got.Installed.Check(t.Context(), p.Path()); err != nil || len(drift) > 0 {
			t.Errorf("Check: got %q, %v; want no drift", drift, err)
		}
	})
}

// TestProvisionalPodStaysSoWithoutADecision: an error is never read as "not captured".
func TestProvisionalPodStaysSoWithoutADecision(t *testing.T) {
	t.Parallel()
	p := newTestPod(t)
	var known atomic.Bool
	a := newAgent(t, func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		if !known.Load() {
			return refuse(at, interfaces)
		}
		return pass(at, interfaces)
	})
	in := p.apply(t, "auto")
	r := a.write(t, p.Host, attach.Provisional, in)
	got := p.ask(t, server+":80")
	p.waitForSYNs(t, 1)
	for range 2 {
		a.Reconcile(t.Context())
		s, ok := a.statusOf(r.ID)
		if !ok || s.State != attach.Provisional || len(s.Notes) != 1 ||
			!strings.Contains(s.Notes[0], "annotation sluice.dev/quic: bad") {
			t.Errorf("got %+v, want it provisional, with a note", s)
		}
	}
	if drift, err := in.Check(t.Context(), p.Path()); err != nil || len(drift) > 0 {
		t.Errorf("Check: got %q, %v; want no drift", drift, err)
	}
	p.waitForSYNs(t, 1)
	known.Store(true)
	a.Reconcile(t.Context())
	if g, want := <-got, "hello 198.51.100.2"; g != want {
		t.Errorf("decided: got %q, want %q", g, want)
	}
	if s, ok := a.statusOf(r.ID); !ok || s.State != attach.Passed || len(s.Notes) > 0 {
		t.Errorf("decided: got %+v, want it passed, without a note", s)
	}
}

// TestRefusedPodIsHeldWithoutALimit: the daemon knows the labels of a pod, and they are wrong. Its hold does not expire
// then; if it has expired, the pod is held again, and counts as not captured.
func TestRefusedPodIsHeldWithoutALimit(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]time.Duration{"not expired": time.Hour, "expired": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			expired := limit < time.Minute
			p, o := newTestPod(t), newOrchestrator()
			hold := ruleset.Provisional("eth0")
			hold.ExpiresAfter = limit
			in, err := ruleset.Apply(t.Context(), p.Path(), hold, "auto", nil)
			if err != nil {
				t.Fatal(err)
			}
			if expired {
				if got, want := <-p.ask(t, server+":80"), "hello 198.51.100.2"; got != want {
					t.Fatalf("the hold has expired: got %q, want %q", got, want)
				}
				p.served.Store(0)
			}
			a := newAgentFor(t, o)
			r := a.write(t, p.Host, attach.Provisional, &in)
			o.set(refuse, optin.Running{
				Pod: r.Pod, IPs: r.IPs, Facts: optin.Facts{Labels: map[string]string{optin.Label: "yes"}},
			})
			for range 2 {
				a.Reconsider(t.Context())
			}
			got := p.ask(t, server+":80")
			p.waitForSYNs(t, 1)
			stored, err := a.store.Read(r.ID)
			if err != nil || stored.State != attach.Provisional || stored.Installed.Ruleset.ExpiresAfter != 0 {
				t.Fatalf("record: got %+v, %v; want it provisional, without a limit", stored, err)
			}
			if drift, err := stored.Installed.Check(t.Context(), p.Path()); err != nil || len(drift) > 0 {
				t.Errorf("Check: got %q, %v; want no drift", drift, err)
			}
			s, _ := a.statusOf(r.ID)
			notes := strings.Join(s.Notes, "\n")
			if !strings.Contains(notes, "annotation sluice.dev/quic: bad") || strings.Contains(notes, "held until") ||
				strings.Contains(notes, "held late") != expired {
				t.Errorf("got the notes\n%s", notes)
			}
			if missing := a.Uncaptured(); len(missing) > 0 != expired {
				t.Errorf("got %v uncaptured, want the pod: %t", missing, expired)
			}
			o.set(pass)
			a.Reconsider(t.Context())
			if g, want := <-got, "hello 198.51.100.2"; g != want {
				t.Errorf("decided: got %q, want %q", g, want)
			}
			if s, ok := a.statusOf(r.ID); !ok || s.State != attach.Passed || len(s.Notes) > 0 {
				t.Errorf("decided: got %+v, want it passed, without a note", s)
			}
		})
	}
}
