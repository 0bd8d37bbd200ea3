package nested

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// process is a process by its folder in /proc, which is bound to it as a pidfd is: a later process with the same PID is
// not in it. It may be closed at any time: use fails with os.ErrClosed from then on.
type process struct {
	dir *os.File
}

// tick is the unit of times in /proc/PID/stat (USER_HZ).
const tick = time.Second / 100

// errOther is the error about a process that has ended, and has left its PID to another one.
var errOther = errors.New("another process has its PID by now")

// saysEnded reports whether an error says that a process has ended.
func saysEnded(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, errOther)
}

// openProcess opens a process. With a start, which is in nanoseconds since the boot, it fails for another process that
// has the PID by now.
func openProcess(proc string, pid uint32, start uint64) (*process, error) {
	dir, err := os.Open(filepath.Join(proc, strconv.FormatUint(uint64(pid), 10)))
	if err != nil {
		return nil, fmt.Errorf("opening the process: %w", err)
	}
	p := &process{dir: dir}
	if start == 0 {
		return p, nil
	}
	now, err := p.stat()
	if err == nil && now.start != start/uint64(tick) {
		err = errOther
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening process %d: %w", pid, err), dir.Close())
	}
	return p, nil
}

func (p *process) close() { _ = p.dir.Close() } // only read

// use calls f with the descriptor, and keeps it open until f returns. The descriptor that Fd returns could be closed
// meanwhile, and be that of another file.
func (p *process) use(f func(fd int) error) error {
	conn, err := p.dir.SyscallConn()
	if err != nil {
		return fmt.Errorf("using %s: %w", p.dir.Name(), err)
	}
	if controlErr := conn.Control(func(fd uintptr) { err = f(int(fd)) }); controlErr != nil {
		return &os.PathError{Op: "use", Path: p.dir.Name(), Err: os.ErrClosed} // there is no other reason
	}
	return err
}

// again opens the process again, for another owner.
func (p *process) again() (*process, error) {
	dir, err := p.open(".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, fmt.Errorf("opening the process: %w", err)
	}
	return &process{dir: dir}, nil
}

// stat is the part of /proc/PID/stat that is needed.
type stat struct {
	state  byte
	parent uint32
	start  uint64 // in ticks since the boot
	stack  uint64 // the stack pointer at the start of the program
}

func (p *process) stat() (s stat, err error) {
	data, err := p.read("stat")
	if err != nil {
		return s, err
	}
	// The name stands in parentheses, and may have some of its own.
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 26 {
		return s, fmt.Errorf("reading %s/stat: %d fields", p.dir.Name(), len(fields))
	}
	parent, parentErr := strconv.ParseUint(fields[1], 10, 32)
	start, startErr := strconv.ParseUint(fields[19], 10, 64)
	stack, stackErr := strconv.ParseUint(fields[25], 10, 64)
	if err := errors.Join(parentErr, startErr, stackErr); err != nil {
		return s, fmt.Errorf("reading %s/stat: %w", p.dir.Name(), err)
	}
	return stat{state: fields[0][0], parent: uint32(parent), start: start, stack: stack}, nil
}

// pid is the number of the process, which is that of another one as soon as it has ended.
func (p *process) pid() (int, error) {
	pid, err := strconv.Atoi(filepath.Base(p.dir.Name()))
	if err != nil {
		return 0, fmt.Errorf("the number of process %s: %w", p.dir.Name(), err)
	}
	return pid, nil
}

// identity tells a process from all others, also from later ones with the same number.
type identity struct {
	folder string
	start  uint64
}

func (p *process) identity() (identity, error) {
	s, err := p.stat()
	return identity{p.dir.Name(), s.start}, err
}

// name is that of the program that the process runs, as the kernel keeps it.
func (p *process) name() (string, error) {
	data, err := p.read("comm")
	return strings.TrimSuffix(string(data), "\n"), err
}

// maxProcFile bounds a file of a process.
const maxProcFile = 4 << 20

func (p *process) read(name string) ([]byte, error) {
	f, err := p.open(name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	data, err := io.ReadAll(io.LimitReader(f, maxProcFile))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", f.Name(), err)
	}
	return data, nil
}

func (p *process) open(name string, flags int) (*os.File, error) {
	full := filepath.Join(p.dir.Name(), name)
	var f *os.File
	err := p.use(func(dir int) error {
		fd, err := unix.Openat(dir, name, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: full, Err: err}
		}
		f = os.NewFile(uintptr(fd), full)
		return nil
	})
	return f, err
}

// inode is the inode at the end of a link of the process. A FUSE server of the pod is not asked for it: it may never
// answer.
func (p *process) inode(name string) (device, inode uint64, err error) {
	var info unix.Statx_t
	err = p.use(func(dir int) error {
		if err := unix.Statx(dir, name, unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &info); err != nil {
			return &os.PathError{Op: "stat", Path: filepath.Join(p.dir.Name(), name), Err: err}
		}
		return nil
	})
	return unix.Mkdev(info.Dev_major, info.Dev_minor), info.Ino, err
}

// sameInode reports whether links of two processes lead to the same file.
func sameInode(a, b *process, name string) (bool, error) {
	aDevice, aInode, err := a.inode(name)
	if err != nil {
		return false, err
	}
	bDevice, bInode, err := b.inode(name)
	return aDevice == bDevice && aInode == bInode, err
}

// environment returns the variables that the process was started with.
func (p *process) environment() map[string]string {
	values := make(map[string]string)
	data, err := p.read("environ")
	if err != nil {
		return values // it has ended
	}
	for entry := range strings.SplitSeq(string(data), "\x00") {
		if name, value, ok := strings.Cut(entry, "="); ok {
			values[name] = value
		}
	}
	return values
}

// resume lets the process go on.
func (p *process) resume() error {
	return p.use(func(fd int) error {
		if err := unix.PidfdSendSignal(fd, unix.SIGCONT, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("letting process %s go on: %w", filepath.Base(p.dir.Name()), err)
		}
		return nil
	})
}

// ended reports whether the process has ended. Nothing can be read of one that is gone.
func (p *process) ended() bool {
	s, err := p.stat()
	return err != nil || s.state == 'Z' || s.state == 'X'
}

// isFirst reports whether the process is the first one of its PID namespace. It is not if it has ended.
func (p *process) isFirst() bool {
	status, _ := p.read("status") // fails if it has ended
	for line := range strings.Lines(string(status)) {
		if numbers, ok := strings.CutPrefix(line, "NSpid:"); ok {
			fields := strings.Fields(numbers)
			return len(fields) > 0 && fields[len(fields)-1] == "1"
		}
	}
	return false
}

// await waits for the end of the process, or of ctx. It does not take a thread.
func (p *process) await(ctx context.Context) error {
	pid, err := p.pid()
	if err != nil {
		return fmt.Errorf("waiting for a process: %w", err)
	}
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("waiting for process %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer func() { _ = f.Close() }() // only waited for
	defer context.AfterFunc(ctx, func() { _ = f.Close() })()
	if p.ended() {
		return nil // the descriptor may be that of another process
	}
	conn, err := f.SyscallConn()
	if err == nil {
		err = conn.Read(func(fd uintptr) bool {
			ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(ready, 0)
			return err == nil && n > 0
		})
	}
	if err = cmp.Or(ctx.Err(), err); err != nil {
		return fmt.Errorf("waiting for process %d: %w", pid, err)
	}
	return nil
}

// isHeld reports whether the process stands at the end of an exec, before its first instruction: it is stopped, and the
// kernel has seen no other system call or interrupt of it since.
func (p *process) isHeld() bool {
	if s, err := p.stat(); err != nil || s.state != 'T' {
		return false
	}
	call, err := p.systemCall(".")
	return err == nil && call.isExec()
}

// systemCall is one in which a thread sleeps, or the last one of a thread that is stopped.
type systemCall struct {
	number    int // -1 for none
	arguments [6]uint64
}

// isExec reports whether the call is an exec. It is the last one of a process that has run none of the new program's
// instructions: an interrupt leaves none.
func (c systemCall) isExec() bool {
	switch c.number {
	case unix.SYS_EXECVE, unix.SYS_EXECVEAT:
		return true
	case 11, 358, 387: // by 32-bit programs on amd64 and arm64. 11 is munmap(2), too, but an exec leaves no arguments
		return c.arguments == [6]uint64{}
	default:
		return false
	}
}

// systemCall returns that of the thread with a folder. It fails for a thread that runs.
func (p *process) systemCall(thread string) (c systemCall, err error) {
	data, err := p.read(thread + "/syscall")
	if err != nil {
		return c, err
	}
	words := strings.Fields(string(data)) // the number, the arguments, the stack pointer, the program counter
	if len(words) == 0 {
		words = []string{""}
	}
	if c.number, err = strconv.Atoi(words[0]); err != nil {
		return c, fmt.Errorf("reading %s/%s/syscall: %w", p.dir.Name(), thread, err)
	}
	for i := range min(len(words)-1, len(c.arguments)) {
		if c.arguments[i], err = strconv.ParseUint(words[i+1], 0, 64); err != nil {
			return c, fmt.Errorf("reading %s/%s/syscall: %w", p.dir.Name(), thread, err)
		}
	}
	return c, nil
}

// ownPIDs is the inode of the daemon's PID namespace.
var ownPIDs = sync.OnceValues(func() (uint32, error) { return inodeOf("/proc/self/ns/pid") })

// isBelow reports whether the process is in a PID namespace below the daemon's. /proc shows no others but the daemon's.
func (p *process) isBelow() bool {
	own, ownErr := ownPIDs()
	_, inode, err := p.inode("ns/pid")
	return ownErr == nil && err == nil && inode != uint64(own)
}

// pids lists the processes in a /proc.
func pids(proc string) ([]uint32, error) {
	dir, err := os.Open(proc)
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	defer func() { _ = dir.Close() }() // only read
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var found []uint32
	for _, name := range names {
		if pid, err := strconv.ParseUint(name, 10, 32); err == nil {
			found = append(found, uint32(pid))
		}
	}
	return found, nil
}

// resumeAll lets the processes go on that stay stopped for as long as pause: those of a daemon that is gone, and those
// that this one could not let go on. It returns how many. Only those in other PID namespaces than the caller's are
// touched.
func resumeAll(
	ctx context.Context, proc string, pause time.Duration, letGo func(*process) bool,
) (count int, err error) {
	held, err := heldProcesses(proc)
	defer func() {
		for _, p := range held {
			p.close()
		}
	}()
	if len(held) == 0 {
		return 0, err
	}
	select {
	case <-time.After(pause):
	case <-ctx.Done():
		return 0, err // the next daemon looks for them
	}
	for _, p := range held {
		if p.isHeld() && letGo(p) {
			count++
		}
	}
	return count, err
}

// heldProcesses opens the processes that a daemon has stopped. With an error it may have missed some.
func heldProcesses(proc string) (held []*process, err error) {
	all, err := pids(proc)
	if err != nil {
		return nil, err
	}
	for _, pid := range all {
		p, openErr := openProcess(proc, pid, 0)
		if openErr != nil {
			if !saysEnded(openErr) {
				err = openErr // one stands for all
			}
			continue
		}
		if p.isHeld() && p.isBelow() {
			held = append(held, p)
		} else {
			p.close()
		}
	}
	return held, err
}
