// Package unixsock has the unix sockets over which the programs of one node talk to each other: sockets that only root
// or a group may use, and file descriptors sent over them (SCM_RIGHTS, unix(7)). The plugin calls the daemon over one,
// a new daemon takes the listeners of pods from the old one, and proxies take them from the daemon.
package unixsock

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listener is a unix socket that listens at a path. It closes connections of peers that are neither root nor the
// daemon's own user nor, of a socket from ListenForGroup, of its group (SO_PEERCRED). The socket's mode already
// excludes them, but a socket can be mounted into a container where it should not be. Close does not remove the path.
type Listener struct {
	net.Listener
	path     string
	file     os.FileInfo
	forGroup bool
	log      *slog.Logger
}

// Addr returns the address at path: the kernel knows the socket by the name that it had before it was renamed.
func (l *Listener) Addr() net.Addr {
	return &net.UnixAddr{Name: l.path, Net: l.Listener.Addr().Network()}
}

// Replaced tells whether another socket has been put at the path since Listen.
func (l *Listener) Replaced() bool {
	now, err := os.Stat(l.path)
	return err == nil && !os.SameFile(now, l.file)
}

// Listen binds a socket at path with mode 0600. It makes missing directories, and replaces a socket that another daemon
// left behind or has handed over. network is "unix", or "unixpacket" for a socket that preserves message boundaries.
func Listen(network, path string, log *slog.Logger) (*Listener, error) {
	return listen(network, path, false, log)
}

// ListenForGroup is Listen for a socket that its group may use too, unless that is root's. If the directory has the
// setgid bit, the socket gets the directory's group and mode 0660. Else root can change its group and mode.
func ListenForGroup(network, path string, log *slog.Logger) (*Listener, error) {
	return listen(network, path, true, log)
}

func listen(network, path string, forGroup bool, log *slog.Logger) (*Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	fresh := path + ".new" // renamed to path, so that there is a socket at path at every moment
	if err := os.Remove(fresh); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: fresh, Net: network})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // the path may be the next daemon's socket by then
	mode := os.FileMode(0o600)
	if dir, err := os.Stat(filepath.Dir(path)); err == nil && forGroup && dir.Mode()&os.ModeSetgid != 0 {
		mode = 0o660 // the kernel has given the socket the group of the directory
	}
	if err := os.Chmod(fresh, mode); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	file, err := os.Stat(fresh)
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &Listener{l, path, file, forGroup, log}, nil
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		cred, err := peer(c.(*net.UnixConn))
		if err == nil && l.mayUse(cred) {
			return c, nil
		}
		l.log.Warn("peer turned away: it may not use this socket", "address", l.Addr().String(),
			"peer", fmt.Sprintf("%+v", cred), "err", err)
		_ = c.Close() // nothing has been sent
	}
}

func (l *Listener) mayUse(c *unix.Ucred) bool {
	if c.Uid == 0 || int(c.Uid) == os.Geteuid() {
		return true
	}
	now, err := os.Stat(l.path)
	if !l.forGroup || err != nil || !os.SameFile(now, l.file) {
		return false
	}
	group := now.Sys().(*syscall.Stat_t).Gid
	return now.Mode()&0o060 == 0o060 && group != 0 && group == c.Gid
}

// peer returns the credentials that the peer had when it connected.
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

// Send writes a message and descriptors of files, which stay open here. If one of the files is already closed, the
// error is os.ErrClosed.
func Send(c *net.UnixConn, message []byte, files []*os.File) error {
	// Duplicates are sent: while the write blocks, another goroutine may close a file, and the kernel may give its
	// number to another file.
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
		return 0, os.ErrClosed // Control fails for a closed file only, with internal/poll's own error
	}
	return fd, err
}

// MaxFiles is the largest number of descriptors that one Receive accepts.
const MaxFiles = 16

// Receive reads one message that Send wrote, into p, and its descriptors, which the caller must close. A message that
// is longer than p, or has more than MaxFiles descriptors, is an error, and its descriptors are closed. The kernel
// never delivers the descriptors of two messages with one read.
func Receive(c *net.UnixConn, p []byte) (n int, files []*os.File, err error) {
	oob := make([]byte, unix.CmsgSpace(MaxFiles*4))
	n, oobn, flags, _, err := c.ReadMsgUnix(p, oob)
	if err != nil {
		return 0, nil, err // n is -1, which an io.Reader may not return
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return n, nil, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // another control message, such as credentials
		}
		for _, fd := range fds {
			// Go would block a thread on a descriptor in blocking mode. The sender may have changed the mode.
			_ = unix.SetNonblock(fd, true)
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		Close(files)
		return n, nil, fmt.Errorf("received a message of more than %d bytes or %d descriptors", len(p), MaxFiles)
	}
	return n, files, nil
}

// Close closes descriptors that were received and are not wanted. The sender's own descriptors stay open.
func Close(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
