package gate

import (
	"io"
	"net/netip"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestAppState(t *testing.T) {
	t.Parallel()
	for _, address := range []string{webIPv4, webIPv6} {
		t.Run(address, func(t *testing.T) {
			t.Parallel()
			h, g := newPod(t)
			app := dial(t, h, address)
			conn := accept(t, g)
			src, dst := netip.MustParseAddrPort(conn.RemoteAddr().String()), netip.MustParseAddrPort(address)
			check := func(what string, want sockdiag.AppState) {
				t.Helper()
				if got := g.AppState(src, dst); got != want {
					t.Errorf("%s: got state %d, want %d", what, got, want)
				}
			}
			check("open", sockdiag.AppOpen)
			if err := app.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(conn); len(b) > 0 || err != nil { // its FIN is here
				t.Fatalf("got %q, %v", b, err)
			}
			check("half shut", sockdiag.AppOpen)
			if err := app.Close(); err != nil {
				t.Fatal(err)
			}
			// Not at once: programs that other tests fork hold the socket for a moment too.
			testbed.Eventually(t, "it is closed", func() bool { return g.AppState(src, dst) == sockdiag.AppClosed })
		})
	}
}

// TestAppStateAfterCloseAlone: an app that closes at once sends the same FIN as one that is half shut.
func TestAppStateAfterCloseAlone(t *testing.T) {
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
	src := netip.MustParseAddrPort(conn.RemoteAddr().String())
	testbed.Eventually(t, "it is closed", func() bool { return g.AppState(src, netip.MustParseAddrPort(webIPv4)) == sockdiag.AppClosed })
}

func TestAppStateOfNobody(t *testing.T) {
	t.Parallel()
	h, g := newPod(t)
	dial(t, h, webIPv4)
	conn := accept(t, g)
	src := netip.MustParseAddrPort(conn.RemoteAddr().String())
	for what, from := range map[string]netip.AddrPort{
		"another address": netip.AddrPortFrom(netip.MustParseAddr("10.0.0.6"), src.Port()),
		"another port":    netip.AddrPortFrom(src.Addr(), src.Port()^1),
	} {
		if got := g.AppState(from, netip.MustParseAddrPort(webIPv4)); got != sockdiag.AppUnknown {
			t.Errorf("%s: got state %d, want %d", what, got, sockdiag.AppUnknown)
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

// TestAppStateOfMany: questions that are asked at once get each its own answer.
func TestAppStateOfMany(t *testing.T) {
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
			testbed.Eventually(t, "the app is seen closed", func() bool { return g.AppState(src, netip.MustParseAddrPort(webIPv4)) == want })
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
