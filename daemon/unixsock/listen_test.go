package unixsock

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestGroupMayUseTheSocket of its directory with the setgid bit, or one that root gives to it later.
func TestGroupMayUseTheSocket(t *testing.T) {
	t.Parallel()
	const user, group = 65533, 65532
	chgrp := func(path string, mode os.FileMode) {
		t.Helper()
		if err := errors.Join(os.Chown(path, 0, group), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	cases := []struct {
		name    string
		bind    func(network, path string, log *slog.Logger) (*Listener, error)
		before  func(dir string)
		after   func(socket string)
		gid     int
		mode    os.FileMode
		welcome bool
	}{
		{name: "directory of root", bind: BindForGroup, gid: group, mode: 0o600},
		{
			name: "directory of the group", bind: BindForGroup, gid: group, mode: 0o660, welcome: true,
			before: func(dir string) { chgrp(dir, 0o750|os.ModeSetgid) },
		},
		{
			name: "another group", bind: BindForGroup, gid: group + 1, mode: 0o660,
			before: func(dir string) { chgrp(dir, 0o755|os.ModeSetgid) },
		},
		{
			name: "socket given to the group", bind: BindForGroup, gid: group, mode: 0o660, welcome: true,
			after: func(socket string) { chgrp(socket, 0o660) },
		},
		{
			name: "group root", bind: BindForGroup, gid: 0, mode: 0o666,
			after: func(socket string) { testbed.Run(t, "chmod", "666", socket) },
		},
		{
			name: "socket for root alone", bind: Bind, gid: group, mode: 0o660,
			before: func(dir string) { chgrp(dir, 0o755|os.ModeSetgid) },
			after:  func(socket string) { chgrp(socket, 0o660) },
		},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := openTempDir(t)
			if tc.before != nil {
				tc.before(dir)
			}
			path := filepath.Join(dir, "test.sock")
			l, err := tc.bind("unixpacket", path, slog.New(slog.DiscardHandler))
			if err == nil {
				err = l.Publish()
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
			if tc.after != nil {
				tc.after(path)
			}
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != tc.mode {
				t.Errorf("mode %v, %v; want %v", info.Mode().Perm(), err, tc.mode)
			}
			go func() { // until the test closes l
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = c.Write([]byte("welcome"))
					_ = c.Close()
				}
			}()
			if got, err := ask(path, user, tc.gid); (got == "welcome") != tc.welcome {
				t.Errorf("got %q, %v; want it to be welcome: %t", got, err, tc.welcome)
			}
			if got, err := ask(path, 0, 0); got != "welcome" {
				t.Errorf("root: got %q, %v", got, err)
			}
		})
	}
}

// openTempDir is t.TempDir, which every user may enter.
func openTempDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// ask connects on a thread of that user and group, which ends with the call, and reads.
func ask(path string, uid, gid int) (answer string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		for call, id := range map[uintptr]uintptr{unix.SYS_SETGROUPS: 0, unix.SYS_SETRESGID: uintptr(gid)} {
			if _, _, errno := unix.RawSyscall(call, id, id, id); errno != 0 {
				err = errno
				return
			}
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			err = errno
			return
		}
		c, dialErr := net.Dial("unixpacket", path)
		if err = dialErr; err != nil {
			return
		}
		defer c.Close() //nolint:errcheck // only read
		var data []byte
		data, err = io.ReadAll(c)
		answer = string(data)
	}()
	<-done
	return answer, err
}
