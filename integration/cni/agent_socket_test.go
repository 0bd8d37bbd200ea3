package cni

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestAgentSocketIsForRoot, by its mode; where another mode lets others connect, by the user of the peer.
func TestAgentSocketIsForRoot(t *testing.T) {
	t.Parallel()
	n := testbed.New(t)
	// Every user may enter the folder, so that only the socket itself keeps them out.
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(dir, "agent.sock")
	n.Config["agentSocket"] = socket
	d := testbed.Launch(n.Host, n.Binary("sluiced"), "run", "--config", testbed.ConfigFile(t, n.Config))
	asRoot := func() error { return askSocket(t.Context(), socket, 0) }
	testbed.Eventually(t, "the daemon answers root", func() bool { return asRoot() == nil })

	info, err := os.Stat(socket)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the agent socket: %v, %v; want 0600", info.Mode().Perm(), err)
	}
	if err := askSocket(t.Context(), socket, 65534); errors.Is(err, unix.EINVAL) {
		t.Fatal("this user namespace has only one user: to see another one turned away, run this test as root")
	} else if !errors.Is(err, unix.EACCES) {
		t.Errorf("asking as another user: %v; want permission denied", err)
	}
	if err := os.Chmod(socket, 0o666); err != nil {
		t.Fatal(err)
	}
	err = askSocket(t.Context(), socket, 65534)
	if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("asking as another user where the mode allows it: %v; want the daemon to hang up", err)
	}
	if err := asRoot(); err != nil {
		t.Errorf("asking as root afterwards: %v", err)
	}
	testbed.Eventually(t, "the daemon logs that it turned a peer away", func() bool {
		return strings.Contains(d.Log(), "peer turned away")
	})
}

// askSocket asks for the daemon's status as uid.
func askSocket(ctx context.Context, socket string, uid int) error {
	c, err := dialAs(socket, uid)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // asked once
	resp, err := testbed.RoundTrip(ctx, c, "GET /v1/status HTTP/1.1\r\nHost: sluiced\r\n\r\n")
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// dialAs connects on a thread of that user. The thread ends with the call.
func dialAs(socket string, uid int) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if uid != 0 {
			// Of this thread alone; syscall.Setresuid would change all threads.
			id := uintptr(uid)
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, id, id, id); errno != 0 {
				done <- result{nil, errno}
				return
			}
		}
		c, err := net.Dial("unix", socket)
		done <- result{c, err}
	}()
	r := <-done
	return r.conn, r.err
}
