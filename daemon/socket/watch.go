package socket

import (
	"time"

	"golang.org/x/sys/unix"
)

// WatchReset calls reset from a goroutine of its own once the peer resets c. The watch begins after delay. It uses the
// read deadline of c, so nothing else may read from c until stop has returned.
func WatchReset(c Stream, delay time.Duration, reset func()) (stop func()) {
	done := make(chan struct{})
	timer := time.AfterFunc(delay, func() {
		defer close(done)
		if waitReset(c) {
			reset()
		}
	})
	return func() {
		if timer.Stop() {
			return
		}
		_ = c.SetReadDeadline(time.Unix(1, 0)) // fails only on a closed connection
		<-done
		_ = c.SetReadDeadline(time.Time{})
	}
}

// waitReset returns true once the peer has reset c, and false at the read deadline.
func waitReset(c Stream) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	return raw.Read(func(fd uintptr) bool {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		return err != nil || info.State == tcpClose
	}) == nil
}
