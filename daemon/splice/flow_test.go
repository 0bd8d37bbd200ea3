package splice

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

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

// TestSlowAnswerOfAPeerThatFailsArrives, however long it takes an app that goes on reading: from the send buffer of the
// app's connection, or if that is small, also from the receive buffer of the peer's.
func TestSlowAnswerOfAPeerThatFailsArrives(t *testing.T) {
	t.Parallel()
	const size, part = 128 << 10, 4 << 10
	for name, buffer := range map[string]int{"large send buffer": 2 * size, "small send buffer": part} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := joined(t, "", nil)
			if err := errors.Join(e.app.SetReadBuffer(part), e.nearApp.SetWriteBuffer(buffer)); err != nil {
				t.Fatal(err)
			}
			go func() {
				for err := error(nil); err == nil; {
					_, err = e.app.Write(make([]byte, 64<<10)) // it will be reset
				}
			}()
			if _, err := e.up.Read(make([]byte, 10)); err != nil {
				t.Fatal(err)
			}
			answer := testbed.RandomBytes(size)
			testbed.Send(t, e.up, string(answer))
			testbed.Eventually(t, "the daemon's kernel has the answer", func() bool { return socket.IsDelivered(e.up) })
			socket.Reset(e.up)
			pace := time.NewTicker(drainTimeout * 3 / 2 / (size / part))
			defer pace.Stop()
			got := make([]byte, size)
			for from := 0; from < size; from += part {
				<-pace.C
				if n, err := io.ReadFull(e.app, got[from:from+part]); err != nil {
					t.Fatalf("got %d bytes of %d, then %v", from+n, size, err)
				}
			}
			if !bytes.Equal(got, answer) {
				t.Error("got other bytes than were sent")
			}
			<-e.done
		})
	}
}

// TestStalledPairsHaveFewPipes: one user's pipes share a limit, beyond which new pipes of processes without privileges
// are small.
func TestStalledPairsHaveFewPipes(t *testing.T) { // not parallel: it counts the descriptors of the process
	before := pipes(t)
	if size := unprivilegedPipe(t); size != 64<<10 {
		t.Skipf("pipes of other programs leave a new one %d bytes", size)
	}
	const size = 512 << 10
	for range 100 {
		e := joined(t, "", nil)
		if err := errors.Join(e.app.SetReadBuffer(1), e.nearApp.SetWriteBuffer(1)); err != nil {
			t.Fatal(err)
		}
		testbed.Send(t, e.up, string(make([]byte, size)))
		testbed.Eventually(t, "bytes wait for the app", func() bool {
			return !socket.IsDelivered(e.nearApp)
		})
	}
	if got := pipes(t) - before; got > 2*maxPipes {
		t.Errorf("got %d descriptors of pipes, want at most %d", got, 2*maxPipes)
	}
	if got := unprivilegedPipe(t); got != 64<<10 {
		t.Errorf("a new pipe of a process without privileges has %d bytes, want 64 KiB", got)
	}
}

// unprivilegedPipe returns the size of a new pipe of this user without the capabilities that lift its limit.
func unprivilegedPipe(t *testing.T) (size int) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // ends with this goroutine
		done <- func() error {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var caps [2]unix.CapUserData
			if err := unix.Capget(&header, &caps[0]); err != nil {
				return err
			}
			caps[0].Effective &^= 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYS_RESOURCE
			if err := unix.Capset(&header, &caps[0]); err != nil {
				return err
			}
			var fds [2]int
			if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
				return err
			}
			var err error
			size, err = unix.FcntlInt(uintptr(fds[0]), unix.F_GETPIPE_SZ, 0)
			return errors.Join(err, unix.Close(fds[0]), unix.Close(fds[1]))
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return size
}
