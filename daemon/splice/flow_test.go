package splice

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestVesselsCarryAllBytes, in as many parts as it takes. A process without free descriptors has no pipes.
func TestVesselsCarryAllBytes(t *testing.T) {
	t.Parallel()
	for name, v := range map[string]vessel{"pipe": newVessel(), "buffer": &buffer{}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			from, in := testbed.ConnPair(t)
			to, out := testbed.ConnPair(t)
			const size = 100_000
			text := string(testbed.RandomBytes(size))
			go func() {
				_, _ = from.Write([]byte(text)) // bytes that are lost are missed below
				_ = from.CloseWrite()
			}()
			done := make(chan error)
			go func() { done <- carryAll(v, out, in) }()
			got := make([]byte, size)
			if n, err := io.ReadFull(to, got); err != nil || string(got) != text {
				t.Errorf("got %d bytes of %d, %v", n, size, err)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// carryAll carries bytes to their end in one vessel.
func carryAll(v vessel, to, from socket.Stream) error {
	reading, err := from.SyscallConn()
	writing, werr := to.SyscallConn()
	for err = errors.Join(err, werr); err == nil; {
		var n int
		_ = reading.Read(func(fd uintptr) bool {
			n, err = v.fill(int(fd))
			return !errors.Is(err, unix.EAGAIN)
		})
		if err != nil || n == 0 {
			return err
		}
		for left := n; left > 0 && err == nil; {
			_ = writing.Write(func(fd uintptr) bool {
				left, err = v.drain(int(fd))
				return !errors.Is(err, unix.EAGAIN)
			})
		}
	}
	return err
}

// pipes counts the descriptors of this process that are pipes.
func pipes(t *testing.T) (n int) {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); strings.HasPrefix(to, "pipe:") { // fails if closed meanwhile
			n++
		}
	}
	return n
}

// TestIdlePairsHaveNoPipes, also after they have carried data.
func TestIdlePairsHaveNoPipes(t *testing.T) { // not parallel: it counts the descriptors of the process
	before := pipes(t)
	pairs := make([]*ends, 50)
	for i := range pairs {
		pairs[i] = joined(t, "", nil)
		testbed.Send(t, pairs[i].app, "question")
		testbed.CheckReads(t, "the upstream", pairs[i].up, "question")
		testbed.Send(t, pairs[i].up, "answer")
		testbed.CheckReads(t, "the app", pairs[i].app, "answer")
	}
	testbed.Eventually(t, "no more pipes are left than are kept for all", func() bool {
		return pipes(t) <= before+2*cap(spares)
	})
}

// TestAnswerOfAPeerThatFailsArrives: the peer answers and resets while the app still sends.
func TestAnswerOfAPeerThatFailsArrives(t *testing.T) {
	t.Parallel()
	for range 100 {
		e := joined(t, "", nil)
		sent := make(chan error)
		go func() {
			var err error
			for err == nil {
				_, err = e.app.Write(make([]byte, 64<<10))
			}
			sent <- err
		}()
		if _, err := e.up.Read(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		testbed.Send(t, e.up, "too much")
		socket.Reset(e.up)
		testbed.CheckReads(t, "the app", e.app, "too much")
		if err := <-sent; !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("the app sends: got %v, want a reset", err)
		}
		<-e.done
	}
}
