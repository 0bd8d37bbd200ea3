package upstream

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/config"
)

func TestSecretStaysTheSame(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "run", "proxy")
	first, err := Secret(folder)
	if err != nil || !validSecret.MatchString(first) {
		t.Fatalf("got %q, %v; want a secret", first, err)
	}
	again, err := Secret(folder)
	if err != nil || again != first {
		t.Errorf("a second time: got %q, %v; want the same", again, err)
	}
	other, err := Secret(t.TempDir())
	if err != nil || other == first {
		t.Errorf("in another folder: got %q, %v; want another secret", other, err)
	}
	wantFiles(t, folder, SecretFile)
}

// TestDaemonsAgreeOnTheSecret, if they start at the same time.
func TestDaemonsAgreeOnTheSecret(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	secrets := make([]string, 8)
	var g errgroup.Group
	for i := range secrets {
		g.Go(func() (err error) {
			secrets[i], err = Secret(folder)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, s := range secrets {
		if s != secrets[0] {
			t.Errorf("got secrets %q; want the same for all", secrets)
		}
	}
	wantFiles(t, folder, SecretFile)
}

// TestSecretIsForTheProxyAlone: for root, or the group of a folder that is meant for it.
func TestSecretIsForTheProxyAlone(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ folder, want os.FileMode }{
		{0o755, 0o600},
		{0o750 | os.ModeSetgid, 0o640},
	} {
		folder := t.TempDir()
		if err := os.Chmod(folder, tc.folder); err != nil {
			t.Fatal(err)
		}
		if _, err := Secret(folder); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(filepath.Join(folder, SecretFile))
		if err != nil || info.Mode() != tc.want {
			t.Errorf("in a folder with mode %v: got %v, %v; want %v", tc.folder, info.Mode(), err, tc.want)
		}
	}
}

// TestSecretTrustsNoFileOfAProxy, which can write in the folder: neither links nor other content.
func TestSecretTrustsNoFileOfAProxy(t *testing.T) {
	t.Parallel()
	elsewhere := filepath.Join(t.TempDir(), "elsewhere")
	valid := strings.Repeat("a1", secretBytes)
	if err := os.WriteFile(elsewhere, []byte(valid), 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	for name, put := range map[string]func(path string) error{
		"a link to another file":  func(path string) error { return os.Symlink(elsewhere, path) },
		"a link to nothing":       func(path string) error { return os.Symlink(elsewhere+"-none", path) },
		"a FIFO":                  func(path string) error { return unix.Mkfifo(path, 0o600) },
		"an empty folder":         func(path string) error { return os.Mkdir(path, 0o700) },
		"nothing":                 write(""),
		"a header":                write(valid[2:] + "\r\n"),
		"more than a secret":      write(valid + "\r"),
		"digits in another style": write(strings.ToUpper(valid)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			if err := put(filepath.Join(folder, SecretFile)); err != nil {
				t.Fatal(err)
			}
			got, err := Secret(folder)
			if err != nil || !validSecret.MatchString(got) || got == valid {
				t.Errorf("got %q, %v; want a new secret", got, err)
			}
			wantFiles(t, folder, SecretFile)
			if now, err := os.ReadFile(elsewhere); err != nil || string(now) != valid {
				t.Errorf("the other file: got %q, %v; want it unchanged", now, err)
			}
		})
	}
}

// wantFiles fails the test unless the folder has this file alone.
func wantFiles(t *testing.T, folder, name string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) != 1 || entries[0].Name() != name {
		t.Errorf("the folder: got %v, %v; want %s alone", entries, err, name)
	}
}

// between is a connection between two addresses.
type between struct {
	net.Conn
	from, to *net.TCPAddr
}

func (c between) LocalAddr() net.Addr  { return c.from }
func (c between) RemoteAddr() net.Addr { return c.to }

// TestSecretIsForThisNode: a pod that the daemon has located is on it.
func TestSecretIsForThisNode(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		address, from, to, want string
	}{
		{"127.0.0.1:1", "127.0.0.1", "127.0.0.1", "a1b2"},
		{"[::1]:1", "::1", "::1", "a1b2"},
		{"192.0.2.1:1", "192.0.2.1", "192.0.2.1", "a1b2"},
		{"192.0.2.7:1", "192.0.2.1", "192.0.2.7", ""},
		{"[2001:db8::7]:1", "2001:db8::1", "2001:db8::7", ""},
		{"", "10.0.0.1", "10.0.0.7", "a1b2"},
	} {
		u := newUpstream(tc.address, config.Connect)
		u.Authenticate("a1b2")
		conn := between{from: &net.TCPAddr{IP: net.ParseIP(tc.from)}, to: &net.TCPAddr{IP: net.ParseIP(tc.to)}}
		if got := u.secretFor(conn); got != tc.want {
			t.Errorf("upstream %q, from %s to %s: got the secret %q, want %q", tc.address, tc.from, tc.to, got, tc.want)
		}
	}
}
