package authority

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Files of mitmproxy, in its confdir.
const (
	mitmproxyCA   = "mitmproxy-ca.pem"      // the key and the chain that it presents
	mitmproxyRoot = "mitmproxy-ca-cert.pem" // the certificate that it offers at http://mitm.it
)

// Files of a root in a folder.
const (
	rootCertificate = "ca.crt"
	rootKey         = "ca.key"
)

// WriteMitmproxy writes the files from which mitmproxy reads its CA into dir. A reader sees an old file or a new one.
func (a Authority) WriteMitmproxy(dir string) error {
	key, err := EncodeKey(a.Key)
	if err != nil {
		return err
	}
	root := EncodeCertificates(a.Chain[len(a.Chain)-1:])
	if err := replace(filepath.Join(dir, mitmproxyRoot), root, 0o644); err != nil {
		return err
	}
	// The last one: a proxy that watches it finds the other one written.
	return replace(filepath.Join(dir, mitmproxyCA), slices.Concat(key, EncodeCertificates(a.Chain)), 0o600)
}

// ReadMitmproxy reads the authority that WriteMitmproxy has written into dir.
func ReadMitmproxy(dir string) (Authority, error) {
	path := filepath.Join(dir, mitmproxyCA)
	text, err := os.ReadFile(path)
	if err != nil {
		return Authority{}, err
	}
	a, err := parse(text, text)
	if err != nil {
		return Authority{}, fmt.Errorf("reading %s: %w", path, err)
	}
	return a, nil
}

// CreateRoot writes a root into dir, as two files. It never replaces a file: a new root in place of an old one breaks
// every client that trusts the old one.
func (a Authority) CreateRoot(dir string) error {
	key, err := EncodeKey(a.Key)
	if err != nil {
		return err
	}
	keyPath := filepath.Join(dir, rootKey)
	if err := create(keyPath, key, 0o600); err != nil {
		return err
	}
	if err := create(filepath.Join(dir, rootCertificate), EncodeCertificates(a.Chain), 0o644); err != nil {
		return errors.Join(err, os.Remove(keyPath)) // it is the key of no certificate
	}
	return nil
}

// ReadRoot reads a root from dir, or another authority in files of the same names.
func ReadRoot(dir string) (Authority, error) {
	chain, err := os.ReadFile(filepath.Join(dir, rootCertificate))
	if err != nil {
		return Authority{}, err
	}
	key, err := os.ReadFile(filepath.Join(dir, rootKey))
	if err != nil {
		return Authority{}, err
	}
	a, err := Parse(chain, key)
	if err != nil {
		return Authority{}, fmt.Errorf("reading the root in %s: %w", dir, err)
	}
	return a, nil
}

// replace replaces the file at path, or makes it.
func replace(path string, data []byte, mode fs.FileMode) error {
	temp, err := temporary(path, data, mode)
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("writing %s: %w", path, err), removeTemporary(temp))
	}
	return nil
}

// create makes the file at path. It is an error if there is one.
func create(path string, data []byte, mode fs.FileMode) error {
	temp, err := temporary(path, data, mode)
	if err == nil {
		err = os.Link(temp, path)
	}
	if err != nil {
		err = fmt.Errorf("writing %s: %w", path, err)
	}
	return errors.Join(err, removeTemporary(temp))
}

// temporary writes a file beside path, which only the owner of the process can read until it is whole.
func temporary(path string, data []byte, mode fs.FileMode) (name string, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".")
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	return f.Name(), errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
}

func removeTemporary(name string) error {
	if name == "" {
		return nil
	}
	return os.Remove(name)
}
