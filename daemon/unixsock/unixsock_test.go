package unixsock

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// pair returns the two ends of a SOCK_SEQPACKET socket pair.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "pair")
		defer f.Close() //nolint:errcheck // FileConn made a duplicate
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c.(*net.UnixConn)
	}
	return conn(fds[0]), conn(fds[1])
}

// TestSendWhileTheFileIsClosed closes the file while Send is blocked, and opens another file with the same descriptor
// number. The receiver must get the first file, not the second.
func TestSendWhileTheFileIsClosed(t *testing.T) {
	t.Parallel()
	a, b := pair(t)
	message := make([]byte, 1024)
	if err := a.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	full := 0
	for Send(a, message, nil) == nil {
		full++
	}
	if err := a.SetWriteDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "sent")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	number := int(file.Fd())
	want, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan error)
	go func() { sent <- Send(a, message, []*os.File{file}) }()
	testbed.Eventually(t, "Send has duplicated the descriptor", func() bool { return descriptorsOf(t, path) == 2 })
	_ = file.Close()
	other, err := unix.FcntlInt(os.Stdin.Fd(), unix.F_DUPFD_CLOEXEC, number)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other) //nolint:errcheck // a duplicate
	for range full {
		if _, _, err := Receive(b, message); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	_, files, err := Receive(b, message)
	if err != nil || len(files) != 1 {
		t.Fatalf("got %d files, %v; want one", len(files), err)
	}
	defer Close(files)
	if got, err := files[0].Stat(); err != nil || !os.SameFile(got, want) {
		t.Errorf("got another file than the one sent: %v, %v", got, err)
	}
}

// descriptorsOf counts the descriptors of this process that refer to the file at path.
func descriptorsOf(t *testing.T, path string) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); to == path {
			n++
		}
	}
	return n
}

func TestSendOfAClosedFile(t *testing.T) {
	t.Parallel()
	a, _ := pair(t)
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if err := Send(a, []byte("x"), []*os.File{f}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("got %v, want os.ErrClosed", err)
	}
}

// TestReceiveError checks that a failed Receive returns 0 bytes, as an io.Reader must, and not the kernel's -1.
func TestReceiveError(t *testing.T) {
	t.Parallel()
	a, _ := pair(t)
	if err := a.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	n, files, err := Receive(a, make([]byte, 10))
	if n != 0 || files != nil || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %d bytes, %v, %v; want none and %v", n, files, err, os.ErrDeadlineExceeded)
	}
}
