package unixsock

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestModeOfALink: a container that can write in the folder puts a link in the place of the socket. The file that the
// link leads to stays as it is.
func TestModeOfALink(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	target, link := filepath.Join(dir, "target"), filepath.Join(dir, "link")
	l, err := net.Listen("unix", target)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // nothing was written
	if err := errors.Join(os.Chmod(target, 0o600), os.Symlink(target, link)); err != nil {
		t.Fatal(err)
	}
	if _, err := setMode(link, 0o660); err == nil {
		t.Error("the link was followed")
	}
	if info, err := os.Stat(target); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("got mode %v, %v; want 0600", info.Mode(), err)
	}
	if _, err := setMode(target, 0o660); err != nil {
		t.Errorf("the socket itself: %v", err)
	}
	if info, err := os.Stat(target); err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("got mode %v, %v; want 0660", info.Mode(), err)
	}
}

// TestBindLeavesThePath to the socket that is there, until Publish. Nothing is left of a socket that was not published.
func TestBindLeavesThePath(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "test.sock")
	bind := func() *Listener {
		t.Helper()
		l, err := Bind("unix", path, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	first := bind()
	if err := first.Publish(); err != nil {
		t.Fatal(err)
	}
	dropped, second := bind(), bind()
	if first.Replaced() {
		t.Error("replaced before Publish")
	}
	if err := errors.Join(dropped.Close(), second.Publish()); err != nil {
		t.Fatal(err)
	}
	if !first.Replaced() || second.Replaced() {
		t.Errorf("first replaced %t, second %t; want true and false", first.Replaced(), second.Replaced())
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("got %v, %v; want the socket alone", entries, err)
	}
}

// TestFolderInThePlaceOfASocket is removed if it is empty: a runtime has made it for a mount.
func TestFolderInThePlaceOfASocket(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "test.sock")
	if err := os.MkdirAll(filepath.Join(path, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Bind("unix", path, slog.New(slog.DiscardHandler)); !errors.Is(err, unix.ENOTEMPTY) {
		t.Errorf("a folder with a file: got %v, want ENOTEMPTY", err)
	}
	if err := os.Remove(filepath.Join(path, "x")); err != nil {
		t.Fatal(err)
	}
	l, err := Bind("unix", path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // nothing was written
	if err := errors.Join(os.Mkdir(path, 0o755), l.Publish()); err != nil {
		t.Errorf("an empty folder: %v", err)
	}
}

// TestBindRemovesUnpublishedSockets of daemons that were killed, and nothing else.
func TestBindRemovesUnpublishedSockets(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	listen := func(network, name string) *net.UnixListener {
		t.Helper()
		l, err := net.ListenUnix(network, &net.UnixAddr{Name: filepath.Join(dir, name), Net: network})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	for _, name := range []string{".DEADDEAD22", ".YOUNGYOUNG", "dead.sock", ".deaddead22"} {
		_ = listen("unix", name).Close() // as the end of its process does
	}
	_ = listen("unixpacket", ".DEADPACKET").Close() // the same
	listen("unix", ".ALIVEALIVE")
	listen("unixpacket", ".ALIVEPACKE")
	if err := os.WriteFile(filepath.Join(dir, ".REGULARFIL"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if old := time.Now().Add(-2 * binding); e.Name() != ".YOUNGYOUNG" {
			err = errors.Join(err, os.Chtimes(filepath.Join(dir, e.Name()), old, old))
		}
	}
	if err != nil {
		t.Fatal(err)
	}

	l, err := Bind("unix", filepath.Join(dir, "new.sock"), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.Publish(), l.Close()); err != nil {
		t.Fatal(err)
	}
	var got []string
	if entries, err = os.ReadDir(dir); err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		got = append(got, e.Name())
	}
	want := []string{
		".ALIVEALIVE", ".ALIVEPACKE", ".REGULARFIL", ".YOUNGYOUNG", ".deaddead22", "dead.sock", "new.sock",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
