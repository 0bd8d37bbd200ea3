package upstream

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/plugin/attach"
)

func (u *Upstream) markReady() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.isReadyLocked() {
		return
	}
	u.log.Info("upstream is there", "upstream", u.name, "late", time.Since(u.since).Round(time.Millisecond).String())
	close(u.ready)
	u.since, u.reason = time.Now(), ""
}

func (u *Upstream) markLate(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.isReadyLocked() {
		u.log.Warn("upstream is late: connections wait", "upstream", u.name, "err", err)
		u.ready, u.since = make(chan struct{}), time.Now()
	}
	u.reason = err.Error()
}

// misconfiguredFor is how long the upstream counts as misconfigured after the last answer that says so. A pod that
// alternates two destinations would otherwise change the status, and write to the log, with each of its connections.
const misconfiguredFor = 10 * time.Second

// recordAnswer records that the upstream has made a connection, or answers in a way that an operator has to mend.
func (u *Upstream) recordAnswer(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	switch {
	case err == nil:
		u.connected = now
	case !errors.Is(err, ErrMisconfigured), !u.isReadyLocked(), u.doubtLocked(err, now):
	default:
		u.misconfigured = now
		if u.reason == err.Error() {
			return
		}
		u.reason = err.Error()
		if _, due := u.lines.Due("misconfigured"); due {
			u.log.Error("upstream is misconfigured: connections wait", "upstream", u.name, "err", err)
		}
	}
}

// forgiveLocked ends the report of a misconfiguration that is over. The caller holds mu.
func (u *Upstream) forgiveLocked() {
	if u.isReadyLocked() && u.reason != "" && u.connected.After(u.misconfigured) &&
		time.Since(u.misconfigured) >= misconfiguredFor {
		u.reason = ""
		u.log.Info("upstream is no longer misconfigured", "upstream", u.name)
	}
}

// isReadyLocked reports whether the upstream is there. The caller holds mu.
func (u *Upstream) isReadyLocked() bool {
	select {
	case <-u.ready:
		return true
	default:
		return false
	}
}

func (u *Upstream) isReady() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.isReadyLocked()
}

// Wait returns when the upstream is there, or with the error of ctx. A late upstream is dialed at once
// then, and every dialInterval.
func (u *Upstream) Wait(ctx context.Context) error {
	u.mu.Lock()
	ready, late := u.ready, !u.isReadyLocked()
	if late {
		u.waits++
		u.demand()
	}
	u.mu.Unlock()
	if late {
		defer u.endWait()
	}
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (u *Upstream) endWait() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.waits--
}

// WaitToRetry waits before a request is made again: for d, or if the upstream is late, until it is there.
func (u *Upstream) WaitToRetry(ctx context.Context, d time.Duration) error {
	if u.isReady() {
		_ = pause.For(ctx, d) // Wait looks at ctx
	}
	return u.Wait(ctx)
}

// Status describes the upstream. The daemon asks for it every second. A late one is dialed again: the policy hold,
// `sluiced wait` and the node's taint ask until it is there.
func (u *Upstream) Status() attach.UpstreamStatus {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.forgiveLocked()
	if !u.isReadyLocked() {
		u.demand()
	}
	return attach.UpstreamStatus{
		Address: u.name, Protocol: string(u.protocol), Ready: u.isReadyLocked(), Since: u.since, Reason: u.reason,
	}
}
