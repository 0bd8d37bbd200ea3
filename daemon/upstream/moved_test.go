package upstream

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestProxyThatIsNotReadyIsLate although it keeps its idle connection open, as a pod does whose readiness probe fails.
// When another pod is ready, the idle connection leads there.
func TestProxyThatIsNotReadyIsLate(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var address string
	notReady := errors.New("no ready pod on node-1")
	at := func(a string) {
		mu.Lock()
		defer mu.Unlock()
		address = a
	}
	u := New(config.Upstream{Protocol: config.Connect}, func() (string, error) {
		mu.Lock()
		defer mu.Unlock()
		if address == "" {
			return "", notReady
		}
		return address, nil
	}, slog.New(slog.DiscardHandler))
	keeping := func(connections chan<- struct{}) func(*net.TCPConn) {
		return func(c *net.TCPConn) {
			connections <- struct{}{}
			_, _ = io.Copy(io.Discard, c) // until the daemon closes it
		}
	}
	first, second := make(chan struct{}, 10), make(chan struct{}, 10)
	one := startProxy(t, "127.0.0.1:0", keeping(first))
	two := startProxy(t, "127.0.0.1:0", keeping(second))
	at(one.Addr().String())
	run(t, u)
	<-first
	testbed.Eventually(t, "the first is there", func() bool { return u.Status().Ready })
	at("")
	testbed.Eventually(t, "the upstream is late", func() bool {
		s := u.Status()
		return !s.Ready && strings.Contains(s.Reason, notReady.Error())
	})
	at(one.Addr().String())
	<-first
	testbed.Eventually(t, "the first is there again", func() bool { return u.Status().Ready })
	at(two.Addr().String())
	<-second
	if len(first) > 0 {
		t.Error("the first pod got another connection")
	}
}
