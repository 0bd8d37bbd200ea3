package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sluice-cni/sluice/plugin/files"
)

// OptedIn lists the namespaces in which the daemon has seen a pod or the namespace itself opt in, for the time in which
// the daemon cannot be asked.
type OptedIn struct {
	// AsOf is the time at which the daemon last compared the list with the labels.
	AsOf       time.Time `json:"asOf"`
	Namespaces []string  `json:"namespaces"`
}

// Has reports whether a namespace is on the list.
func (o OptedIn) Has(namespace string) bool { return slices.Contains(o.Namespaces, namespace) }

// OptedInFile is the file of the list. It outlives the boot, because pods start before the daemon does.
type OptedInFile string

// NewOptedInFile returns the file under dataDir.
func NewOptedInFile(dataDir string) OptedInFile {
	return OptedInFile(filepath.Join(dataDir, "opted-in.json"))
}

// Read returns the list. A list without a time is an error: it is not the daemon's.
func (f OptedInFile) Read() (OptedIn, error) {
	var o OptedIn
	data, err := os.ReadFile(string(f))
	if err == nil {
		err = json.Unmarshal(data, &o)
	}
	if err == nil && o.AsOf.IsZero() {
		err = errors.New("it has no time")
	}
	if err != nil {
		return OptedIn{}, fmt.Errorf("reading the namespaces that opted in from %s: %w", string(f), err)
	}
	return o, nil
}

// Write replaces the list. A reader finds the old list or the new one, after a power loss or with a full disk too. Only
// one process writes at a time.
func (f OptedInFile) Write(o OptedIn) error {
	data, err := json.Marshal(o)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(string(f)), 0o755)
	}
	if err == nil {
		err = files.ReplaceSynced(string(f), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("writing the namespaces that opted in: %w", err)
	}
	return nil
}

// Remove removes the list; without one it does nothing.
func (f OptedInFile) Remove() error {
	if err := files.Remove(string(f)); err != nil {
		return fmt.Errorf("removing the namespaces that opted in: %w", err)
	}
	return nil
}
