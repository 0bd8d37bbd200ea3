package handover

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// sockets are the listeners of each netns.
type sockets map[attach.NetnsID][]*os.File

// listen opens n TCP listeners on loopback. They are closed at the end of the test.
func listen(t *testing.T, n int) []*os.File {
	t.Helper()
	var files []*os.File
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		f, err := l.(*net.TCPListener).File()
		_ = l.Close() // f is a duplicate
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	t.Cleanup(func() { unixsock.Close(files) })
	return files
}

// cookies identifies sockets beyond their descriptors.
func cookies(t *testing.T, s sockets) map[attach.NetnsID][]uint64 {
	t.Helper()
	all := map[attach.NetnsID][]uint64{}
	for id, files := range s {
		var err error
		if all[id], err = gate.Cookies(files); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// listenAt listens at the socket of a daemon that answers one request with answer.
func listenAt(t *testing.T, path string, answer func(*http.Request, *net.UnixConn) error) <-chan error {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		defer l.Close() //nolint:errcheck // nothing was written
		c, err := l.Accept()
		if err != nil {
			done <- err
			return
		}
		defer c.Close() //nolint:errcheck // everything was sent
		req, err := http.ReadRequest(bufio.NewReader(c))
		if err == nil {
			err = answer(req, c.(*net.UnixConn))
		}
		done <- err
	}()
	return done
}

// offering starts a daemon that offers s, as package api does. The channel receives the result of Offer.
func offering(t *testing.T, path string, s sockets) <-chan error {
	t.Helper()
	return listenAt(t, path, func(req *http.Request, c *net.UnixConn) error {
		if req.Method != http.MethodPost || req.URL.Path != Path || req.Header.Get("Upgrade") != Protocol {
			return fmt.Errorf("got request %s %s, headers %v", req.Method, req.URL, req.Header)
		}
		if _, err := io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n\r\n"); err != nil {
			return err
		}
		return Offer(c, func(send func(attach.NetnsID, []*os.File) error) error {
			for id, files := range s {
				if err := send(id, files); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// take takes the listeners of the daemon at path. They are closed at the end of the test.
func take(t *testing.T, path string) *Transfer {
	t.Helper()
	transfer, err := Take(path)
	if err != nil {
		t.Fatalf("Take: %v", err)
	}
	t.Cleanup(func() {
		for _, files := range transfer.Listeners {
			unixsock.Close(files)
		}
	})
	return transfer
}

// TestTakeGetsTheListenersOfEveryNetns: they are the same sockets, not only the same addresses.
func TestTakeGetsTheListenersOfEveryNetns(t *testing.T) {
	t.Parallel()
	for name, offered := range map[string]sockets{
		"no netns": {},
		"three netns": {
			{Dev: 4, Ino: 1, Cookie: 7}: listen(t, 2),
			{Dev: 4, Ino: 2, Cookie: 8}: listen(t, 1),
			{Dev: 4, Ino: 3, Cookie: 9}: listen(t, unixsock.MaxFiles),
		},
	} {
		path := filepath.Join(t.TempDir(), "agent.sock")
		done := offering(t, path, offered)
		transfer := take(t, path)
		if diff := cmp.Diff(cookies(t, offered), cookies(t, transfer.Listeners)); diff != "" {
			t.Errorf("%s: cookies (-want +got):\n%s", name, diff)
		}
		select {
		case err := <-done:
			t.Errorf("%s: Offer has returned %v before Confirm", name, err)
		default:
		}
		if err := transfer.Confirm(); err != nil {
			t.Errorf("%s: Confirm: %v", name, err)
		}
		if err := <-done; err != nil {
			t.Errorf("%s: Offer: %v", name, err)
		}
	}
}

// TestOfferFailsWithoutConfirmation, and the listeners of the old daemon stay open.
func TestOfferFailsWithoutConfirmation(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ answer, want string }{
		"hangs up":       {"", "waiting for the confirmation"},
		"garbage":        {"HTTP/1.1 200 OK\r\n", "waiting for the confirmation"},
		"something else": {"{}\n", "did not confirm"},
	} {
		path := filepath.Join(t.TempDir(), "agent.sock")
		offered := sockets{{Ino: 1}: listen(t, 2)}
		done := offering(t, path, offered)
		transfer := take(t, path)
		if _, err := io.WriteString(transfer.conn, tc.answer); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		_ = transfer.conn.Close() // everything was sent
		if err := <-done; err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got error %v, want one with %q", name, err, tc.want)
		}
		cookies(t, offered)
	}
}

// TestOfferReturnsTheErrorOfTheSender, and the new daemon does not take a part of the listeners for all of them.
func TestOfferReturnsTheErrorOfTheSender(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "agent.sock")
	failure, files := errors.New("a gate cannot be paused"), listen(t, 1)
	done := listenAt(t, path, func(_ *http.Request, c *net.UnixConn) error {
		if _, err := io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n\r\n"); err != nil {
			return err
		}
		return Offer(c, func(send func(attach.NetnsID, []*os.File) error) error {
			return errors.Join(send(attach.NetnsID{Ino: 1}, files), failure)
		})
	})
	if transfer, err := Take(path); err == nil || errors.Is(err, ErrHangs) {
		t.Errorf("Take: got %+v, %v; want an error other than ErrHangs", transfer, err)
	}
	if err := <-done; !errors.Is(err, failure) {
		t.Errorf("Offer: got %v, want %v", err, failure)
	}
}

func TestTakeFromADaemonThatRefuses(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "agent.sock")
	done := listenAt(t, path, func(_ *http.Request, c *net.UnixConn) error {
		_, err := io.WriteString(c, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
		return err
	})
	_, err := Take(path)
	if err == nil || errors.Is(err, ErrHangs) || !strings.Contains(err.Error(), "404") {
		t.Errorf("got %v, want an error with the status 404", err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestTakeFromADaemonThatHangs: either the daemon does not answer within answerTimeout, or it has not for so long that
// its backlog is full.
func TestTakeFromADaemonThatHangs(t *testing.T) {
	t.Parallel()
	for name, waiting := range map[string]int{"no answer": 0, "full backlog": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "agent.sock")
			s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(s) //nolint:errcheck // nothing was written
			err = errors.Join(unix.Bind(s, &unix.SockaddrUnix{Name: path}), unix.Listen(s, 0))
			if err != nil {
				t.Fatal(err)
			}
			for range waiting { // a backlog of 0 has room for one
				c, err := net.Dial("unix", path)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close() //nolint:errcheck // nothing was written
			}
			if transfer, err := Take(path); !errors.Is(err, ErrHangs) {
				t.Errorf("got %+v, %v; want %v", transfer, err, ErrHangs)
			}
		})
	}
}

func TestTakeWithoutADaemonIsEmpty(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "old.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close() // the path of a daemon that was killed
	for _, path := range []string{filepath.Join(dir, "none.sock"), filepath.Join(dir, "old.sock")} {
		transfer, err := Take(path)
		if err != nil || len(transfer.Listeners) > 0 {
			t.Errorf("%s: got %+v, %v; want an empty transfer", path, transfer, err)
			continue
		}
		if err := transfer.Confirm(); err != nil {
			t.Errorf("%s: Confirm: %v", path, err)
		}
	}
}
