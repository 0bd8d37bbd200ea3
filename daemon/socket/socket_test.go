package socket

import (
	"io"
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

func TestMain(m *testing.M) { os.Exit(testbed.Main(m)) }

// TestIsResetTellsAResetFromAHalfClose: a peer that has only shut down its sending side has not reset the connection.
func TestIsResetTellsAResetFromAHalfClose(t *testing.T) {
	t.Parallel()
	far, near := testbed.ConnPair(t)
	if IsReset(near) {
		t.Error("open connection: got reset")
	}
	testbed.Send(t, far, "unread")
	testbed.CloseWrite(t, far)
	testbed.CheckReads(t, "near", near, "unread")
	testbed.CheckReadFails(t, "near", near, io.EOF)
	if IsReset(near) {
		t.Error("half-closed connection: got reset")
	}
	Reset(far)
	testbed.Eventually(t, "the connection is reset", func() bool { return IsReset(near) })
	_ = near.Close()
	if !IsReset(near) {
		t.Error("closed connection: got not reset")
	}
}
