package ruleset_test

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// expiring returns the ruleset of a pod with unknown labels that is held for d.
func expiring(d time.Duration) ruleset.Ruleset {
	r := ruleset.Provisional("eth0")
	r.ExpiresAfter = d
	return r
}

// alive reports whether the kernel still holds the rules of h for valid.
func alive(h *testbed.Host) bool {
	return strings.Contains(h.Exec("nft", "list", "set", "inet", "sluice-wall", "lasting"), "expires")
}

// TestExpiry: the kernel ends a hold by itself. The rules stay as they were installed, and nothing is left by Remove.
func TestExpiry(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		in := apply(t, h, expiring(2*time.Second), backend, nil)
		if in.Expires.IsZero() || !alive(h) {
			t.Errorf("installed: %s, valid %t; want it valid until some time", testbed.JSON(in), alive(h))
		}
		testbed.Eventually(t, "the rules expire", func() bool { return !alive(h) })
		checkNoDrift(t, h, in)
		// Rules that are restored, or installed again by another ADD, do not hold for longer.
		h.Exec("nft", "flush", "chain", "inet", "sluice-wall", "SLUICE_LEAVING")
		again := apply(t, h, expiring(2*time.Second), backend, &in)
		if !again.Expires.Equal(in.Expires) {
			t.Errorf("applied again: expires at %s, want %s", again.Expires, in.Expires)
		}
		testbed.Eventually(t, "the restored rules have expired", func() bool { return !alive(h) })
		if err := again.Remove(t.Context(), h.Path(), nil); err != nil {
			t.Fatalf("Remove: %v", err)
		}
		checkNothingLeft(t, h)
	})
}

// TestHoldBecomesCapture: a hold is replaced by a capture, which does not expire.
func TestHoldBecomesCapture(t *testing.T) {
	forBackends(t, func(t *testing.T, h *testbed.Host, backend string) {
		hold := apply(t, h, expiring(time.Hour), backend, nil)
		in := apply(t, h, ruleset.Provisional("eth0"), "auto", &hold)
		if in.Backend != backend || !in.Expires.IsZero() {
			t.Errorf("got %s; want it with %s, without an end", testbed.JSON(in), backend)
		}
		checkNoDrift(t, h, in)
		if got := rules(h); strings.Contains(got, "lasting") {
			t.Errorf("the set of the hold is left:\n%s", got)
		}
		if err := in.Remove(t.Context(), h.Path(), nil); err != nil {
			t.Fatalf("Remove: %v", err)
		}
		checkNothingLeft(t, h)
	})
}
