package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// podWith is a netns with an address.
func podWith(t *testing.T, name, ip string) *testbed.Host {
	t.Helper()
	h := testbed.NewHost(t, name)
	h.IP("link", "add", "eth0", "type", "veth", "peer", "name", "nowhere")
	h.IP("addr", "add", ip+"/32", "dev", "eth0")
	return h
}

// runningPod is a pod that opted in and has an address.
func runningPod(name, ip string) optin.Running {
	return optin.Running{
		Pod: attach.Pod{Namespace: "ci", Name: name, UID: "uid-" + name}, IPs: []netip.Addr{netip.MustParseAddr(ip)},
		Facts: optin.Facts{Labels: map[string]string{optin.Label: "true"}},
	}
}

// TestPodWithTheAddressOfAnother: a process with NET_ADMIN has given its pod the address of another pod, which is not
// mistaken for it.
func TestPodWithTheAddressOfAnother(t *testing.T) {
	t.Parallel()
	const victimIP, thiefIP = "203.0.113.21", "203.0.113.22" // no other test has pods with these addresses
	victim, thief := podWith(t, "victim", victimIP), podWith(t, "thief", thiefIP)
	thief.IP("addr", "add", victimIP+"/32", "dev", "eth0")
	for name, tc := range map[string]struct {
		hide bool // the victim's netns
		also []optin.Running
	}{
		"two netns have the address":         {},
		"one netns has those of two pods":    {hide: true, also: []optin.Running{runningPod("thief", thiefIP)}},
		"two netns, and both pods opted in ": {also: []optin.Running{runningPod("thief", thiefIP)}},
	} {
		o := newOrchestrator()
		a := newAgentFor(t, o)
		if tc.hide {
			at := attachment(victim, "eth0")
			if _, err := a.Attach(t.Context(), at); err != nil { // as another pod, whose ADD named it
				t.Fatal(err)
			}
		}
		o.set(capture, append(tc.also, runningPod("victim", victimIP))...)
		a.Reconsider(t.Context())
		reasons := a.Uncaptured()
		i := slices.IndexFunc(reasons, func(p attach.UncapturedPod) bool { return p.Pod == "ci/victim" })
		if i < 0 || reasons[i].Reason != whyAmbiguous || a.Enrolled() != 0 || thief.Traces() != "" {
			t.Errorf("%s: got %+v, %d enrolled, traces %q; want none, since it is ambiguous",
				name, reasons, a.Enrolled(), thief.Traces())
		}
	}
}

// TestNetnsOfAnAttachedPodIsNoOther: the ADD of a pod has named it, whatever its addresses are by now.
func TestNetnsOfAnAttachedPodIsNoOther(t *testing.T) {
	t.Parallel()
	const ip = "203.0.113.23" // no other test has a pod with this address
	victim, thief := podWith(t, "victim", ip), podWith(t, "thief", ip)
	o := newOrchestrator()
	a := newAgentFor(t, o)
	if _, err := a.Attach(t.Context(), attachment(thief, "eth0")); err != nil {
		t.Fatal(err)
	}
	o.set(capture, runningPod("victim", ip))
	a.Reconsider(t.Context())
	s, _ := a.statusOf(attach.ID{ContainerID: "uid-victim", IfName: "eth0"})
	if got := a.Uncaptured(); len(got) > 0 || a.Enrolled() != 1 || s.Netns != victim.Path() {
		t.Errorf("got %+v uncaptured, status %+v; want the victim captured", got, s)
	}
}

// TestPodThatIsNotFoundIsCheap: the netns of other pods are not entered again and again.
func TestPodThatIsNotFoundIsCheap(t *testing.T) {
	t.Parallel()
	var s netnsSearch
	h, empty := podWith(t, "one", "203.0.113.24"), testbed.NewHost(t, "empty")
	missing := []optin.Running{runningPod("lost", "203.0.113.26")} // no test has a pod with this address
	begin := time.Now()
	for _, tc := range []struct{ now, looked, lookedEmpty time.Duration }{
		{0, 0, 0},
		{unreadyAgain - time.Second, 0, 0},
		{unreadyAgain, 0, unreadyAgain},
		{searchAgain - time.Second, 0, searchAgain - time.Second},
		{searchAgain, searchAgain, searchAgain - time.Second},
	} {
		// An error may be about the netns of another test, which has gone meanwhile.
		if found, ambiguous, _ := s.find(missing, missing, nil, begin.Add(tc.now)); len(found)+len(ambiguous) > 0 {
			t.Errorf("got %+v found, and %+v ambiguous; want nothing", found, ambiguous)
		}
		got, gotEmpty := s.known[h.Name].at.Sub(begin), s.known[empty.Name].at.Sub(begin)
		if got != tc.looked || gotEmpty != tc.lookedEmpty {
			t.Errorf("after %s: the netns was last entered after %s, and one without addresses after %s; "+
				"want %s and %s", tc.now, got, gotEmpty, tc.looked, tc.lookedEmpty)
		}
	}
}

// TestEventsAreForgotten of pods that were never attached, which do not say when they go.
func TestEventsAreForgotten(t *testing.T) {
	t.Parallel()
	o := newOrchestrator()
	e := newAgentFor(t, o).events
	pod := func(i int) attach.Pod { return attach.Pod{Namespace: "ci", Name: fmt.Sprintf("host-%d", i)} }
	for range 2 {
		for i := range 100 {
			e.report(pod(i), true, reasonNotCaptured, whyHostNetwork)
		}
	}
	if len(o.events) != 100 || len(e.last) != 100 {
		t.Errorf("got %d events, %d remembered; want each pod once", len(o.events), len(e.last))
	}
	for name, last := range e.last {
		last.at = last.at.Add(-toldFor)
		e.last[name] = last
	}
	e.swept = e.swept.Add(-toldFor)
	e.report(pod(1), true, reasonNotCaptured, whyHostNetwork)
	if len(o.events) != 100 || len(e.last) != 1 {
		t.Errorf("got %d events, %d remembered; want the pod that is still there", len(o.events), len(e.last))
	}
}
