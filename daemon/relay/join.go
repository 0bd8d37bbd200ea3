package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
)

// junction joins an app's connection and the one to the upstream. It owns both.
type junction struct {
	app, up *net.TCPConn
	// ending is called once, before the connections are closed, with the bytes that were carried.
	ending func(bytes uint64)
	// appState looks at the app's socket.
	appState func() gate.AppState
	// halfClose means that the upstream can be told of the end of one direction alone. One that cannot
	// would drop what the other still carries.
	halfClose bool

	once sync.Once
}

// run carries bytes both ways until both ways have ended, and closes both connections. The end of one way is
// passed on as such; an error in either, a reset above all, resets both. first is what the upstream said
// already.
//
// Bulk data moves by splice(2): io.Copy between TCP connections keeps it in the kernel.
func (j *junction) run(ctx context.Context, first []byte) {
	// Should this process be killed, the kernel resets both: an app must not take what it has for all.
	_ = errors.Join(j.app.SetLinger(0), j.up.SetLinger(0)) // fails only if closed already, as what follows will
	stop := context.AfterFunc(ctx, j.reset)
	defer stop()
	answered := make(chan struct{})
	var up, down int64
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(answered)
		down = j.toApp(first)
	})
	up = j.toUpstream(answered)
	wg.Wait()
	j.close(uint64(up + down))
}

// toUpstream returns when nothing more will go that way, and nobody needs to look after the other.
func (j *junction) toUpstream(answered <-chan struct{}) int64 {
	n, err := io.Copy(j.up, j.app)
	if err != nil {
		j.reset()
		return n
	}
	if !j.halfClose {
		j.holdFIN(answered)
	}
	j.passEnd(j.up)
	j.attend(answered)
	return n
}

func (j *junction) toApp(first []byte) int64 {
	if len(first) > 0 {
		if _, err := j.app.Write(first); err != nil {
			j.reset()
			return 0
		}
	}
	n, err := io.Copy(j.app, j.up)
	switch {
	case err == nil:
		j.passEnd(j.app)
	case !errors.Is(err, os.ErrDeadlineExceeded): // attend sets one
		j.reset()
	}
	return n + int64(len(first))
}

// passEnd sends the FIN on.
func (j *junction) passEnd(to *net.TCPConn) {
	if err := to.CloseWrite(); err != nil {
		j.reset()
	}
}

// reset ends both connections with a RST.
func (j *junction) reset() {
	j.once.Do(func() {
		j.ending(carried(j.app))
		gate.Reset(j.app)
		gate.Reset(j.up)
	})
}

// close ends both connections; what is still in the send buffers arrives.
func (j *junction) close(bytes uint64) {
	j.once.Do(func() {
		j.ending(bytes)
		_ = errors.Join(j.app.SetLinger(-1), j.up.SetLinger(-1), j.app.Close(), j.up.Close())
	})
}

// How long the app's FIN is held back while nothing comes from the upstream: an app that is known to be
// there may be waiting for a slow answer; of one that is not known, nobody can say.
const (
	quietOpen    = time.Minute
	quietUnknown = 5 * time.Second
)

// holdFIN returns when the app's FIN may be passed on: the other way has ended, the app does not wait for
// it any more, or it has been quiet for long.
func (j *junction) holdFIN(answered <-chan struct{}) {
	last, since := delivered(j.app), time.Now()
	poll(answered, func() (over bool) {
		quiet := quietUnknown
		switch j.appState() {
		case gate.AppClosed:
			return true
		case gate.AppOpen:
			quiet = quietOpen
		}
		if now := delivered(j.app); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > quiet
	})
}

// attend ends the other way once the app is gone and all that it sent has arrived: an upstream that never ends
// its side would keep both connections for ever. mitmproxy 8.1.1 is one, where the client has ended first.
func (j *junction) attend(answered <-chan struct{}) {
	poll(answered, func() (over bool) {
		// Of an app that is not known to be gone, its kernel may answer a keepalive with a reset.
		gone := state(j.app) == tcpClose || state(j.up) == tcpFinWait2 && j.appState() == gate.AppClosed
		if gone {
			_ = j.up.SetReadDeadline(time.Unix(1, 0)) // fails only if that way has ended
		}
		return gone
	})
}

// poll calls look until it is over, or until done: that the app has closed is no event here, so it is asked for.
func poll(done <-chan struct{}, look func() (over bool)) {
	for wait := time.Millisecond; !look(); wait = min(2*wait, time.Second) {
		select {
		case <-done:
			return
		case <-time.After(wait):
		}
	}
}

// delivered counts the bytes that the app's kernel has acknowledged.
func delivered(app *net.TCPConn) uint64 {
	info, err := tcpInfo(app)
	if err != nil {
		return 0
	}
	return info.Bytes_acked
}
