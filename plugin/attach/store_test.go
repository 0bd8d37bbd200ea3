package attach_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/plugin/attach"
)

// newStore returns a store and the directory of its records.
func newStore(t *testing.T) (attach.Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	return attach.NewStore(dir), filepath.Join(dir, "attachments")
}

func write(t *testing.T, s attach.Store, records ...attach.Record) {
	t.Helper()
	for _, r := range records {
		if err := s.Write(r); err != nil {
			t.Fatalf("Write: %v", err)
		}
	}
}

func TestStoreWriteReadRemove(t *testing.T) {
	t.Parallel()
	s, dir := newStore(t)
	r := record("4f2a", "eth0")
	if _, err := s.Read(r.ID); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Read before Write: got %v, want os.ErrNotExist", err)
	}
	write(t, s, r)
	got, err := s.Read(r.ID)
	if err != nil {
		t.Fatalf("Read: %v", err)
	}
	if diff := cmp.Diff(r, got, same); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	r.State, r.Installed = attach.Passed, nil
	write(t, s, r)
	if got, err = s.Read(r.ID); err != nil || got.State != attach.Passed || got.Installed != nil {
		t.Errorf("Read after the second Write: got %+v, %v; want the second record", got, err)
	}
	if names := files(t, dir); !slices.Equal(names, []string{"4f2a:eth0.json"}) {
		t.Errorf("got files %q, want one", names)
	}
	for range 2 {
		if err := s.Remove(r.ID); err != nil {
			t.Errorf("Remove: %v", err)
		}
	}
	if _, err := s.Read(r.ID); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Read after Remove: got %v, want os.ErrNotExist", err)
	}
}

func TestStoreIsForRootOnly(t *testing.T) {
	t.Parallel()
	s, dir := newStore(t)
	write(t, s, record("4f2a", "eth0"))
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, "4f2a:eth0.json"): 0o600} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != want {
			t.Errorf("%s: got mode %o, want %o", path, got, want)
		}
	}
}

func TestStoreListsNothingBeforeTheFirstWrite(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	got, err := s.List()
	if err != nil || len(got) != 0 {
		t.Errorf("List: got %v, %v; want nothing", got, err)
	}
	if err := s.Remove(attach.ID{ContainerID: "4f2a", IfName: "eth0"}); err != nil {
		t.Errorf("Remove: %v", err)
	}
	if err := s.Sweep(0); err != nil {
		t.Errorf("Sweep: %v", err)
	}
	if at, err := s.Changed(time.Time{}); err != nil || !at.IsZero() {
		t.Errorf("Changed: got %v, %v; want the same as before", at, err)
	}
}

func TestStoreSiblings(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	eth0, net1 := record("4f2a", "eth0"), record("4f2a", "net1")
	elsewhere := record("4f2a", "net2")
	elsewhere.NetnsID.Cookie++ // an attachment of the same container, in an earlier netns
	other, prefix := record("99", "eth0"), record("4f2a4", "eth0")
	write(t, s, eth0, net1, elsewhere, other, prefix)
	got, err := s.Siblings(eth0.ID, eth0.NetnsID)
	if err != nil {
		t.Fatalf("Siblings: %v", err)
	}
	if diff := cmp.Diff([]attach.Record{net1}, got, same); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestStoreShare: the attachments of one netns share one ruleset; records without a ruleset stay so.
func TestStoreShare(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	eth0, net1, passed := record("4f2a", "eth0"), record("4f2a", "net1"), record("4f2a", "net2")
	passed.State, passed.Installed = attach.Passed, nil
	elsewhere := record("4f2a", "net3")
	elsewhere.NetnsID.Cookie++
	write(t, s, eth0, net1, passed, elsewhere)
	installed := *eth0.Installed
	installed.Ruleset.Interfaces = []string{"eth0", "net1"}
	if err := s.Share(eth0.ID, eth0.NetnsID, &installed); err != nil {
		t.Fatalf("Share: %v", err)
	}
	net1.Installed = &installed
	for _, want := range []attach.Record{eth0, net1, passed, elsewhere} { // the caller writes the record of eth0 itself
		got, err := s.Read(want.ID)
		if err != nil {
			t.Fatalf("Read: %v", err)
		}
		if diff := cmp.Diff(want, got, same); diff != "" {
			t.Errorf("%s (-want +got):\n%s", want.ID, diff)
		}
	}
}

func TestStoreIgnoresAndSweepsHalfWrittenFiles(t *testing.T) {
	t.Parallel()
	s, dir := newStore(t)
	write(t, s, record("4f2a", "eth0"))
	for name, age := range map[string]time.Duration{
		"new-1.tmp": time.Hour, "new-2.tmp": 0, "new-3.tmp": 2 * time.Minute,
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(`{"containerID":"half`), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := s.List(); err != nil || len(got) != 1 {
		t.Errorf("List: got %v, %v; want only the complete record", got, err)
	}
	if err := s.Sweep(time.Minute); err != nil {
		t.Errorf("Sweep: %v", err)
	}
	if got, want := files(t, dir), []string{"4f2a:eth0.json", "new-2.tmp"}; !slices.Equal(got, want) {
		t.Errorf("after Sweep: got %q, want %q", got, want)
	}
}

func TestStoreReportsCorruptRecordsBesideTheOthers(t *testing.T) {
	t.Parallel()
	s, dir := newStore(t)
	write(t, s, record("4f2a", "eth0"), record("4f2a", "net1"))
	for name, content := range map[string]string{
		"bad:eth0.json": "{", "empty:eth0.json": "", "4f2a:bad.json": `{"netnsID":"x"}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.List()
	if len(got) != 2 {
		t.Errorf("List: got %d records, want 2", len(got))
	}
	for _, name := range []string{"bad:eth0.json", "empty:eth0.json", "4f2a:bad.json"} {
		checkError(t, "List", err, filepath.Join(dir, name))
	}
	if _, err := s.Siblings(record("99", "eth0").ID, attach.NetnsID{}); err != nil {
		t.Errorf("Siblings of another container: got %v, want no error", err)
	}
	siblings, err := s.Siblings(record("4f2a", "eth0").ID, record("4f2a", "eth0").NetnsID)
	if len(siblings) != 1 || err == nil {
		t.Errorf("Siblings: got %d and %v, want one and an error", len(siblings), err)
	}
	_, err = s.Read(attach.ID{ContainerID: "bad", IfName: "eth0"})
	checkError(t, "Read", err, filepath.Join(dir, "bad:eth0.json"))
}

func TestStoreWithConcurrentWriters(t *testing.T) {
	t.Parallel()
	s, dir := newStore(t)
	const writers, rounds = 8, 25
	var wg sync.WaitGroup
	stop := make(chan struct{})
	reader := make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				reader <- nil
				return
			default:
			}
			if _, err := s.List(); err != nil {
				reader <- err
				return
			}
		}
	}()
	for w := range writers {
		wg.Go(func() {
			own := record(fmt.Sprintf("c%d", w), "eth0")
			for range rounds {
				for _, r := range []attach.Record{own, record("shared", "eth0")} {
					if err := s.Write(r); err != nil {
						t.Errorf("Write: %v", err)
					}
				}
				if err := s.Remove(own.ID); err != nil {
					t.Errorf("Remove: %v", err)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	if err := <-reader; err != nil {
		t.Errorf("List meanwhile: %v", err)
	}
	if got := files(t, dir); !slices.Equal(got, []string{"shared:eth0.json"}) {
		t.Errorf("got files %q, want only the shared record", got)
	}
}

func TestStoreChanged(t *testing.T) {
	t.Parallel()
	s, dir := newStore(t)
	write(t, s, record("4f2a", "eth0"))
	last := settled(t, s, dir)
	if again, err := s.Changed(last); err != nil || !again.Equal(last) {
		t.Errorf("nothing changed: got %v, %v; want %v", again, err, last)
	}
	for name, change := range map[string]func() error{
		"another":  func() error { return s.Write(record("99", "eth0")) },
		"replaced": func() error { return s.Write(record("4f2a", "eth0")) },
		"removed":  func() error { return s.Remove(record("4f2a", "eth0").ID) },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		now, err := s.Changed(last)
		if err != nil || now.Equal(last) {
			t.Errorf("%s: got %v, %v; want another time than %v", name, now, err, last)
		}
		last = settled(t, s, dir)
	}
}

// TestStoreChangedWhenTheClockJumpsBack: a first call of Changed may come right after a change, and a second change
// right after the call in the same tick of the kernel's clock. If the clock then jumps back, both are in the future.
func TestStoreChangedWhenTheClockJumpsBack(t *testing.T) {
	t.Parallel()
	s, dir := newStore(t)
	write(t, s, record("4f2a", "eth0"))
	soon := time.Now().Add(10 * time.Second)
	if err := os.Chtimes(dir, time.Time{}, soon); err != nil {
		t.Fatal(err)
	}
	at, err := s.Changed(time.Time{})
	if err != nil || !at.Equal(soon) { // a call right after the change returns another time
		t.Errorf("Changed: got %v, %v; want %v", at, err, soon)
	}
}

// settled makes the last change an hour old, and returns the time that Changed returns for it.
func settled(t *testing.T, s attach.Store, dir string) time.Time {
	t.Helper()
	old := time.Now().Add(-time.Hour).Truncate(time.Second)
	if err := os.Chtimes(dir, time.Time{}, old); err != nil {
		t.Fatal(err)
	}
	at, err := s.Changed(time.Time{})
	if err != nil || !at.Equal(old) {
		t.Fatalf("Changed: got %v, %v; want %v", at, err, old)
	}
	return at
}

func TestStoreThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s := attach.NewStore(file)
	checkError(t, "Write", s.Write(record("4f2a", "eth0")), "recording attachment 4f2a/eth0")
	checkError(t, "Writable", s.Writable(), file)
	fine, dir := newStore(t)
	checkError(t, "Writable", fine.Writable(), "")
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("Writable: got files %q left, want none", left)
	}
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// FuzzRecord: for every content of a record's file Read returns a record or an error with the file's name, and a record
// survives being written and read again.
func FuzzRecord(f *testing.F) {
	for _, seed := range []string{
		`{}`, `null`, `[]`, `{"containerID":"4f2a","ifName":"eth0","netnsID":{"ino":1},"state":"provisional"}`,
		`{"installed":{"ruleset":{"interfaces":["eth0"],"includePorts":["80","1-2"],"excludeCIDRs":["10.0.0.0/8"]}}}`,
		`{"ips":["10.0.0.1","fe80::1%eth0"]}`,
	} {
		f.Add([]byte(seed))
	}
	dir := filepath.Join(f.TempDir(), "state")
	s := attach.NewStore(dir)
	id := attach.ID{ContainerID: "4f2a", IfName: "eth0"}
	if err := s.Writable(); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, "attachments", "4f2a:eth0.json"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := s.Read(id)
		if err != nil {
			if !strings.Contains(err.Error(), "4f2a:eth0.json") {
				t.Errorf("%q: got %v, want the file's name", data, err)
			}
			return
		}
		r.ID = id
		if err := s.Write(r); err != nil {
			return // not every record that can be read can be written, such as a port range without a text form
		}
		again, err := s.Read(id)
		if err != nil {
			t.Fatalf("%q: reading the written record: %v", data, err)
		}
		if diff := cmp.Diff(r, again, same); diff != "" {
			t.Errorf("%q (-want +got):\n%s", data, diff)
		}
	})
}
