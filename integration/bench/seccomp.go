package main

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// refusing runs f on a thread in the netns of h. There, and in the processes that f starts, the kernel refuses netlink
// sockets of one protocol as a kernel that lacks the protocol does.
func refusing(protocol uint32, h *testbed.Host, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine, since a filter cannot be removed
		done <- func() error {
			netns, err := unix.Open(h.Path(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(netns) //nolint:errcheck // nothing was written
			if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
				return err
			}
			if err := refuse(protocol); err != nil {
				return err
			}
			return f()
		}()
	}()
	return <-done
}

// refuse installs the filter for the calling thread.
func refuse(protocol uint32) error {
	// Offsets in struct seccomp_data (linux/seccomp.h), of the lower halves of the arguments.
	const nr, family, third = 0, 16, 32
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	// unless skips so many instructions if the loaded value is another.
	unless := func(value uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jf: skip}
	}
	result := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	program := []unix.SockFilter{
		load(nr), unless(unix.SYS_SOCKET, 5),
		load(family), unless(unix.AF_NETLINK, 3),
		load(third), unless(protocol, 1),
		result(unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)),
		result(unix.SECCOMP_RET_ALLOW),
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&filter)), 0, 0)
}
