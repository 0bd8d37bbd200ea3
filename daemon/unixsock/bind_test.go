package unixsock

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

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
