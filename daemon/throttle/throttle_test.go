package throttle

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestLinesCountTheEventsBetween(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l Lines
		for i, step := range []struct {
			after time.Duration
			cause string
			count int // 0 for no line
		}{
			{0, "refused", 1},
			{0, "refused", 0},
			{0, "unreachable", 1},
			{interval - 1, "refused", 0},
			{1, "refused", 3},
			{interval - 1, "refused", 0},
			{1, "unreachable", 1},
			{0, "refused", 2},
		} {
			time.Sleep(step.after)
			count, due := l.Due(step.cause)
			if count != step.count || due != (step.count > 0) {
				t.Errorf("event %d, %s: got %d, %t; want %d", i, step.cause, count, due, step.count)
			}
		}
	})
}
