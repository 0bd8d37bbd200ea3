// Package epoll waits for the data of many descriptors in one goroutine: with a goroutine for each, the garbage
// collector would look at thousands of stacks.
package epoll

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Set is a set of descriptors. The kernel removes one that is closed.
type Set struct {
	file *os.File
	raw  syscall.RawConn
}

// New makes an empty set.
func New() (*Set, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that package os waits for it
		return nil, errors.Join(fmt.Errorf("making an epoll non-blocking: %w", err), unix.Close(fd))
	}
	s := &Set{file: os.NewFile(uintptr(fd), "epoll")}
	s.raw, err = s.file.SyscallConn()
	return s, err
}

// Add adds fd, which may have data already.
func (s *Set) Add(fd int) error {
	return s.control(unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

// Remove removes fd.
func (s *Set) Remove(fd int) error { return s.control(unix.EPOLL_CTL_DEL, fd, nil) }

func (s *Set) control(operation, fd int, e *unix.EpollEvent) error {
	var err error
	closed := s.raw.Control(func(epoll uintptr) { err = unix.EpollCtl(int(epoll), operation, fd, e) })
	if closed != nil {
		return closed
	}
	if err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

// Wait calls ready for each descriptor that has data, or the end of them, until the set is closed. A descriptor that
// stays so is ready again at once.
func (s *Set) Wait(ready func(fd int)) {
	events := make([]unix.EpollEvent, 64)
	for {
		n := 0
		err := s.raw.Read(func(epoll uintptr) bool {
			n, _ = unix.EpollWait(int(epoll), events, 0) // does not wait, and so does not fail
			return n > 0
		})
		if err != nil {
			return // closed
		}
		for _, e := range events[:n] {
			ready(int(e.Fd))
		}
	}
}

// Close ends Wait.
func (s *Set) Close() error { return s.file.Close() }
