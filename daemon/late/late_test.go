package late

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

const timeout = time.Minute

// stays is the app of a connection that is never given up.
func stays() error { return nil }

// TestGoneConnectionsAreForgotten, and the others wait on.
func TestGoneConnectionsAreForgotten(t *testing.T) {
	t.Parallel()
	var waits Accepted
	var gone error
	ctx, wait := waits.Add(t.Context(), func() error { return gone })
	defer wait.Done()
	other, otherWait := waits.Add(t.Context(), stays)
	defer otherWait.Done()
	waits.Forget()
	if ctx.Err() != nil || waits.Len() != 2 {
		t.Errorf("before: got context %v, %d waits; want both to wait", ctx.Err(), waits.Len())
	}
	gone = errors.New("the app is gone")
	waits.Forget()
	if !errors.Is(context.Cause(ctx), gone) || other.Err() != nil || waits.Len() != 1 {
		t.Errorf("after: got cause %v, other context %v, %d waits; want the first wait ended alone",
			context.Cause(ctx), other.Err(), waits.Len())
	}
}

// TestWaitExpiresAfterItsTimeout, and is counted once.
func TestWaitExpiresAfterItsTimeout(t *testing.T) {
	t.Parallel()
	for _, cause := range []error{ErrExpired, ErrDirect} {
		synctest.Test(t, func(t *testing.T) {
			var waits Accepted
			ctx, wait := waits.Add(t.Context(), stays)
			defer wait.Done()
			time.Sleep(timeout)
			if got := waits.Expire(timeout, true, cause); got != 0 || ctx.Err() != nil {
				t.Errorf("at the timeout: got %d expired, context %v; want none", got, ctx.Err())
			}
			time.Sleep(time.Nanosecond)
			if got := waits.Expire(timeout, true, cause); got != 1 || !errors.Is(context.Cause(ctx), cause) {
				t.Errorf("after the timeout: got %d expired, cause %v; want 1, %v", got, context.Cause(ctx), cause)
			}
			if got := waits.Expire(timeout, true, cause); got != 0 || waits.Len() != 0 {
				t.Errorf("again: got %d expired, %d left; want none", got, waits.Len())
			}
		})
	}
}

// TestEachWaitHasATimeoutOfItsOwn, from its own beginning.
func TestEachWaitHasATimeoutOfItsOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var waits Accepted
		early, earlyWait := waits.Add(t.Context(), stays)
		defer earlyWait.Done()
		time.Sleep(timeout)
		later, laterWait := waits.Add(t.Context(), stays)
		defer laterWait.Done()
		time.Sleep(time.Second)
		if got := waits.Expire(timeout, true, ErrExpired); got != 1 || waits.Len() != 1 {
			t.Errorf("got %d expired, %d left; want 1 and 1", got, waits.Len())
		}
		if early.Err() == nil || later.Err() != nil {
			t.Errorf("early wait: %v, later wait: %v; want the early one ended alone", early.Err(), later.Err())
		}
	})
}

// TestOnlyMisconfiguredWaitsExpireWhileTheUpstreamIsReady: the upstream works on the other connections.
func TestOnlyMisconfiguredWaitsExpireWhileTheUpstreamIsReady(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var waits Accepted
		served, servedWait := waits.Add(t.Context(), stays)
		defer servedWait.Done()
		refused, refusedWait := waits.Add(t.Context(), stays)
		defer refusedWait.Done()
		refusedWait.Misconfigured()
		time.Sleep(2 * timeout)
		if got := waits.Expire(timeout, false, ErrExpired); got != 1 || waits.Len() != 1 {
			t.Errorf("got %d expired, %d left; want 1 and 1", got, waits.Len())
		}
		if !errors.Is(context.Cause(refused), ErrExpired) || served.Err() != nil {
			t.Errorf("misconfigured: %v, served: %v; want the misconfigured wait ended alone",
				context.Cause(refused), served.Err())
		}
	})
}

func TestWaitThatIsDoneDoesNotExpire(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var waits Accepted
		ctx, wait := waits.Add(t.Context(), stays)
		wait.Done()
		time.Sleep(2 * timeout)
		if got := waits.Expire(timeout, true, ErrExpired); got != 0 || waits.Len() != 0 {
			t.Errorf("got %d expired, %d left; want none", got, waits.Len())
		}
		if !errors.Is(context.Cause(ctx), context.Canceled) {
			t.Errorf("cause: got %v, want %v", context.Cause(ctx), context.Canceled)
		}
	})
}
