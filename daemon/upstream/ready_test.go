package upstream

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-cni/sluice/daemon/config"
)

// logging makes an upstream that is there, and that writes its log to the buffer.
func logging() (*Upstream, *bytes.Buffer) {
	var log bytes.Buffer
	u := New(config.Upstream{Address: "127.0.0.1:1", Protocol: config.Connect}, nil,
		slog.New(slog.NewTextHandler(&log, nil)))
	u.markReady()
	return u, &log
}

// TestAlternatingAnswersDoNotFloodTheLog, nor change the status with each of them.
func TestAlternatingAnswersDoNotFloodTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		u, log := logging()
		const seconds = 20
		for i := range 100 * seconds {
			u.recordAnswer(fmt.Errorf("%w: %d", ErrMisconfigured, i%2))
			time.Sleep(5 * time.Millisecond)
			u.recordAnswer(nil)
			if s := u.Status(); !strings.Contains(s.Reason, ErrMisconfigured.Error()) {
				t.Fatalf("after %d answers: got %+v, want a reason", i, s)
			}
			time.Sleep(5 * time.Millisecond)
		}
		if got := strings.Count(log.String(), "upstream is misconfigured"); got != seconds/10 {
			t.Errorf("%d lines in %d s, want one in 10 s", got, seconds)
		}
		time.Sleep(misconfiguredFor)
		if s := u.Status(); s.Reason != "" || strings.Count(log.String(), "no longer misconfigured") != 1 {
			t.Errorf("later: got %+v and the log %s; want no reason, and one line that says so", s, log)
		}
	})
}

// TestMisconfigurationLastsUntilAConnection, however long there is no answer at all.
func TestMisconfigurationLastsUntilAConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		u, _ := logging()
		u.recordAnswer(nil)
		time.Sleep(time.Second)
		u.recordAnswer(ErrMisconfigured)
		time.Sleep(2 * misconfiguredFor)
		if s := u.Status(); s.Reason == "" {
			t.Errorf("got %+v, want a reason", s)
		}
		u.recordAnswer(nil)
		if s := u.Status(); s.Reason != "" {
			t.Errorf("after a connection: got %+v, want no reason", s)
		}
	})
}

// TestUnclearAnswersAreNotReported while the upstream makes other connections: they concern a destination.
func TestUnclearAnswersAreNotReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		u, log := logging()
		unclear := &unclearError{ErrMisconfigured, "400 Bad Request"}
		for range 100 {
			u.recordAnswer(unclear)
			time.Sleep(proofTime / 2)
			u.recordConnected()
			time.Sleep(proofTime / 2)
		}
		if s := u.Status(); s.Reason != "" || strings.Contains(log.String(), "misconfigured") {
			t.Errorf("with other connections: got %+v and the log %s; want no report", s, log)
		}
		u.recordAnswer(unclear)
		time.Sleep(proofTime)
		u.recordAnswer(unclear)
		if s := u.Status(); !strings.Contains(s.Reason, "400") {
			t.Errorf("without other connections: got %+v, want a reason", s)
		}
	})
}
