package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-cni/sluice/plugin/files"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Store is the directory of records, one file for each attachment. A file is complete or absent: it is
// written under a temporary name and renamed. It is not synced, since it is of no use without its netns,
// and no netns outlives the boot.
type Store struct{ dir string }

// NewStore returns the store under stateDir. The first write makes its directory.
func NewStore(stateDir string) Store { return Store{filepath.Join(stateDir, "attachments")} }

const recordSuffix = ".json"

// A container ID has no colon, so the first colon in the name ends it.
func (s Store) path(id ID) string {
	return filepath.Join(s.dir, id.ContainerID+":"+id.IfName+recordSuffix)
}

// temporary is the pattern of the paths of files that are being written.
func (s Store) temporary() string { return filepath.Join(s.dir, "new-*.tmp") }

// Write makes or replaces the record of r.ID.
func (s Store) Write(r Record) error {
	if err := s.write(r); err != nil {
		return fmt.Errorf("recording attachment %s: %w", r.ID, err)
	}
	return nil
}

func (s Store) write(r Record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	return files.Replace(s.path(r.ID), data, 0o600, s.temporary())
}

// Writable reports why a record could not be written.
func (s Store) Writable() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(s.dir, filepath.Base(s.temporary()))
	if err != nil {
		return err
	}
	_, werr := tmp.Write(make([]byte, 4<<10)) // on a full disk a file can be made, but not written
	return errors.Join(werr, tmp.Close(), os.Remove(tmp.Name()))
}

// Share writes the ruleset into the records of the other attachments in the netns of id: all attachments of one netns
// share one ruleset. Records without a ruleset stay so.
func (s Store) Share(id ID, netns NetnsID, installed *ruleset.Installed) error {
	siblings, err := s.Siblings(id, netns)
	errs := []error{err}
	for _, r := range siblings {
		if r.Installed != nil {
			r.Installed = installed
			errs = append(errs, s.Write(r))
		}
	}
	return errors.Join(errs...)
}

// Read returns the record of id; errors.Is(err, os.ErrNotExist) if there is none.
func (s Store) Read(id ID) (Record, error) { return read(s.path(id)) }

func read(path string) (Record, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Record{}, fmt.Errorf("reading attachment record: %w", err)
	}
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return Record{}, fmt.Errorf("reading attachment record %s: %w", path, err)
	}
	return r, nil
}

// Remove deletes the record of id; without such a record it does nothing.
func (s Store) Remove(id ID) error {
	if err := files.Remove(s.path(id)); err != nil {
		return fmt.Errorf("removing attachment record: %w", err)
	}
	return nil
}

// RemovePassed deletes the records of attachments that are not captured and have no rules.
func (s Store) RemovePassed() error {
	records, err := s.List()
	errs := []error{err}
	for _, r := range records {
		if r.State == Passed && r.Installed == nil {
			errs = append(errs, s.Remove(r.ID))
		}
	}
	return errors.Join(errs...)
}

// settling is the time after a change in which another change may leave the directory's mtime the same: the kernel's
// clock for files advances in ticks.
const settling = 50 * time.Millisecond

// Changed returns a time that differs from last if records may have changed since Changed returned last.
func (s Store) Changed(last time.Time) (time.Time, error) {
	info, err := os.Stat(s.dir)
	if errors.Is(err, os.ErrNotExist) {
		return last, nil
	}
	if err != nil {
		return last, fmt.Errorf("attachment records: %w", err)
	}
	// Abs, as an mtime in the future is from before the clock jumped back: it is no more recent than one in the past.
	if time.Since(info.ModTime()).Abs() < settling {
		return info.ModTime().Add(-settling), nil // not its mtime, so that the next call differs
	}
	return info.ModTime(), nil
}

// List reads every record. Records that cannot be read are reported together in the error; the others are returned
// beside it.
func (s Store) List() ([]Record, error) { return s.list("") }

// Siblings reads the records of the container's other attachments in the same netns: a container that joins
// several networks has an attachment for each of them, and they share one ruleset. Its error is that of List.
func (s Store) Siblings(id ID, netns NetnsID) ([]Record, error) {
	records, err := s.list(id.ContainerID + ":")
	return slices.DeleteFunc(records, func(r Record) bool { return r.ID == id || r.NetnsID != netns }), err
}

func (s Store) list(prefix string) ([]Record, error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing attachment records: %w", err)
	}
	var records []Record
	var errs []error
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), prefix) || !strings.HasSuffix(e.Name(), recordSuffix) {
			continue
		}
		r, err := read(filepath.Join(s.dir, e.Name()))
		switch {
		case err == nil:
			records = append(records, r)
		case !errors.Is(err, os.ErrNotExist): // else it was removed after ReadDir
			errs = append(errs, err)
		}
	}
	return records, errors.Join(errs...)
}

// Sweep removes temporary files older than age: writers that were killed left them.
func (s Store) Sweep(age time.Duration) error {
	leftovers, err := filepath.Glob(s.temporary())
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range leftovers {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > age {
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}
