package capture

import (
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// TestRulesAreRestored: the daemon restores rules that a process in the pod removes, of each kind and again and again.
func TestRulesAreRestored(t *testing.T) {
	forWalls(t, "connect", func(t *testing.T, w *walled) {
		testbed.ServeEcho(w.node)
		w.pod.IP("link", "add", "docker0", "type", "bridge") // the wall has a set of them
		testbed.EchoAll(t, 2, 100, w.pod.Host)
		undo := []string{
			"nft delete table netdev sluice-wall",
			"nft delete table inet sluice-wall",
			"ip link set eth0 address 02:00:00:00:12:34",
		}
		switch tool := w.installed(t).Backend; tool {
		case "nftables":
			undo = append(undo, "nft delete table ip sluice-nat")
		default:
			undo = append(undo, tool+" -t nat -F SLUICE_OUTPUT", tool+" -t nat -I OUTPUT -j ACCEPT")
		}
		for _, command := range append(undo, everything) {
			if command == everything { // then segments of the connections before may leave
				w.wantNothingOut(t)
			}
			words := strings.Fields(command)
			w.pod.Exec(words[0], words[1:]...)
			testbed.Eventually(t, "the rules are restored after "+command, func() bool { return w.isInLine(t) })
			testbed.EchoAll(t, 2, 100, w.pod.Host)
		}
	})
}

const everything = "nft flush ruleset"

// isInLine reports whether the rules of the pod are as its record says, and as its interfaces need them.
func (w *walled) isInLine(t *testing.T) bool {
	t.Helper()
	drift, err := w.installed(t).Check(t.Context(), w.pod.Path())
	return err == nil && len(drift) == 0
}

// installed is the ruleset of the pod by its record.
func (w *walled) installed(t *testing.T) *ruleset.Installed {
	t.Helper()
	for _, r := range w.node.Records() {
		if r.ContainerID == w.pod.ID && r.Installed != nil {
			return r.Installed
		}
	}
	t.Fatal("the pod has no record with rules")
	return nil
}

// TestNewAddress: an address that the pod gets later is captured too.
func TestNewAddress(t *testing.T) {
	forWalls(t, "connect", func(t *testing.T, w *walled) {
		testbed.ServeEcho(w.node)
		w.pod.IP("addr", "del", w.pod.IPv4+"/16", "dev", "eth0")
		w.pod.IP("addr", "add", "10.88.77.77/16", "dev", "eth0")
		w.pod.IP("route", "add", "default", "via", "10.88.0.1")
		testbed.Eventually(t, "the rules are in line with the address", func() bool { return w.isInLine(t) })
		testbed.EchoAll(t, 2, 100, w.pod.Host)
		w.wantNothingOut(t)
	})
}

// TestStoppedPacketsAreCounted, by their senders, in the status.
func TestStoppedPacketsAreCounted(t *testing.T) {
	forWalls(t, "connect", func(t *testing.T, w *walled) {
		for _, to := range capturedDestinations[:1] {
			frame := testbed.Segment{From: to, To: to, Flags: 2}.Frame()
			testbed.SendFrames(w.pod.Host, "eth0", testbed.FrameOptions{}, frame, frame, frame)
		}
		testbed.Eventually(t, "the status has a full wall that has stopped 3 packets", func() bool {
			a := w.daemon.Status().Attachments
			return len(a) == 1 && a[0].Wall == "full" && len(a[0].Stopped) == 1 && a[0].Stopped["packet"] == 3
		})
	})
}
