// Package files reads and replaces small files.
package files

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Replace writes a file of this mode by rename, so that each reader sees either the old content or the new one. The
// pattern is the path of the temporary file, on the same file system, with a "*" for a random part; a writer that is
// killed leaves it. The file is not synced: it must be of no use after a reboot.
func Replace(path string, data []byte, mode fs.FileMode, pattern string) error {
	temp, err := os.CreateTemp(filepath.Dir(pattern), filepath.Base(pattern))
	if err != nil {
		return err
	}
	return finish(temp, path, data, mode, false)
}

// ReplaceSynced is Replace for a file that outlives the boot: each reader sees the old content or the new one after a
// power loss too. Only one process writes the file at a time. A writer that is killed leaves a file that the next one
// overwrites.
func ReplaceSynced(path string, data []byte, mode fs.FileMode) error {
	temp, err := os.OpenFile(path+".tmp", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if err := finish(temp, path, data, mode, true); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// finish fills a temporary file, closes it and puts it at path.
func finish(temp *os.File, path string, data []byte, mode fs.FileMode, synced bool) error {
	_, err := temp.Write(data)
	err = errors.Join(err, temp.Chmod(mode))
	if err == nil && synced {
		err = temp.Sync()
	}
	if err = errors.Join(err, temp.Close()); err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name())) // a full disk gets its space back
	}
	return nil
}

// Remove removes a file. It is no error if there is none.
func Remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ReadBounded reads a file that has at most limit bytes. A larger one is an error.
func ReadBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		return nil, fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	return data, err
}
