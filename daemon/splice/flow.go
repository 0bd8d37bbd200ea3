package splice

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/socket"
)

// errTo marks the error of a flow whose receiver has failed, and not its sender.
var errTo = errors.New("writing")

// flow carries the bytes of one direction.
type flow struct {
	from, to syscall.RawConn
	vessel   vessel // nil while there is nothing to carry
	n        int64  // bytes carried
	got      int
	err      error
}

// carry carries bytes until the data ends, and counts them. An error of the receiver is errTo.
func carry(to, from socket.Stream) (int64, error) {
	f := flow{}
	var err error
	if f.from, err = from.SyscallConn(); err != nil {
		return 0, err
	}
	if f.to, err = to.SyscallConn(); err != nil {
		return 0, errors.Join(errTo, err)
	}
	for {
		if err := f.fill(); err != nil || f.got == 0 {
			return f.n, err
		}
		if err := f.drain(); err != nil {
			return f.n, errors.Join(errTo, err)
		}
	}
}

// fill waits for bytes, without a vessel.
func (f *flow) fill() error {
	err := f.from.Read(f.tryFill)
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
	f.n += int64(f.got)
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
