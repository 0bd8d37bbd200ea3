package splice

import (
	"errors"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// vessel carries bytes from one socket to another. A flow has one only while there are bytes to carry: an idle
// connection costs no pipe. The kernel counts the pages of all pipes of a user, and gives new pipes of root's programs
// without CAP_SYS_RESOURCE no more than 8 KiB beyond its limit (pipe-user-pages-soft in proc(5)).
type vessel interface {
	// fill reads from the socket, at most once. It returns 0 at the end of the data.
	fill(socket int) (int, error)
	// drain writes to the socket, at most once, and returns the number of bytes that are left.
	drain(socket int) (left int, err error)
	// release gives up a vessel that is empty.
	release()
	// discard gives up a vessel with bytes in it.
	discard()
}

// pipe carries bytes by splice(2): they stay in the kernel.
type pipe struct {
	r, w int
	full int // bytes in it
}

// pipeSize is the size that most kernels allow to any user.
const pipeSize = 1 << 20

// maxPipes bounds the pipes of this process to a quarter of the pages that all pipes of root may have by default. No
// more are in use at a time than there are processors, but for those whose receiver does not read.
const maxPipes = 16

var (
	// spares are pipes that no flow has.
	spares = make(chan *pipe, min(maxPipes, runtime.GOMAXPROCS(0)))
	// openPipes counts the spares and those that are in use.
	openPipes atomic.Int32
)

// newVessel returns a pipe, or a buffer if there are as many pipes as may be, or the process has no descriptors left.
func newVessel() vessel {
	select {
	case p := <-spares:
		return p
	default:
	}
	var fds [2]int
	if openPipes.Add(1) > maxPipes || unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		openPipes.Add(-1)
		return &buffer{}
	}
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize) // a smaller one is slower
	return &pipe{r: fds[0], w: fds[1]}
}

func (p *pipe) fill(socket int) (int, error) {
	n, err := ignoringEINTR(func() (int, error) {
		n, err := unix.Splice(socket, nil, p.w, nil, pipeSize, unix.SPLICE_F_NONBLOCK)
		return int(n), err
	})
	p.full = n
	return n, err
}

func (p *pipe) drain(socket int) (int, error) {
	n, err := ignoringEINTR(func() (int, error) {
		n, err := unix.Splice(p.r, nil, socket, nil, p.full, unix.SPLICE_F_NONBLOCK)
		return int(n), err
	})
	p.full -= n
	return p.full, err
}

func (p *pipe) release() {
	select {
	case spares <- p:
	default:
		p.discard()
	}
}

func (p *pipe) discard() {
	_ = unix.Close(p.r) // pipes have no errors
	_ = unix.Close(p.w)
	openPipes.Add(-1)
}

// buffer carries bytes through the memory of this process.
type buffer struct {
	space [16 << 10]byte
	rest  []byte
}

func (b *buffer) fill(socket int) (int, error) {
	n, err := ignoringEINTR(func() (int, error) { return unix.Read(socket, b.space[:]) })
	b.rest = b.space[:n]
	return n, err
}

func (b *buffer) drain(socket int) (int, error) {
	n, err := ignoringEINTR(func() (int, error) { return unix.Write(socket, b.rest) })
	b.rest = b.rest[n:]
	return len(b.rest), err
}

func (b *buffer) release() {}

func (b *buffer) discard() {}

// ignoringEINTR repeats a call that a signal has interrupted. It returns no negative number.
func ignoringEINTR(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return max(n, 0), err
		}
	}
}
