package files_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-cni/sluice/plugin/files"
)

func TestReplace(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path, pattern := filepath.Join(dir, "file"), filepath.Join(dir, "new-*.tmp")
	for _, content := range []string{"first", "the second"} {
		if err := files.Replace(path, []byte(content), 0o640, pattern); err != nil {
			t.Fatal(err)
		}
		got, err := files.ReadBounded(path, int64(len(content)))
		if err != nil || string(got) != content {
			t.Errorf("read %q, %v; want %q", got, err, content)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o640 {
		t.Errorf("stat: %v, %v; want mode 0640", info, err)
	}
	if err := files.Replace(filepath.Join(dir, "missing", "file"), nil, 0o600, pattern); err == nil {
		t.Error("replaced a file in a folder that does not exist")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("left %v, %v; want the file alone", entries, err)
	}
}

func TestReadBounded(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	if data, err := files.ReadBounded(path, 4); err == nil {
		t.Errorf("read %q beyond the limit", data)
	}
}
