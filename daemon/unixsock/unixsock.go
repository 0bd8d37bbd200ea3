// Package unixsock has the unix sockets over which the programs of one node talk to each other: sockets that only root
// or a group may use, and file descriptors sent over them (SCM_RIGHTS, unix(7)). The plugin calls the daemon over one,
// a new daemon takes the listeners of pods from the old one, and proxies take them from the daemon.
package unixsock

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/plugin/files"
)

// Listener is a unix socket that listens. No path leads to it before Publish. It closes connections of peers that are
// neither root nor the daemon's own user nor, of a socket from BindForGroup, of its group (SO_PEERCRED). The socket's
// mode already excludes them, but a socket can be mounted into a container where it should not be.
type Listener struct {
	net.Listener
	path     string
	unnamed  string // the path until Publish; empty afterwards
	file     os.FileInfo
	forGroup bool
	log      *slog.Logger
}

// Addr returns the address at path: the kernel knows the socket by the name that it had before it was renamed.
func (l *Listener) Addr() net.Addr {
	return &net.UnixAddr{Name: l.path, Net: l.Listener.Addr().Network()}
}

// Replaced tells whether another socket has been put at the path since Publish.
func (l *Listener) Replaced() bool {
	now, err := os.Lstat(l.path)
	return err == nil && !os.SameFile(now, l.file)
}

// Bind makes a socket that listens, with mode 0600, for Publish to put at path. It makes missing directories. network
// is "unix", or "unixpacket" for a socket that preserves message boundaries.
func Bind(network, path string, log *slog.Logger) (*Listener, error) {
	return bind(network, path, false, log)
}

// BindForGroup is Bind for a socket that its group may use too, unless that is root's. If the directory has the setgid
// bit, the socket gets the directory's group and mode 0660. Else root can change its group and mode.
func BindForGroup(network, path string, log *slog.Logger) (*Listener, error) {
	return bind(network, path, true, log)
}

func bind(network, path string, forGroup bool, log *slog.Logger) (*Listener, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := clearPlace(path); err != nil {
		return nil, err
	}
	if err := removeUnpublished(dir); err != nil {
		log.Warn("sockets of daemons that were killed cannot be removed", "err", err)
	}
	// A container may write in the directory of the proxy socket: it must not know the name beforehand.
	unnamed := filepath.Join(dir, "."+rand.Text()[:nameLength])
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: unnamed, Net: network})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // the path may be the next daemon's socket by then
	mode := os.FileMode(0o600)
	if info, err := os.Stat(dir); err == nil && forGroup && info.Mode()&os.ModeSetgid != 0 {
		mode = 0o660 // the kernel has given the socket the group of the directory
	}
	file, err := setMode(unnamed, mode)
	if err != nil {
		return nil, errors.Join(err, l.Close(), files.Remove(unnamed))
	}
	return &Listener{l, path, unnamed, file, forGroup, log}, nil
}

const (
	// nameLength is the length of the name that a socket has before Publish, without the dot.
	nameLength = 10
	// binding is longer than a daemon needs from bind(2) to listen(2). In between, its socket looks like one that is
	// left behind.
	binding = 10 * time.Second
)

// unpublished matches the name of a socket before Publish.
var unpublished = regexp.MustCompile(fmt.Sprintf(`^\.[A-Z2-7]{%d}$`, nameLength))

// removeUnpublished removes the sockets in dir of daemons that were killed before Publish.
func removeUnpublished(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if e.Type() != os.ModeSocket || !unpublished.MatchString(e.Name()) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		info, err := e.Info()
		if err != nil || time.Since(info.ModTime()) < binding || isServed(path) {
			continue // published or removed by now, or in use
		}
		errs = append(errs, files.Remove(path))
	}
	return errors.Join(errs...)
}

// isServed tells whether a process has the socket at path. The kernel says so before it looks at the socket's type.
func isServed(path string) bool {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err == nil {
		_ = c.Close() // nothing was sent
	}
	return !errors.Is(err, unix.ECONNREFUSED)
}

// setMode sets the mode of the socket at path, and describes it. It follows no link.
func setMode(path string, mode os.FileMode) (os.FileInfo, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() //nolint:errcheck // nothing was written
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case info.Mode()&os.ModeSocket == 0:
		return nil, fmt.Errorf("%s: not a socket any more", path)
	}
	// fchmod(2) does not take a descriptor of O_PATH. Its link in /proc leads to the file that is open.
	return info, os.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), mode)
}

// clearPlace removes an empty directory at path. The runtime makes one there if a container mounts the socket before it
// exists.
func clearPlace(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil || !info.IsDir() {
		return err
	}
	return os.Remove(path)
}

// Publish puts the socket at its path, in place of a socket that another daemon left behind or has handed over. There
// is a socket at the path at every moment.
func (l *Listener) Publish() error {
	err := clearPlace(l.path)
	if err == nil {
		err = os.Rename(l.unnamed, l.path)
	}
	if err == nil {
		l.unnamed = ""
	}
	return err
}

// Close stops listening. It does not remove the path.
func (l *Listener) Close() error {
	err := l.Listener.Close()
	if l.unnamed != "" {
		err = errors.Join(err, files.Remove(l.unnamed))
	}
	return err
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
	now, err := os.Lstat(l.path)
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
