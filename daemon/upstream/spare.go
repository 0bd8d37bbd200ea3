package upstream

import (
	"errors"
	"net"
	"sync"

	"golang.org/x/sys/unix"
)

// spare is a connection to the upstream on which nothing has been asked yet. Its end is watched for, until
// there is something to read.
type spare struct {
	*net.TCPConn
	asked func()        // has used closed, once
	used  chan struct{} // somebody has asked on it, and waits for the answer
	ended chan struct{} // the watch is over: an answer, the connection's end, or its deadline
}

func newSpare(conn *net.TCPConn) *spare {
	s := &spare{TCPConn: conn, used: make(chan struct{}), ended: make(chan struct{})}
	s.asked = sync.OnceFunc(func() { close(s.used) })
	return s
}

// watch ends when there is something to read. It only looks: what is there belongs to whoever asks.
func (s *spare) watch() {
	defer close(s.ended)
	raw, err := s.SyscallConn()
	if err != nil {
		return // closed
	}
	_ = raw.Read(func(fd uintptr) bool {
		_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return !errors.Is(err, unix.EAGAIN)
	})
}

// Read is for the answer. To call the watch off first would cost two switches of goroutines before every
// question; it ends by itself.
func (s *spare) Read(p []byte) (int, error) {
	s.asked()
	<-s.ended
	return s.TCPConn.Read(p)
}
