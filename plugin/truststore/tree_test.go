package truststore

import (
	"context"
	"encoding/pem"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tree makes a root from paths and contents. A content "-> X" is a symbolic link to X, a path with a slash at its end a
// folder.
func tree(t testing.TB, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, content := range files {
		full := filepath.Join(root, path)
		err := os.MkdirAll(filepath.Dir(full), 0o755)
		target, isLink := strings.CutPrefix(content, "-> ")
		switch {
		case err != nil:
		case strings.HasSuffix(path, "/"):
			err = os.MkdirAll(full, 0o755)
		case isLink:
			err = os.Symlink(target, full)
		default:
			err = os.WriteFile(full, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// add runs Add with time enough for a busy machine.
func add(t testing.TB, root string, ca []byte) Report {
	t.Helper()
	return addWith(t, root, ca, Options{})
}

func addWith(t testing.TB, root string, ca []byte, options Options) Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return Add(ctx, root, ca, options)
}

// store returns the report on a path.
func (r Report) store(t testing.TB, path string) Store {
	t.Helper()
	for _, s := range r.Stores {
		if s.Path == path {
			return s
		}
	}
	t.Fatalf("no report on %s: %+v", path, r)
	return Store{}
}

func wantAction(t testing.TB, r Report, path string, want Action) {
	t.Helper()
	if got := r.store(t, path); got.Action != want {
		t.Errorf("%s: got %s (%s), want %s", path, got.Action, got.Error, want)
	}
}

func wantState(t testing.TB, r Report, want State) {
	t.Helper()
	if r.State != want {
		t.Errorf("got the state %s, want %s: %+v", r.State, want, r)
	}
}

// read reads a file in a root, as a process in it does.
func read(t testing.TB, name, path string) string {
	t.Helper()
	r, err := openRoot(name)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	f, err := r.openat2(path, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }() // only read
	data, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// wantCertificates checks that a bundle has exactly these certificates, in any order.
func wantCertificates(t testing.TB, bundle string, want ...[]byte) {
	t.Helper()
	got := make(map[string]int)
	for data := []byte(bundle); ; {
		block, rest := pem.Decode(data)
		if block == nil {
			break
		}
		got[string(block.Bytes)]++
		data = rest
	}
	if len(got) != len(want) {
		t.Errorf("got %d certificates, want %d:\n%s", len(got), len(want), bundle)
	}
	for i, ca := range want {
		block, _ := pem.Decode(ca)
		if n := got[string(block.Bytes)]; n != 1 {
			t.Errorf("certificate %d is in the bundle %d times", i, n)
		}
	}
}

// anyLength is for scans that look for no certificate in particular.
func anyLength(int) bool { return true }

// mount makes a mount that goes away with the test.
func mount(t testing.TB, source, target, fstype string, flags uintptr, data string) {
	t.Helper()
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		t.Fatalf("mounting %s: %v", target, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			t.Errorf("unmounting %s: %v", target, err)
		}
	})
}

// readOnly makes a tree a mount that cannot be written, with a tmpfs at /dev as every runtime makes one.
func readOnly(t testing.TB, root string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(root, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	mount(t, root, root, "", unix.MS_BIND, "")
	mount(t, "tmpfs", filepath.Join(root, "dev"), "tmpfs", 0, "")
	if err := unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
}
