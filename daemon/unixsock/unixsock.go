// Package unixsock is how programs of one node talk: unix sockets that only root may use, and descriptors sent
// over them.
package unixsock

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Listener is a socket at a path.
type Listener struct {
	net.Listener
	path string
	file os.FileInfo
}

// Replaced tells whether the path leads to another's socket by now.
func (l *Listener) Replaced() bool {
	now, err := os.Stat(l.path)
	return err == nil && !os.SameFile(now, l.file)
}

// Listen binds a socket at path, in place of one that another daemon left or has handed over. network is "unix", or
// "unixpacket" for one that keeps messages apart.
func Listen(network, path string) (*Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	fresh := path + ".new" // renamed into place, so that the path always leads to somebody
	if err := os.Remove(fresh); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: fresh, Net: network})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // by then it may be the next daemon's
	if err := os.Chmod(fresh, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	file, err := os.Stat(fresh)
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &Listener{l, path, file}, nil
}

// RootOnly hangs up on peers that are neither root nor the daemon's own user. The mode of the socket says the same,
// but a socket can be mounted into places where it should not be.
type RootOnly struct {
	net.Listener
	Log *slog.Logger
}

// Accept implements net.Listener.
func (l RootOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		cred, err := peer(c.(*net.UnixConn))
		if err == nil && (cred.Uid == 0 || int(cred.Uid) == os.Geteuid()) {
			return c, nil
		}
		l.Log.Warn("peer turned away", "socket", l.Addr().String(), "peer", fmt.Sprintf("%+v", cred), "err", err)
		_ = c.Close() // nothing was said
	}
}

func peer(c *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return cred, errors.Join(cerr, err)
}

// Send writes a message with descriptors. The error of a file that is closed already is os.ErrClosed.
func Send(c *net.UnixConn, message []byte, files []*os.File) error {
	// Duplicates: while c is not ready to be written to, a file may be closed, and its number be that of another.
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd) // a duplicate
		}
	}()
	for _, f := range files {
		fd, err := duplicate(f)
		if err != nil {
			return err
		}
		fds = append(fds, fd)
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(message, rights, nil)
	return err
}

func duplicate(f *os.File) (fd int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	if cerr := raw.Control(func(from uintptr) { fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return 0, os.ErrClosed // poll's own error for it is another
	}
	return fd, err
}

// MaxFiles is how many descriptors one Receive takes.
const MaxFiles = 16

// Receive reads what Send wrote, as far as it fits p. The kernel never hands out the descriptors of two messages with
// one read.
func Receive(c *net.UnixConn, p []byte) (n int, files []*os.File, err error) {
	oob := make([]byte, unix.CmsgSpace(MaxFiles*4))
	n, oobn, flags, _, err := c.ReadMsgUnix(p, oob)
	if err != nil {
		return 0, nil, err // n is -1, which no reader may return
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return n, nil, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // credentials, or whatever else nobody asked for
		}
		for _, fd := range fds {
			_ = unix.SetNonblock(fd, true) // else Go would wait for it in a thread; the sender may have changed it
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		Close(files)
		return n, nil, fmt.Errorf("a message of more than %d bytes or %d descriptors", len(p), MaxFiles)
	}
	return n, files, nil
}

// Close closes descriptors that were received and are not wanted.
func Close(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // somebody else has them too
	}
}
