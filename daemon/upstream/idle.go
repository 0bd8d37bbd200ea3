package upstream

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// idleConn is a connection to the upstream on which nothing has been requested yet. A goroutine watches it until there
// is something to read: the end of the connection, or an answer.
type idleConn struct {
	*net.TCPConn
	asked func()        // closes used, once
	used  chan struct{} // closed when a request was made on it and its answer is waited for
	ended chan struct{} // closed when the watch is over: an answer, the connection's end, or its deadline
}

func newIdleConn(conn *net.TCPConn) *idleConn {
	c := &idleConn{TCPConn: conn, used: make(chan struct{}), ended: make(chan struct{})}
	c.asked = sync.OnceFunc(func() { close(c.used) })
	return c
}

// watch returns when there is something to read. It only peeks: the bytes belong to the reader of the answer.
func (c *idleConn) watch() {
	defer close(c.ended)
	raw, err := c.SyscallConn()
	if err != nil {
		return // closed
	}
	_ = raw.Read(hasNews)
}

// hasNews reports whether there is something to read from a socket: bytes, or its end.
func hasNews(fd uintptr) bool {
	_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return !errors.Is(err, unix.EAGAIN)
}

// Read reads the answer. It waits for the watch, which ends by itself: to cancel the watch before every request would
// cost two switches between goroutines.
func (c *idleConn) Read(p []byte) (int, error) {
	c.asked()
	<-c.ended
	return c.TCPConn.Read(p)
}

// isReadable reports whether conn has bytes, or has ended.
func isReadable(conn *net.TCPConn) (readable bool) {
	err := socket.Control(conn, func(fd int) error {
		readable = hasNews(uintptr(fd))
		return nil
	})
	return err != nil || readable
}

// locateInterval is the time between looks whether the upstream is still at the other end of the idle connection.
const locateInterval = time.Second

// offer keeps conn as the idle connection until a request takes it, it ends, ctx does, or the upstream is not at its
// other end any more: a proxy's pod that is not ready keeps its connections. It reports whether a request took it.
func (u *Upstream) offer(ctx context.Context, conn *net.TCPConn) (used bool) {
	c := newIdleConn(conn)
	go c.watch() // ends with the connection, or with its first answer
	u.swapIdle(c)
	address, _ := u.locate() // the next look finds an error
	look := time.NewTicker(locateInterval)
	defer look.Stop()
	for there := true; there; {
		select {
		case <-c.used:
			return true
		case <-c.ended:
			there = false
		case <-look.C:
			now, err := u.locate()
			there = err == nil && now == address
		case <-ctx.Done():
			there = false
		}
	}
	if u.swapIdle(nil) == nil {
		return true // taken at the last moment
	}
	_ = conn.Close() // nothing was requested on it
	<-c.ended
	return false
}

func (u *Upstream) swapIdle(c *idleConn) (was *idleConn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	was, u.idle = u.idle, c
	return was
}
