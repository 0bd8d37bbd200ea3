package capture

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestHoldExpires: a pod with unknown labels waits, and then passes although no process of sluice runs on the node.
// The connections that wait go on, those of nested containers too. The daemon that comes at last captures the pod, and
// says that it was not captured before.
func TestHoldExpires(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.World.ServeCaller(":80")
			n.World.ServeCallerUDP(":443")
			testbed.ServeEcho(n)
			nothingOptedIn(t, n)
			n.Plugin["provisionalFor"] = "12s"
			pod := f.AddPod(t, n, "early", nil)
			nested := pod.Nested()
			tap := pod.Tap()
			var journeys []journey
			for _, address := range webAddresses {
				journeys = append(journeys, setOut(t, pod.Host, address), setOut(t, nested, address))
			}
			waitForSYNs(t, pod.Host, 2)
			waitForSYNs(t, nested, 2)
			sendSYN(pod, "early")
			tap.Sync(pod)
			if out := tap.Frames(contains("early")); len(out) > 0 || n.SYNs() > 0 {
				t.Errorf("%d frames and %d SYNs left the pod before the capture expired", len(out), n.SYNs())
			}

			for _, j := range journeys {
				j.wantFrom(t, caller(pod, j.to, straight))
			}
			if got, err := pod.CallerUDP(testbed.Context(t), testbed.WorldIPv4+":443"); err != nil || got != pod.IPv4 {
				t.Errorf("QUIC: got %q, %v; want it from %s", got, err, pod.IPv4)
			}
			sendSYN(pod, "late")
			tap.Sync(pod)
			if out := tap.Frames(contains("late")); len(out) != 1 {
				t.Errorf("%d frames of a packet socket left the pod after the capture expired, want one", len(out))
			}
			older := testbed.MustOpen(t, pod.Host, testbed.EchoAddresses[0])
			testbed.WantEcho(t, older, "before")

			testbed.StartRecordingProxy(n, testbed.ProxyAddress)
			d := n.StartDaemon()
			testbed.Eventually(t, "the pod is captured", func() bool { return d.Of(pod).State == attach.Captured })
			for _, address := range webAddresses {
				wantWay(t, pod, address, captured)
			}
			testbed.WantEcho(t, older, "later") // around the proxy, as any connection that is older than the capture
			if notes := strings.Join(d.Of(pod).Notes, "\n"); !strings.Contains(notes, "captured late") {
				t.Errorf("the status has the notes %q; want that packets left before", notes)
			}
			if !strings.Contains(d.Log(), "a pod that opted in was not captured at first") {
				t.Error("the daemon's log does not say that packets left before")
			}
			testbed.WantServed(t, testbed.Echoes(t, 2, 100, nested), 2)
		})
	}
}

// TestDecisionEndsAHold: the daemon decides before the hold expires. One pod is released, and another one is captured.
func TestDecisionEndsAHold(t *testing.T) {
	t.Parallel()
	for _, f := range testbed.Flavours {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			n.World.ServeCaller(":80")
			nothingOptedIn(t, n)
			n.Plugin["provisionalFor"] = "1h"
			pod := f.AddPod(t, n, "plain", nil)
			var journeys []journey
			for _, address := range webAddresses {
				journeys = append(journeys, setOut(t, pod.Host, address))
			}
			waitForSYNs(t, pod.Host, len(journeys))
			leaveAlone(t, n)
			for _, j := range journeys {
				j.wantFrom(t, caller(pod, j.to, straight))
			}
			if left := pod.Traces(); left != "" {
				t.Errorf("left in the netns:\n%s", left)
			}

			pod = f.AddPod(t, n, "opted", nil)
			var waiting []journey
			for _, address := range webAddresses {
				waiting = append(waiting, setOut(t, pod.Host, address))
			}
			waitForSYNs(t, pod.Host, len(waiting))
			testbed.StartRecordingProxy(n, testbed.ProxyAddress)
			d := n.StartDaemon()
			for _, j := range waiting {
				j.wantFrom(t, caller(pod, j.to, captured))
			}
			if notes := d.Of(pod).Notes; len(notes) > 0 {
				t.Errorf("the status has the notes %q, want none", notes)
			}
			if err := pod.Check(); err != nil {
				t.Errorf("CHECK: %v", err)
			}
		})
	}
}

// nothingOptedIn writes the list that a daemon leaves on a node on which no namespace has opted in.
func nothingOptedIn(t *testing.T, n *testbed.Node) {
	t.Helper()
	err := attach.NewOptedInFile(n.DataDir()).Write(attach.OptedIn{AsOf: time.Now(), Namespaces: []string{}})
	if err != nil {
		t.Fatal(err)
	}
}

// sendSYN sends a SYN with a text through a packet socket of a pod.
func sendSYN(pod *testbed.Pod, text string) {
	const syn = 2
	from := netip.AddrPortFrom(netip.MustParseAddr(pod.IPv4), 4321)
	frame := testbed.Segment{From: from, To: capturedDestinations[0], Flags: syn, Payload: []byte(text)}.Frame()
	testbed.SendFrames(pod.Host, "eth0", testbed.FrameOptions{}, frame)
}
