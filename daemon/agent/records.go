package agent

import (
	"errors"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/plugin/attach"
)

// leftoverAge is the age at which a temporary file of the record directory is taken for one that a killed writer left.
const leftoverAge = time.Minute

// recordWatch reads the records on disk when they have changed.
type recordWatch struct {
	store attach.Store

	mu    sync.Mutex // guards the fields below; no lock is taken under it
	seen  time.Time  // the state of the directory that was read last
	again bool       // the next read returns the records in any case
}

// read returns the records if the directory has changed since the last call, or none. Records that cannot be read are
// reported in err, beside the others. It also removes the leftovers of killed writers.
func (w *recordWatch) read() ([]attach.Record, error) {
	w.mu.Lock()
	seen, again := w.seen, w.again
	w.again = false
	w.mu.Unlock()
	changed, err := w.store.Changed(seen)
	if err != nil || changed.Equal(seen) && !again {
		return nil, err
	}
	records, err := w.store.List()
	w.mu.Lock()
	w.seen = changed // looked up before List: a record that is written meanwhile is for the next call
	w.mu.Unlock()
	return records, errors.Join(err, w.store.Sweep(leftoverAge))
}

// rescan makes the next read return the records.
func (w *recordWatch) rescan() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.again = true
}
