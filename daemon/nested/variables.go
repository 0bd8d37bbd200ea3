package nested

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// variable is an environment variable. It is not given to a program that has it, or has the variable unless.
type variable struct{ name, value, unless string }

// bundleVariable names a bundle that OpenSSL and others read in place of their own.
const bundleVariable = "SSL_CERT_FILE"

// variablesFor are for clients that have roots of their own, and take others only by a variable. There is none for
// requests and pip: REQUESTS_CA_BUNDLE would take the place of a bundle that a program names itself.
func variablesFor(bundle string) []variable {
	return []variable{
		{name: "NODE_EXTRA_CA_CERTS", value: bundle}, // Node.js and Bun
		{name: "DENO_TLS_CA_STORE", value: "mozilla,system"},
		{name: bundleVariable, value: bundle, unless: "SSL_CERT_DIR"}, // uv
	}
}

// traceTime bounds the time for which a process is traced. It takes much less than a millisecond, unless the cgroup of
// the process is frozen or has no time.
const traceTime = 500 * time.Millisecond

// withVariables adds the variables that a program does not have, and returns all that it has then. There are none if it
// is not to have more.
func (p *process) withVariables(ctx context.Context, wanted []variable) (map[string]string, error) {
	all := p.environment()
	var entries []string
	for _, v := range missing(wanted, all) {
		entries = append(entries, v.name+"="+v.value)
		all[v.name] = v.value
	}
	if added, err := p.addVariables(ctx, entries); err != nil || !added {
		return nil, err
	}
	return all, nil
}

// missing are the variables that an environment does not have.
func missing(wanted []variable, has map[string]string) []variable {
	return slices.DeleteFunc(slices.Clone(wanted), func(v variable) bool {
		_, present := has[v.name]
		_, loses := has[v.unless]
		return present || loses && v.unless != ""
	})
}

// addVariables adds environment variables, as NAME=value, to a program that has stopped before its first instruction.
// It reports false for a program that is not to have more: one of 32 bits, or one with more rights than its caller.
//
// The kernel has put the variables on the stack, below which there is room. A copy with more of them goes there, and
// the stack pointer to the copy: only ptrace(2) can set it. A debugger that traces the process keeps it from that. The
// end of the thread that traces is the end of the trace.
func (p *process) addVariables(ctx context.Context, entries []string) (added bool, err error) {
	if len(entries) == 0 {
		return true, nil
	}
	pid, err := p.pid()
	if err != nil {
		return false, fmt.Errorf("adding variables: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, traceTime)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for ever: the thread ends with this function
		t := tracee{process: p, pid: pid}
		added, err = t.addVariables(ctx, entries)
	}()
	<-done
	if err != nil && !p.ended() {
		return false, fmt.Errorf("adding variables to process %d: %w", pid, err)
	}
	return added, nil
}

// tracee is a process that the calling thread traces.
type tracee struct {
	*process
	pid    int
	signal unix.Signal // the one that has stopped it; 0 for the stop that seize asks for
}

func (t *tracee) addVariables(ctx context.Context, entries []string) (added bool, err error) {
	defer t.detach()
	if err := t.seize(ctx); err != nil {
		return false, err
	}
	registers := make([]uint64, stackPointer.registers)
	length, err := t.registers(unix.PTRACE_GETREGSET, registers)
	if err != nil {
		return false, fmt.Errorf("reading registers: %w", err)
	}
	if len(registers) == 0 || length != len(registers)*word {
		return false, nil // a 32-bit program
	}
	pointer := &registers[stackPointer.index]
	if err := t.checkFirst(*pointer); err != nil {
		return false, err
	}
	stack, err := t.readStack(*pointer)
	if err != nil {
		return false, err
	}
	more, err := extend(stack, *pointer, entries)
	if err != nil || more == nil {
		return false, err
	}
	*pointer -= uint64(len(more))
	if err := t.writeStack(*pointer, more); err != nil {
		return false, err
	}
	if _, err := t.registers(unix.PTRACE_SETREGSET, registers); err != nil {
		return false, fmt.Errorf("setting the stack pointer: %w", err)
	}
	return true, nil
}

// checkFirst fails unless the process stands before its program's first instruction: after an exec, and where the
// kernel has put its stack pointer. The latter is not so after an exec that has failed.
func (t *tracee) checkFirst(pointer uint64) error {
	call, err := t.systemCall(".")
	if err != nil {
		return err
	}
	now, err := t.stat()
	if err != nil {
		return err
	}
	if !call.isExec() || now.stack != pointer {
		return errTooLate
	}
	return nil
}

// errTooLate is the error about a process that has gone on.
var errTooLate = errors.New("it runs already")

// seize begins to trace the process, and waits until it stops for that.
func (t *tracee) seize(ctx context.Context) error {
	if err := unix.PtraceSeize(t.pid); err != nil {
		return fmt.Errorf("tracing it: %w", err)
	}
	// The process of this number was the one that is meant, if that has not ended by now.
	if _, err := t.stat(); err != nil {
		return err
	}
	if ctx.Err() != nil { // an exec that it is in can take any time
		return errTooLate
	}
	if err := unix.PtraceInterrupt(t.pid); err != nil {
		return fmt.Errorf("stopping it: %w", err)
	}
	for pause := firstTracePause; ; pause = min(2*pause, lastTracePause) {
		var status unix.WaitStatus
		got, err := unix.Wait4(t.pid, &status, unix.WALL|unix.WNOHANG, nil)
		switch {
		case err != nil:
			return fmt.Errorf("waiting for its stop: %w", err)
		case got == t.pid && status.Stopped():
			if event := status >> 16; event == 0 {
				t.signal = status.StopSignal()
			}
			return nil
		case got == t.pid:
			return errOther // it has ended
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return errors.New("it does not stop")
		}
	}
}

// detach ends the trace, if there is one. A signal that came meanwhile has its effect now.
func (t *tracee) detach() {
	// It fails if the process has ended, or has not stopped. Then the end of the thread ends the trace.
	_, _, _ = unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_DETACH, uintptr(t.pid), 0, uintptr(t.signal), 0, 0)
}

// The time between two looks whether a process has stopped.
const (
	firstTracePause = 50 * time.Microsecond
	lastTracePause  = 10 * time.Millisecond
)

// word is the length of a pointer, in bytes.
const word = 8

// stackPointer says how many general registers there are in a set (NT_PRSTATUS), and which is the stack pointer: of
// struct user_regs_struct on amd64, and of struct user_pt_regs on arm64.
var stackPointer = map[string]struct{ registers, index int }{"amd64": {27, 19}, "arm64": {34, 31}}[runtime.GOARCH]

// registers reads or sets the general registers. It returns their length in bytes.
func (t *tracee) registers(request int, values []uint64) (length int, err error) {
	set := unix.Iovec{Base: (*byte)(unsafe.Pointer(unsafe.SliceData(values)))}
	set.SetLen(len(values) * word)
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(t.pid), unix.NT_PRSTATUS,
		uintptr(unsafe.Pointer(&set)), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(set.Len), nil
}

const (
	// maxVectors bounds the pointers on the stack of a new program: 16,000 arguments and variables.
	maxVectors = 128 << 10
	// maxAdded bounds the addition to the stack, for which the kernel leaves 128 KiB (setup_arg_pages).
	maxAdded = 96 << 10
)

// readStack reads the stack of a new program, from its pointer on. It may end before. The file /proc/PID/mem would not
// do for the next function: the daemon has the node's /proc read-only.
func (t *tracee) readStack(pointer uint64) ([]byte, error) {
	stack := make([]byte, maxVectors)
	n, err := unix.ProcessVMReadv(t.pid, local(stack), remote(pointer, stack), 0)
	if err != nil || n < word {
		return nil, fmt.Errorf("reading the stack: %w", cmp.Or(err, io.ErrUnexpectedEOF))
	}
	return stack[:n], nil
}

func (t *tracee) writeStack(pointer uint64, data []byte) error {
	n, err := unix.ProcessVMWritev(t.pid, local(data), remote(pointer, data), 0)
	if err != nil || n < len(data) {
		return fmt.Errorf("writing to the stack: %w", cmp.Or(err, io.ErrShortWrite))
	}
	return nil
}

func local(data []byte) []unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(data)}
	v.SetLen(len(data))
	return []unix.Iovec{v}
}

// remote is the part of the process's memory at a pointer that is as long as data.
func remote(pointer uint64, data []byte) []unix.RemoteIovec {
	return []unix.RemoteIovec{{Base: uintptr(pointer), Len: len(data)}}
}

// The ends of the parts of the stack of a new program (System V ABI: initial process stack).
const (
	auxNull   = 0  // AT_NULL
	auxSecure = 23 // AT_SECURE
)

// vectors finds the auxiliary vector on the stack of a new program, and its end, which is 0 if there is none. secure is
// true for a program that has more rights than its caller.
func vectors(words []uint64) (auxiliary, end int, secure bool) {
	if words[0] >= uint64(len(words)) {
		return 0, 0, false
	}
	variables := int(words[0]) + 2 // behind the number of arguments, and the null pointer behind them
	if variables > len(words) {
		return 0, 0, false
	}
	null := slices.Index(words[variables:], 0)
	if null < 0 {
		return 0, 0, false
	}
	auxiliary = variables + null + 1
	for at := auxiliary; at+1 < len(words); at += 2 {
		switch kind, value := words[at], words[at+1]; {
		case kind == auxNull:
			return auxiliary, at + 2, secure
		case kind == auxSecure && value != 0:
			secure = true
		}
	}
	return 0, 0, false
}

// extend returns the bytes to put below the stack of a new program at a pointer, to add variables: the number of
// arguments, the pointers to them and to the variables, the auxiliary vector, and the new variables. It is nil for a
// program that has more rights than its caller: its variables are for its user alone to choose.
func extend(stack []byte, pointer uint64, entries []string) ([]byte, error) {
	words := make([]uint64, len(stack)/word)
	for i := range words {
		words[i] = binary.NativeEndian.Uint64(stack[i*word:])
	}
	auxiliary, end, secure := vectors(words)
	if end == 0 {
		return nil, errors.New("its stack is not that of a new program, or is too large")
	}
	if secure {
		return nil, nil
	}
	text := strings.Join(entries, "\x00") + "\x00"
	const alignment = 16
	length := (end+len(entries))*word + len(text)
	length += (alignment - length%alignment) % alignment
	if length > maxAdded {
		return nil, fmt.Errorf("its arguments and variables take %d bytes of pointers, more than %d", length, maxAdded)
	}
	at := pointer - uint64(length) + uint64((end+len(entries))*word)
	added := make([]byte, 0, length)
	for _, w := range words[:auxiliary-1] {
		added = binary.NativeEndian.AppendUint64(added, w)
	}
	for _, e := range entries {
		added = binary.NativeEndian.AppendUint64(added, at)
		at += uint64(len(e) + 1)
	}
	for _, w := range words[auxiliary-1 : end] {
		added = binary.NativeEndian.AppendUint64(added, w)
	}
	added = append(added, text...)
	return added[:length], nil
}
