package trust

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/plugin/files"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// The files in a container. The folder is at the top of the root, because a volume may be mounted at any other place:
// the runtime could not make a folder in a read-only volume at /run, and would not create the container.
const (
	// MountPath is the folder in a container.
	MountPath = "/.sluice-ca"
	// CAPath is the CA alone, for variables that name additional certificates.
	CAPath = MountPath + "/ca.crt"
	// BundlePath is the file for variables that name all certificates: the container's own bundle, or else public roots
	// and the CA. It is alone in its folder, over which the hook mounts a link to the container's bundle.
	BundlePath = MountPath + "/roots/bundle.crt"
)

// CAName is the name of the file in Config.Dir that has the CA in PEM.
const CAName = "ca.pem"

// ca is the CA as it is now. Its zero value is no CA.
type ca struct {
	fingerprints string // of the certificates, joined
	problem      string // the reason why there is none
}

func (c ca) exists() bool { return c.fingerprints != "" }

func joined(fingerprints []string) string { return strings.Join(fingerprints, " ") }

// RemoveHookFiles removes the files of the hook from dir (Config.Dir). The folder that containers see stays: the
// clients of those that run read it.
func RemoveHookFiles(dir string) error {
	f := caFiles{dir: dir}
	if err := errors.Join(os.RemoveAll(f.caPEM()), os.RemoveAll(f.reports())); err != nil {
		return fmt.Errorf("removing the files of the hook: %w", err)
	}
	return nil
}

// caFiles keeps the files in Dir:
//
//	ca.pem                  the CA, for the hook; only if there is one
//	files/                  the folder that containers see
//	files/ca.crt            the CA, or the public roots until there is one: a client may fail at an empty file
//	files/roots/bundle.crt  the public roots and the CA
//	reports/ID.json         the hook's reports
type caFiles struct {
	source, dir string
	roots       []string
	log         *slog.Logger

	mu   sync.Mutex // one writer at a time; guards the fields below
	said string     // the last problem that was logged
}

func newCAFiles(source, dir string, log *slog.Logger) *caFiles {
	return &caFiles{source: source, dir: dir, roots: truststore.MachineBundles, log: log}
}

func (f *caFiles) caPEM() string   { return filepath.Join(f.dir, CAName) }
func (f *caFiles) folder() string  { return filepath.Join(f.dir, "files") }
func (f *caFiles) reports() string { return filepath.Join(f.dir, "reports") }
func (f *caFiles) report(containerID string) string {
	return filepath.Join(f.reports(), containerID+".json")
}

// onHost returns the path in Dir of a file that containers see.
func (f *caFiles) onHost(path string) string {
	return filepath.Join(f.folder(), strings.TrimPrefix(path, MountPath))
}

// has reports whether a file that containers see is there now.
func (f *caFiles) has(path string) bool {
	info, err := os.Stat(f.onHost(path))
	return err == nil && info.Mode().IsRegular()
}

// update brings the files in line with the source. A problem is logged once.
func (f *caFiles) update() ca {
	f.mu.Lock()
	defer f.mu.Unlock()
	current, err := f.tryUpdate()
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	switch {
	case problem == f.said || problem == "":
	case errors.Is(err, errNoCA): // where trust is not for sluice to give, there never is one
		f.log.Info("the proxy has no CA yet", "err", problem)
	default:
		f.log.Warn("the proxy's CA is not complete", "err", problem)
	}
	f.said = problem
	if !current.exists() {
		current.problem = problem
	}
	return current
}

// errNoCA means that the source does not exist.
var errNoCA = errors.New("no CA yet")

func (f *caFiles) tryUpdate() (ca, error) {
	if err := f.makeFolders(); err != nil {
		return ca{}, fmt.Errorf("making the folders of the CA: %w", err)
	}
	certificates, sourceErr := f.readCA()
	roots, rootsErr := f.readRoots()
	var current ca
	var errs []error
	write := func(path string, data []byte) {
		if err := f.write(path, data); err != nil {
			errs = append(errs, fmt.Errorf("writing the files of the CA: %w", err))
		}
	}
	if len(certificates) > 0 {
		fingerprints, err := truststore.Fingerprints(certificates)
		if err != nil {
			return ca{}, err
		}
		current.fingerprints = joined(fingerprints)
	}
	if len(roots) > 0 {
		write(f.onHost(BundlePath), append(bytes.Clone(roots), certificates...))
	}
	if additional := first(certificates, roots); len(additional) > 0 {
		write(f.onHost(CAPath), additional)
	}
	if len(certificates) > 0 { // last: the hook may use it from now on
		write(f.caPEM(), certificates)
	}
	return current, errors.Join(append(errs, sourceErr, rootsErr)...)
}

// makeFolders makes the folders. A container's user of any ID can read those that containers see, whatever the umask.
func (f *caFiles) makeFolders() error {
	var errs []error
	for _, folder := range []string{f.dir, f.folder(), filepath.Dir(f.onHost(BundlePath))} {
		errs = append(errs, os.MkdirAll(folder, 0o755),
			os.Chmod(folder, 0o755)) //nolint:gosec // public certificates
	}
	return errors.Join(append(errs, os.MkdirAll(f.reports(), 0o700))...)
}

func first(a, b []byte) []byte {
	if len(a) > 0 {
		return a
	}
	return b
}

// maxCAFile bounds the file with the CA. A ConfigMap has at most 1 MiB.
const maxCAFile = 1 << 20

// readCA returns the certificates in the source, and nothing else that is in it. Where the source cannot be used, it
// returns those of the last time, because the containers on the node trust them, and the error.
func (f *caFiles) readCA() ([]byte, error) {
	data, err := files.ReadBounded(f.source, maxCAFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = fmt.Errorf("%w: %s does not exist", errNoCA, f.source)
	case err == nil:
		_, err = truststore.Fingerprints(data)
		if err != nil {
			err = fmt.Errorf("%s: %w", f.source, err)
		}
	}
	if err != nil {
		last, lastErr := files.ReadBounded(f.caPEM(), maxCAFile)
		if lastErr != nil && !errors.Is(lastErr, fs.ErrNotExist) {
			err = errors.Join(err, lastErr)
		}
		return last, err
	}
	var clean []byte
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		clean = append(clean, pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})...)
	}
	return clean, nil
}

// maxRoots bounds the public roots.
const maxRoots = 16 << 20

// readRoots returns the public roots, with a newline at their end.
func (f *caFiles) readRoots() ([]byte, error) {
	for _, path := range f.roots {
		data, err := files.ReadBounded(path, maxRoots)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the public roots: %w", err)
		}
		return append(bytes.TrimRight(data, "\n"), '\n'), nil
	}
	return nil, errors.New("no public roots in this image (package ca-certificates): containers without a trust " +
		"store get no bundle")
}

// write replaces a file by rename. The containers that have the folder mounted see the new file.
func (f *caFiles) write(path string, data []byte) error {
	if current, err := os.ReadFile(path); err == nil && bytes.Equal(current, data) {
		return nil
	}
	return files.Replace(path, data, 0o644, filepath.Join(f.dir, ".new-*"))
}

// retryCA is the pause until the next try to watch the folder of the CA, or to write the files.
const retryCA = 5 * time.Second

// followCA updates the files after each change of the source.
func (t *Trust) followCA(ctx context.Context) {
	for ctx.Err() == nil {
		if err := t.watchCA(ctx); err != nil {
			t.config.Log.Debug("the folder of the proxy's CA is not watched", "err", err)
		}
		_ = pause.For(ctx, retryCA) // the loop ends with ctx
		if _, err := os.Stat(t.config.CAFile); err == nil {
			t.updateCA()
		}
	}
}

// watchCA watches the folder of the source, because a volume of Kubernetes changes by the rename of a link in it.
func (t *Trust) watchCA(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watching the proxy's CA: %w", err)
	}
	defer func() { _ = watcher.Close() }() // only read
	folder := filepath.Dir(t.config.CAFile)
	if err := watcher.Add(folder); err != nil {
		return fmt.Errorf("watching %s: %w", folder, err)
	}
	t.updateCA() // it may have changed before the watch began
	for {
		select {
		case event, ok := <-watcher.Events:
			if !ok || event.Has(fsnotify.Remove) && event.Name == folder {
				return fmt.Errorf("watching %s: the folder is gone", folder)
			}
			t.updateCA()
		case err := <-watcher.Errors:
			return fmt.Errorf("watching %s: %w", folder, err)
		case <-ctx.Done():
			return nil
		}
	}
}

// updateCA takes over a changed CA, and looks at all containers again.
func (t *Trust) updateCA() {
	now := t.files.update()
	t.mu.Lock()
	before := t.ca
	t.ca = now
	t.mu.Unlock()
	if now.fingerprints == before.fingerprints {
		return
	}
	t.config.Log.Info("the proxy's CA has changed", "fingerprints", now.fingerprints)
	if t.config.CAChanged != nil {
		t.config.CAChanged()
	}
	t.Check()
}
