package pause

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		pause   time.Duration
		timeout time.Duration // of the context
		want    error
		passed  time.Duration
	}{
		{"to its end", time.Minute, time.Hour, nil, time.Minute},
		{"until the context ends", time.Hour, time.Minute, context.DeadlineExceeded, time.Minute},
		{"with a context that has ended", time.Hour, 0, context.DeadlineExceeded, 0},
		{"for no time", 0, time.Hour, nil, 0},
		{"for a negative time", -time.Minute, time.Hour, nil, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), tc.timeout)
				defer cancel()
				start := time.Now()
				if err := For(ctx, tc.pause); !errors.Is(err, tc.want) {
					t.Errorf("got %v, want %v", err, tc.want)
				}
				if passed := time.Since(start); passed != tc.passed {
					t.Errorf("returned after %s, want %s", passed, tc.passed)
				}
			})
		})
	}
}
