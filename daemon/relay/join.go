package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/gate"
)

// junction joins an app's connection and the one to the upstream. It owns both.
type junction struct {
	app, up *net.TCPConn
	// ending is called once, before the connections are closed.
	ending func()
	// appState, if set, means that the upstream cannot be told of the end of one direction alone: it
	// would drop what the other still carries.
	appState func() gate.AppState

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
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(answered)
		j.toApp(first)
	})
	j.toUpstream(answered)
	wg.Wait()
	j.close()
}

func (j *junction) toUpstream(answered <-chan struct{}) {
	if _, err := io.Copy(j.up, j.app); err != nil {
		j.reset()
		return
	}
	if j.appState != nil {
		j.holdFIN(answered)
	}
	j.passEnd(j.up)
}

func (j *junction) toApp(first []byte) {
	if len(first) > 0 {
		if _, err := j.app.Write(first); err != nil {
			j.reset()
			return
		}
	}
	if _, err := io.Copy(j.app, j.up); err != nil {
		j.reset()
		return
	}
	j.passEnd(j.app)
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
		j.ending()
		reset(j.app)
		reset(j.up)
	})
}

func (j *junction) close() {
	j.once.Do(func() {
		j.ending()
		// Both ways have ended; what is still in the send buffers arrives.
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
// it any more, or it has been quiet for long. The app's close is no event here, so it is asked for.
func (j *junction) holdFIN(answered <-chan struct{}) {
	last, since := delivered(j.app), time.Now()
	for wait := time.Millisecond; ; wait = min(2*wait, time.Second) {
		quiet := quietUnknown
		switch j.appState() {
		case gate.AppClosed:
			return
		case gate.AppOpen:
			quiet = quietOpen
		}
		if now := delivered(j.app); now != last {
			last, since = now, time.Now()
		}
		if time.Since(since) > quiet {
			return
		}
		select {
		case <-answered:
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

// reset closes conn so that the peer gets a RST.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0) // fails only if it is closed already
	_ = conn.Close()
}
