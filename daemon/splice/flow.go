package splice

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// errTo marks the error of a flow whose receiver has failed, and not its sender.
var errTo = errors.New("writing")

// errRests is the error of a flow whose goroutine is to end until there is data.
var errRests = errors.New("the pair rests")

// flow carries the bytes of one direction.
type flow struct {
	pair     *joint
	run      func() // carries on after a rest
	from, to syscall.RawConn
	vessel   vessel // nil while there is nothing to carry
	waits    bool
	got      int
	err      error
}

// carry carries bytes until the data ends, and adds their number to n. An error of the receiver is errTo. If the error
// is errRests, run will be called.
func (p *joint) carry(to, from socket.Stream, n *int64, run func()) error {
	f := flow{pair: p, run: run}
	var err error
	if f.from, err = from.SyscallConn(); err != nil {
		return err
	}
	if f.to, err = to.SyscallConn(); err != nil {
		return errors.Join(errTo, err)
	}
	for {
		if err := f.fill(); err != nil || f.got == 0 {
			return err
		}
		if err := f.drain(); err != nil {
			return errors.Join(errTo, err)
		}
		*n += int64(f.got)
	}
}

// fill waits for bytes, without a vessel.
func (f *flow) fill() error {
	err := f.from.Read(f.tryFill)
	for f.waits {
		f.waits = false
		leaves, again := f.pair.endWait(errors.Is(err, os.ErrDeadlineExceeded), f.run)
		if leaves {
			return errRests
		}
		if again {
			err = f.from.Read(f.tryFill)
		}
	}
	if err == nil {
		err = f.err
	}
	if f.vessel != nil && (err != nil || f.got == 0) {
		f.vessel.release()
	}
	return err
}

func (f *flow) tryFill(fd uintptr) (done bool) {
	if f.vessel == nil {
		f.vessel = newVessel()
	}
	f.got, f.err = f.vessel.fill(int(fd))
	if !errors.Is(f.err, unix.EAGAIN) {
		return true
	}
	f.vessel.release()
	f.vessel = nil
	if !f.waits {
		f.waits = true
		f.pair.beginWait()
	}
	return false
}

// drain returns when the receiver's kernel has all bytes of the vessel.
func (f *flow) drain() error {
	err := f.to.Write(f.tryDrain)
	if err == nil {
		err = f.err
	}
	if err != nil {
		f.vessel.discard()
		return err
	}
	return nil
}

func (f *flow) tryDrain(fd uintptr) (done bool) {
	for left := 1; left > 0; {
		left, f.err = f.vessel.drain(int(fd))
		if f.err != nil {
			return !errors.Is(f.err, unix.EAGAIN)
		}
	}
	return true
}
