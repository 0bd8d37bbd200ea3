package splice

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/sockdiag"
	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// sleeping counts the sockets of pairs that rest.
func sleeping() int {
	all.mu.Lock()
	defer all.mu.Unlock()
	return len(all.pairs)
}

// TestQuietPairsRest, without goroutines, and wake for whatever happens to them.
func TestQuietPairsRest(t *testing.T) { // not parallel: it counts all pairs and goroutines
	const count = 200
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var set Set
	var open sync.WaitGroup
	before := runtime.NumGoroutine()
	apps, ups := make([]*net.TCPConn, count), make([]*net.TCPConn, count)
	for i := range apps {
		var p Pair
		apps[i], p.App = testbed.ConnPair(t)
		ups[i], p.Peer = testbed.ConnPair(t)
		p.HalfClose, p.AppState = true, func() sockdiag.AppState { return sockdiag.AppUnknown }
		open.Add(1)
		set.Start(ctx, p, open.Done)
		echo(t, apps[i], ups[i], "before the rest")
	}
	allRest := func() {
		t.Helper()
		testbed.Eventually(t, "all pairs rest", func() bool { return sleeping() == 2*set.Counts().Open })
		testbed.Eventually(t, "their goroutines have ended", func() bool { return runtime.NumGoroutine() <= before+2 })
	}
	allRest()
	if got := set.Counts().Open; got != count {
		t.Errorf("got %d pairs open, want %d", got, count)
	}
	for i := range apps {
		from, to := apps[i], ups[i]
		if i%2 > 0 {
			from, to = to, from
		}
		echo(t, from, to, "after the rest")
	}
	allRest()
	for i := range count - 10 {
		first, second := apps[i], ups[i]
		if i%2 > 0 {
			first, second = second, first
		}
		if i%4 < 2 {
			testbed.CloseWrite(t, first)
			testbed.CheckReadFails(t, "the other end", second, io.EOF)
			testbed.Send(t, second, "the other direction")
			testbed.CheckReads(t, "the first", first, "the other direction")
			testbed.CloseWrite(t, second)
			testbed.CheckReadFails(t, "the first", first, io.EOF)
		} else {
			socket.Reset(first)
			testbed.CheckReadFails(t, "the other end", second, syscall.ECONNRESET)
		}
	}
	testbed.Eventually(t, "ten pairs are left", func() bool { return set.Counts().Open == 10 })
	cancel()
	open.Wait()
	for i := count - 10; i < count; i++ {
		testbed.CheckReadFails(t, "an app", apps[i], syscall.ECONNRESET)
		testbed.CheckReadFails(t, "an upstream", ups[i], syscall.ECONNRESET)
	}
	if got := sleeping(); got != 0 {
		t.Errorf("got %d sockets that are waited for after the end, want none", got)
	}
}

// echo sends a text both ways.
func echo(t *testing.T, a, b *net.TCPConn, text string) {
	t.Helper()
	testbed.Send(t, a, text)
	testbed.CheckReads(t, "the other end", b, text)
	testbed.Send(t, b, text)
	testbed.CheckReads(t, "the first end", a, text)
}

// TestRestLosesNothing, whenever it begins: here all the time, beside data in both directions.
func TestRestLosesNothing(t *testing.T) {
	t.Parallel()
	for range 4 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			p := Pair{HalfClose: true, AppState: func() sockdiag.AppState { return sockdiag.AppUnknown }}
			var app, up *net.TCPConn
			app, p.App = testbed.ConnPair(t)
			up, p.Peer = testbed.ConnPair(t)
			var set Set
			done := make(chan struct{})
			j := set.start(t.Context(), p, func() { close(done) })
			stop := make(chan struct{})
			var looking sync.WaitGroup
			looking.Go(func() {
				for rests := 0; ; {
					select {
					case <-stop:
						if rests == 0 {
							t.Error("the pair never rested")
						}
						return
					default:
						j.look()
						if j.isResting() {
							rests++
						}
						runtime.Gosched()
					}
				}
			})
			for i := range 200 {
				text := string(testbed.RandomBytes(1 + i*37%3000))
				switch i % 3 {
				case 0:
					echo(t, app, up, text)
				case 1:
					echo(t, up, app, text)
				case 2: // both at once
					testbed.Send(t, app, text)
					testbed.Send(t, up, text)
					testbed.CheckReads(t, "the app", app, text)
					testbed.CheckReads(t, "the upstream", up, text)
				}
			}
			testbed.CloseWrite(t, app)
			testbed.CheckReadFails(t, "the upstream", up, io.EOF)
			testbed.Send(t, up, "last words")
			testbed.CloseWrite(t, up)
			testbed.CheckReads(t, "the app", app, "last words")
			testbed.CheckReadFails(t, "the app", app, io.EOF)
			<-done
			close(stop)
			looking.Wait()
		})
	}
}

func (p *joint) isResting() bool {
	p.quiet.mu.Lock()
	defer p.quiet.mu.Unlock()
	return p.quiet.stage == resting
}

// TestRestEndsWithItsContext, at whatever moment.
func TestRestEndsWithItsContext(t *testing.T) {
	t.Parallel()
	for range 200 {
		p := Pair{HalfClose: true, AppState: func() sockdiag.AppState { return sockdiag.AppUnknown }}
		var app *net.TCPConn
		app, p.App = testbed.ConnPair(t)
		_, p.Peer = testbed.ConnPair(t)
		var set Set
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		j := set.start(ctx, p, func() { close(done) })
		go func() {
			for range 10 {
				j.look()
			}
			cancel()
		}()
		testbed.CheckReadFails(t, "the app", app, syscall.ECONNRESET)
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatal("the pair has not ended")
		}
	}
}

// TestRestOfAClosedPairFails, so that its goroutines end it.
func TestRestOfAClosedPairFails(t *testing.T) {
	t.Parallel()
	var p joint
	_, p.App = testbed.ConnPair(t)
	_, p.Peer = testbed.ConnPair(t)
	_ = p.Peer.Close()
	if err := all.add(&p); !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v, want %v", err, net.ErrClosed)
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, other := range all.pairs {
		if other == &p {
			t.Error("the pair is waited for")
		}
	}
}
