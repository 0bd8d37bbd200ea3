package attach_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/plugin/attach"
)

func TestOptedInFile(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	f := attach.NewOptedInFile(dir)
	if o, err := f.Read(); err == nil {
		t.Errorf("before the first write: got %+v, want an error", o)
	}
	for _, names := range [][]string{{}, {"ci", "dev"}} {
		want := attach.OptedIn{AsOf: time.Now().Round(0), Namespaces: names}
		if err := f.Write(want); err != nil {
			t.Fatal(err)
		}
		got, err := f.Read()
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("got %v, (-want +got):\n%s", err, diff)
		}
		for _, name := range []string{"ci", "c"} {
			if got, want := got.Has(name), name == "ci" && len(names) > 0; got != want {
				t.Errorf("%q has %s: got %t, want %t", names, name, got, want)
			}
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("the directory has %v, %v; want the list alone", entries, err)
	}
	for range 2 {
		if err := f.Remove(); err != nil {
			t.Errorf("Remove: %v", err)
		}
	}
}

// TestDamagedOptedInFile: a list that is not the daemon's is an error, and never read as one without namespaces.
func TestDamagedOptedInFile(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		``, `{}`, `null`, `[]`, `{"namespaces":[]}`, `{"asOf":"2026-01-02T03:04:05Z","namesp`, `{"asOf":"yesterday"}`,
	} {
		f := attach.NewOptedInFile(t.TempDir())
		if err := os.WriteFile(string(f), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if o, err := f.Read(); err == nil {
			t.Errorf("%s: got %+v, want an error", text, o)
		}
	}
}
