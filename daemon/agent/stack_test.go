package agent

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// leaveBy sends a SYN to the server by a packet socket on a device of the pod.
func (p *testPod) leaveBy(device string) {
	from, to := netip.MustParseAddrPort("198.51.100.2:4444"), netip.MustParseAddrPort(server+":80")
	testbed.SendFrames(p.Host, device, testbed.FrameOptions{}, testbed.Segment{From: from, To: to, Flags: 2}.Frame())
}

// runGVisor stands in for a sandbox of gVisor, which takes over the addresses and sends by a packet socket.
func runGVisor(_ *testing.T, p *testPod) {
	p.IP("addr", "flush", "dev", "eth0")
	p.leaveBy("eth0")
}

// runMacvtap stands in for a VM of Kata Containers by its network model macvtap. A macvlan device sends as a macvtap
// device does.
func runMacvtap(_ *testing.T, p *testPod) {
	p.IP("link", "add", "link", "eth0", "name", "tap0_kata", "type", "macvlan", "mode", "bridge")
	p.IP("link", "set", "tap0_kata", "up")
	p.leaveBy("tap0_kata")
}

// runTCFilter stands in for a VM of Kata Containers by its default network model, tcfilter. The stack of another netns
// is that of the guest. It connects to the server.
func runTCFilter(t *testing.T, p *testPod) {
	vm := testbed.NewHost(t, "vm")
	p.IP("link", "add", "tap0_kata", "type", "veth", "peer", "name", "eth0", "netns", vm.Name)
	p.IP("link", "set", "tap0_kata", "up")
	mac := strings.TrimSpace(p.Exec("cat", "/sys/class/net/eth0/address"))
	vm.IP("link", "set", "eth0", "address", mac, "up")
	vm.IP("addr", "add", "198.51.100.2/24", "dev", "eth0")
	for from, to := range map[string]string{"eth0": "tap0_kata", "tap0_kata": "eth0"} {
		p.Exec("tc", "qdisc", "add", "dev", from, "ingress")
		p.Exec("tc", "filter", "add", "dev", from, "parent", "ffff:", "protocol", "all",
			"u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", to)
	}
	c, err := vm.Dial(t.Context(), "tcp", server+":80")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

// TestPodWithAStackOfItsOwn: the pod is said not to be captured, as soon as its runtime has made the sandbox. The rules
// stay. The wall stops all of its TCP, except with Kata's default network model: the kernel calls no hook for packets
// that tc redirects.
func TestPodWithAStackOfItsOwn(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		run    func(*testing.T, *testPod)
		sign   string // empty: the pod uses the stack of its netns
		around int32  // connections that reach the server
	}{
		"runc":             {func(*testing.T, *testPod) {}, "", 0},
		"gVisor":           {runGVisor, "no interface of its network namespace has its address 198.51.100.2", 0},
		"Kata by macvtap":  {runMacvtap, "its network namespace has the interface tap0_kata", 0},
		"Kata by tcfilter": {runTCFilter, "its network namespace has the interface tap0_kata", 1},
	} {
		p, o := newTestPod(t), newOrchestrator()
		a := newAgentFor(t, o)
		r := a.write(t, p.Host, attach.Provisional, p.apply(t, "nftables"))
		r.Pod = attach.Pod{Namespace: "ci", Name: "web-0", UID: "4c1d"}
		if err := a.store.Write(r); err != nil {
			t.Fatal(err)
		}
		o.set(capture, optin.Running{
			Pod: r.Pod, IPs: []netip.Addr{netip.MustParseAddr("198.51.100.2")}, RuntimeClass: "sandboxed",
			Facts: optin.Facts{Labels: map[string]string{optin.Label: "true"}},
		})
		wantState := func(when string, want attach.State, uncaptured int) {
			t.Helper()
			a.Reconsider(t.Context())
			if s, _ := a.statusOf(r.ID); s.State != want || len(a.Uncaptured()) != uncaptured {
				t.Errorf("%s, %s: got %+v, and uncaptured %+v; want it %s", name, when, s, a.Uncaptured(), want)
			}
		}
		wantState("before its sandbox", attach.Captured, 0)
		a.watched() // or its wall is not counted
		tc.run(t, p)
		a.Count()
		if tc.sign == "" {
			wantState("in its sandbox", attach.Captured, 0)
			continue
		}
		wantState("in its sandbox", attach.Passed, 1)
		if got := a.Uncaptured()[0].Reason; !strings.Contains(got, tc.sign) || !strings.Contains(got, "sandboxed") {
			t.Errorf("%s: got the reason %q, want the RuntimeClass and %q", name, got, tc.sign)
		}
		event := "ci/web-0 true SluiceNotCaptured: " + a.Uncaptured()[0].Reason
		if got := o.events[len(o.events)-1]; got != event {
			t.Errorf("%s: the last event is %q, want %q", name, got, event)
		}
		if tc.around > 0 { // the server accepts after the handshake
			testbed.Eventually(t, name+": the server accepts", func() bool { return p.served.Load() > 0 })
		}
		if got := p.served.Load(); got != tc.around {
			t.Errorf("%s: %d connections went around the proxy, want %d", name, got, tc.around)
		}
		if got := a.Stopped()[ruleset.CausePacket]; tc.around == 0 && got != 1 {
			t.Errorf("%s: the wall has stopped %d packets, want 1", name, got)
		}
		if in, err := a.store.Read(r.ID); err != nil || in.State != attach.Captured || in.Installed == nil {
			t.Errorf("%s: recorded %+v, %v; want the rules still installed", name, in, err)
		}
	}
}
