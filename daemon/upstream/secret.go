package upstream

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"
)

// SecretFile is the name of the file with the secret, in the folder of the proxy socket.
const SecretFile = "proxy.secret"

// secretBytes is the number of random bytes in a secret. The file has them in hexadecimal.
const secretBytes = 32

var validSecret = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Secret returns the secret in a folder, by which proxies on the node know the daemon. It makes one if there is none: a
// daemon that takes over from another one has to send the same. A proxy in a container can write in that folder, so the
// file is trusted with nothing but its content.
func Secret(folder string) (string, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", fmt.Errorf("making the folder of the proxy's secret: %w", err)
	}
	path := filepath.Join(folder, SecretFile)
	secret, err := readSecret(path)
	if err == nil {
		return secret, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		if err := os.Remove(path); err != nil {
			return "", fmt.Errorf("removing an invalid secret of the proxy: %w", err)
		}
	}
	if err := makeSecret(path); err != nil {
		return "", fmt.Errorf("making the proxy's secret: %w", err)
	}
	return readSecret(path) // another daemon may have been quicker
}

// readSecret reads a valid secret. It follows no link, which could lead to any file of the node, and does not wait for
// the writer of a FIFO.
func readSecret(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", fmt.Errorf("reading the proxy's secret: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	data := make([]byte, hex.EncodedLen(secretBytes)+1)
	n, err := io.ReadFull(f, data)
	switch {
	case err != nil && !errors.Is(err, io.ErrUnexpectedEOF):
		return "", fmt.Errorf("reading the proxy's secret: %w", err)
	case !validSecret.Match(data[:n]):
		return "", fmt.Errorf("%s has no secret of %d hexadecimal digits", path, hex.EncodedLen(secretBytes))
	}
	return string(data[:n]), nil
}

// secretFor returns the secret if the other end of conn is a pod of this node or the node itself. A proxy on another
// host cannot read the file, and the networks between could read the request.
func (u *Upstream) secretFor(conn net.Conn) string {
	from, to := conn.LocalAddr().(*net.TCPAddr), conn.RemoteAddr().(*net.TCPAddr)
	// The kernel connects to an address of the node from the same address.
	if u.ofPods || to.IP.IsLoopback() || to.IP.Equal(from.IP) {
		return u.secret
	}
	return ""
}

// makeSecret writes a secret, unless there is a file at path. Root alone can read it, or also the group of a folder
// with the setgid bit, as with the proxy socket.
func makeSecret(path string) error {
	folder := filepath.Dir(path)
	mode := os.FileMode(0o600)
	if info, err := os.Stat(folder); err == nil && info.Mode()&os.ModeSetgid != 0 {
		mode = 0o640
	}
	secret := make([]byte, secretBytes)
	_, _ = rand.Read(secret) // never fails
	temp, err := os.CreateTemp(folder, SecretFile+".*")
	if err != nil {
		return err
	}
	_, err = temp.WriteString(hex.EncodeToString(secret))
	err = errors.Join(err, temp.Chmod(mode), temp.Close())
	if err == nil {
		err = os.Link(temp.Name(), path)
	}
	if errors.Is(err, os.ErrExist) {
		err = nil
	}
	return errors.Join(err, os.Remove(temp.Name()))
}
