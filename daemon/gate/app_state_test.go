package gate

import (
	"io"
	"net/netip"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestAppStateOfOpenHalfClosedAndClosedApps(t *testing.T) {
	t.Parallel()
	for _, address := range []string{webIPv4, webIPv6} {
		t.Run(address, func(t *testing.T) {
			t.Parallel()
			h, g := newPod(t)
			app := dial(t, h, address)
			conn := accept(t, g)
			src, dst := conn.Peer, netip.MustParseAddrPort(address)
			check := func(app string, want sockdiag.AppState) {
				t.Helper()
				if got := g.AppState(src, dst); got != want {
					t.Errorf("%s: got state %d, want %d", app, got, want)
				}
			}
			check("open", sockdiag.AppOpen)
			if err := app.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(conn); len(b) > 0 || err != nil { // until the FIN
				t.Fatalf("got %q, %v", b, err)
			}
			check("half-closed", sockdiag.AppOpen)
			if err := app.Close(); err != nil {
				t.Fatal(err)
			}
			// Not at once: a process that another test forks holds the socket until it has executed its program.
			testbed.Eventually(t, "the app's socket is closed", func() bool {
				return g.AppState(src, dst) == sockdiag.AppClosed
			})
		})
	}
}

// TestAppStateAfterCloseWithoutHalfClose: the FIN is the same as that of a half-close.
func TestAppStateAfterCloseWithoutHalfClose(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	app := dial(t, h, webIPv4)
	conn := accept(t, g)
	if err := app.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); len(b) > 0 || err != nil {
		t.Fatalf("got %q, %v", b, err)
	}
	src := conn.Peer
	testbed.Eventually(t, "the app's socket is closed", func() bool {
		return g.AppState(src, netip.MustParseAddrPort(webIPv4)) == sockdiag.AppClosed
	})
}

func TestAppStateOfUnknownConnections(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	dial(t, h, webIPv4)
	conn := accept(t, g)
	src := conn.Peer
	for source, from := range map[string]netip.AddrPort{
		"another address": netip.AddrPortFrom(netip.MustParseAddr("10.0.0.6"), src.Port()),
		"another port":    netip.AddrPortFrom(src.Addr(), src.Port()^1),
	} {
		if got := g.AppState(from, netip.MustParseAddrPort(webIPv4)); got != sockdiag.AppUnknown {
			t.Errorf("%s: got state %d, want %d", source, got, sockdiag.AppUnknown)
		}
	}
	if got := g.AppState(src, netip.MustParseAddrPort("192.0.2.8:443")); got != sockdiag.AppUnknown {
		t.Errorf("another destination: got state %d, want %d", got, sockdiag.AppUnknown)
	}
	_ = g.Close()
	if got := g.AppState(src, netip.MustParseAddrPort(webIPv4)); got != sockdiag.AppUnknown {
		t.Errorf("after Close: got state %d, want %d", got, sockdiag.AppUnknown)
	}
}

// TestConcurrentAppStates: each concurrent call gets the answer to its own question.
func TestConcurrentAppStates(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	var wg sync.WaitGroup
	for i := range 8 {
		app := dial(t, h, webIPv4)
		src := netip.MustParseAddrPort(app.LocalAddr().String())
		want := sockdiag.AppOpen
		if i%2 == 0 {
			want = sockdiag.AppClosed
			_ = app.Close()
			testbed.Eventually(t, "the app's socket is closed", func() bool {
				return g.AppState(src, netip.MustParseAddrPort(webIPv4)) == want
			})
		}
		wg.Go(func() {
			for range 200 {
				if got := g.AppState(src, netip.MustParseAddrPort(webIPv4)); got != want {
					t.Errorf("connection %d: got state %d, want %d", i, got, want)
				}
			}
		})
	}
	wg.Wait()
}
