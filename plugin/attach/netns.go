package attach

import (
	"errors"
	"fmt"
	"os"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"
)

// NetnsID identifies a network namespace. Device and inode alone do not: the kernel gives a new netns the
// lowest free inode number, which is often that of a netns deleted just before.
type NetnsID struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
	// Cookie (SO_NETNS_COOKIE) is unique until the next boot; 0 before Linux 5.14.
	Cookie uint64 `json:"cookie"`
}

// String returns device:inode:cookie. It stays the same for as long as the netns lives.
func (id NetnsID) String() string { return fmt.Sprintf("%d:%d:%d", id.Dev, id.Ino, id.Cookie) }

// ErrNetnsGone is the error for a path at which there is no network namespace, or none any more.
var ErrNetnsGone = errors.New("netns is gone")

// IdentifyNetns returns the identity of the netns at path. It enters the netns to read the cookie.
func IdentifyNetns(path string) (NetnsID, error) {
	id, err := StatNetns(path)
	if err != nil {
		return NetnsID{}, err
	}
	err = ns.WithNetNSPath(path, func(ns.NetNS) error {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s) //nolint:errcheck // nothing was written
		id.Cookie, err = unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		if errors.Is(err, unix.ENOPROTOOPT) {
			return nil
		}
		return err
	})
	if err != nil {
		return NetnsID{}, fmt.Errorf("identifying netns %s: %w", path, gone(err))
	}
	return id, nil
}

// StatNetns is IdentifyNetns without the cookie, and without entering the netns. It is enough while the netns
// is held open, since the kernel does not give its inode to another netns then.
func StatNetns(path string) (NetnsID, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return NetnsID{}, fmt.Errorf("identifying netns %s: %w", path, gone(err))
	}
	return NetnsID{Dev: st.Dev, Ino: st.Ino}, nil
}

// SameFile compares device and inode, but not the cookie.
func (id NetnsID) SameFile(other NetnsID) bool { return id.Dev == other.Dev && id.Ino == other.Ino }

// ErrNodeNetns is the error for the network namespace of the node, in which sluice captures nothing: it would capture
// the node's own connections, and those of the proxy would come back to the proxy until it has no descriptors left.
var ErrNodeNetns = errors.New("this is the node's own network namespace, and only a pod's own can be captured")

// CheckNotNode returns ErrNodeNetns if id is the netns of the calling thread, or of process 1.
func (id NetnsID) CheckNotNode() error {
	own, err := StatNetns("/proc/thread-self/ns/net") // not /proc/self: its thread may be in a pod's netns for a moment
	if err != nil {
		return err
	}
	if id.SameFile(own) {
		return fmt.Errorf("%w: sluice runs in it", ErrNodeNetns)
	}
	// A process without privileges over process 1 may not look.
	if init, err := StatNetns("/proc/1/ns/net"); err == nil && id.SameFile(init) {
		return fmt.Errorf("%w: process 1 runs in it", ErrNodeNetns)
	}
	return nil
}

// gone adds ErrNetnsGone to errors that mean it.
func gone(err error) error {
	var missing ns.NSPathNotExistErr
	var notNetns ns.NSPathNotNSErr // a file at the path: it stays when the netns' bind mount is undone
	if errors.Is(err, os.ErrNotExist) || errors.As(err, &missing) || errors.As(err, &notNetns) {
		return fmt.Errorf("%w: %w", ErrNetnsGone, err)
	}
	return err
}
