package upstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-cni/sluice/daemon/pause"
)

const (
	// maxFailures is the number of unclear answers after which a destination counts as unreachable. The pauses between
	// the requests add up to more than a second: a proxy that fails for a moment has recovered by then.
	maxFailures = 8
	// longDoubt is the time after which fewFailures are as many. A proxy that waits for its kernel to give up a
	// destination that drops SYNs, as tinyproxy does, needs 127 s for each answer.
	longDoubt, fewFailures = 5 * time.Second, 3
	// proofInterval is the shortest time between two connections that the upstream is asked for as a proof.
	proofInterval = 100 * time.Millisecond
	// proofTime is how long the upstream may take to make a connection, before unclear answers are reported as a
	// misconfiguration.
	proofTime = 2 * time.Second
)

// unclearError is the error of an answer that says neither that the upstream has failed nor that the destination has:
// tinyproxy answers 500 for both, and SOCKS5 servers reply with a general failure. A proxy may answer 400 to every
// request, or to those for certain ports. Until Judge knows better, the error is ErrLate or ErrMisconfigured.
type unclearError struct {
	until  error
	answer string
}

func (e *unclearError) Error() string        { return e.until.Error() + ": " + e.answer }
func (e *unclearError) Is(target error) bool { return target == e.until }

// Doubt is the number of unclear answers to one connection in a row. Its zero value is ready to use.
type Doubt struct {
	failures       int
	began, counted time.Time // when the first and the last of them were counted
}

// Judge returns err, the error of a request for the connection of d, or ErrUnreachable in its place: if the upstream
// has given maxFailures unclear answers to this connection, or fewFailures in longDoubt, and has made other connections
// between each two of them, it is well and the destination is not. Only a connection that it has made is a proof: a
// proxy that has lost its own upstream can still refuse a request by its rules.
func (u *Upstream) Judge(d *Doubt, err error) error {
	var unclear *unclearError
	if !errors.As(err, &unclear) {
		*d = Doubt{}
		return err
	}
	if d.failures == 0 {
		d.began = time.Now()
	}
	if d.failures == 0 || u.hasConnectedSince(d.counted) {
		d.failures++
		d.counted = time.Now()
	}
	if d.failures < fewFailures || d.failures < maxFailures && d.counted.Sub(d.began) < longDoubt {
		u.askForProof()
		return err
	}
	return fmt.Errorf("%w: %d answers were %s, and the upstream made other connections between them",
		ErrUnreachable, d.failures, unclear.answer)
}

// doubtLocked reports whether err may be about a destination: it is that of an unclear answer, and the upstream makes
// other connections, or may be about to. The caller holds mu.
func (u *Upstream) doubtLocked(err error, now time.Time) bool {
	var unclear *unclearError
	if !errors.As(err, &unclear) {
		return false
	}
	if u.suspected.IsZero() || u.connected.After(u.suspected) {
		u.suspected = now
	}
	return now.Sub(u.suspected) < proofTime
}

func (u *Upstream) hasConnectedSince(t time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.connected.After(t)
}

// recordConnected records that the upstream has made a connection.
func (u *Upstream) recordConnected() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.connected = time.Now()
}

// askForProof has keepProving ask for a connection, unless it is about to.
func (u *Upstream) askForProof() {
	select {
	case u.doubted <- struct{}{}:
	default:
	}
}

// keepProving asks the upstream for a connection to the daemon itself whenever there is a doubt, until ctx ends.
func (u *Upstream) keepProving(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-u.doubted:
			_ = u.askForOwn(ctx) // a success is recorded; anything else leaves the doubt
			_ = pause.For(ctx, proofInterval)
		case <-ctx.Done():
		}
	}
}
