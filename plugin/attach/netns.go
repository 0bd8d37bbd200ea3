package attach

import (
	"errors"
	"fmt"
	"os"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"
)

// NetnsID tells one network namespace from another. Device and inode alone do not: the kernel gives a
// new netns the lowest free inode number, which is often that of the one deleted just before.
type NetnsID struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
	// Cookie is never used twice until the next boot; 0 before Linux 5.14.
	Cookie uint64 `json:"cookie"`
}

// String is for messages, and the same for as long as the netns lives.
func (id NetnsID) String() string { return fmt.Sprintf("%d:%d:%d", id.Dev, id.Ino, id.Cookie) }

// ErrNetnsGone is returned for a path at which there is no network namespace any more.
var ErrNetnsGone = errors.New("netns is gone")

// IdentifyNetns reads the identity of the netns at path.
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

// StatNetns is IdentifyNetns without the cookie, and without entering the netns. It is enough while
// something holds that netns open.
func StatNetns(path string) (NetnsID, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return NetnsID{}, fmt.Errorf("identifying netns %s: %w", path, gone(err))
	}
	return NetnsID{Dev: st.Dev, Ino: st.Ino}, nil
}

// SameFile compares all but the cookie.
func (id NetnsID) SameFile(other NetnsID) bool { return id.Dev == other.Dev && id.Ino == other.Ino }

func gone(err error) error {
	var missing ns.NSPathNotExistErr
	var not ns.NSPathNotNSErr // what is left of a bind mount that was undone
	if errors.Is(err, os.ErrNotExist) || errors.As(err, &missing) || errors.As(err, &not) {
		return fmt.Errorf("%w: %w", ErrNetnsGone, err)
	}
	return err
}
