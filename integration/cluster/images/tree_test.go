package images

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestMatching adds a root to a tree: the files, and none of the links that every tree has.
func TestMatching(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "usr/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "usr/bin/program"), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("elsewhere", filepath.Join(root, "bin")); err != nil {
		t.Fatal(err)
	}
	files := newTree()
	if err := files.matching(root, "*"); err != nil {
		t.Fatal(err)
	}
	if mode := files.entries["/usr/bin/program"].header.Mode; mode != 0o700 {
		t.Errorf("the program has the mode %o", mode)
	}
	if target := files.entries["/bin"].header.Linkname; target != "usr/bin" {
		t.Errorf("/bin is a link to %q", target)
	}
	if _, err := files.tar(); err != nil {
		t.Error(err)
	}
	err := files.matching(root, "usr/*", "etc/*")
	if err == nil || !strings.Contains(err.Error(), "etc/*") {
		t.Errorf("a pattern that matches nothing: %v", err)
	}
}
