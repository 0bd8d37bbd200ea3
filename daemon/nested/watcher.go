package nested

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// maps are the maps of the program.
type maps struct {
	nets     *ebpf.Map // inodes of the netns of watched pods, as 8 bytes
	known    *ebpf.Map // number of a mount namespace -> knownOwn, knownSettled or knownAside
	looked   *ebpf.Map // number of a mount namespace -> the time of the last look, by CLOCK_MONOTONIC
	updaters *ebpf.Map // names of programs: those of updaters.go
	events   *ebpf.Map
	levels   int // of PID namespaces above a container that the program can count
}

// The sizes of the maps. An entry that a full map drops costs one more stop.
const (
	maxNets       = 1024
	maxKnown      = 16384
	maxUpdaters   = 256
	eventsBytes   = 256 << 10
	maxProgLevels = 4
)

// watcher has the program in the kernel. Processes stop only while it does: the kernel removes the program with the
// last descriptor, however this process ends.
type watcher struct {
	maps    maps
	link    link.Link
	program *ebpf.Program
	reader  *ringbuf.Reader

	mu     sync.Mutex // guards the maps against close: looks at containers may outlast the watcher
	closed bool
}

// newWatcher loads the program and puts it to the tracepoint.
func newWatcher() (*watcher, error) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, fmt.Errorf("reading the kernel's types (BTF): %w", err)
	}
	f, err := findFields(spec)
	if err != nil {
		return nil, err
	}
	own, err := inodeOf("/proc/self/ns/pid")
	if err != nil {
		return nil, err
	}
	w := &watcher{}
	if err := w.load(f, own); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

// load loads the program for a kernel with these fields, and for a process in this PID namespace.
func (w *watcher) load(f fields, ownPIDNS uint32) (err error) {
	if err := w.makeMaps(); err != nil {
		return err
	}
	w.program, err = ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "nested_exec", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: "sched_process_exec",
		Instructions: program(f, w.maps, ownPIDNS),
		License:      "Dual MIT/GPL", // bpf_send_signal is for licenses that are compatible with the GPL alone
	})
	if err != nil {
		return fmt.Errorf("loading the BPF program: %w", err)
	}
	if w.reader, err = ringbuf.NewReader(w.maps.events); err != nil {
		return fmt.Errorf("reading the events of the BPF program: %w", err)
	}
	if w.link, err = link.AttachTracing(link.TracingOptions{Program: w.program}); err != nil {
		return fmt.Errorf("attaching the BPF program: %w", err)
	}
	return nil
}

func (w *watcher) makeMaps() error {
	w.maps.levels = maxProgLevels
	for _, m := range []struct {
		to   **ebpf.Map
		spec ebpf.MapSpec
	}{
		{&w.maps.nets, ebpf.MapSpec{Type: ebpf.Hash, KeySize: 8, ValueSize: 4, MaxEntries: maxNets}},
		{&w.maps.known, ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: 8, ValueSize: 4, MaxEntries: maxKnown}},
		{&w.maps.looked, ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: 8, ValueSize: 8, MaxEntries: maxKnown}},
		{&w.maps.updaters, ebpf.MapSpec{Type: ebpf.Hash, KeySize: 16, ValueSize: 4, MaxEntries: maxUpdaters}},
		{&w.maps.events, ebpf.MapSpec{Type: ebpf.RingBuf, MaxEntries: eventsBytes}},
	} {
		created, err := ebpf.NewMap(&m.spec)
		if err != nil {
			return fmt.Errorf("making a BPF map: %w", err)
		}
		*m.to = created
	}
	for _, name := range slices.Concat(updaters, byArguments) {
		var key [16]byte
		copy(key[:maxName], name)
		if err := w.maps.updaters.Put(key, uint32(1)); err != nil {
			return fmt.Errorf("naming the updaters of trust stores: %w", err)
		}
	}
	return nil
}

// watch stops new containers below a pod's own containers from now on.
func (w *watcher) watch(netns uint32) error {
	return w.change(fmt.Sprintf("watching the netns %d", netns), func(m maps) error {
		return m.nets.Put(uint64(netns), uint32(1))
	})
}

// change changes the maps, for that purpose. Those of a watcher that is closed need no change.
func (w *watcher) change(purpose string, do func(maps) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	if err := do(w.maps); err != nil {
		return fmt.Errorf("%s: %w", purpose, err)
	}
	return nil
}

// remove removes a key, if it is there.
func remove(m *ebpf.Map, key any) error {
	if err := m.Delete(key); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// unwatch ends watch.
func (w *watcher) unwatch(netns uint32) error {
	return w.change(fmt.Sprintf("watching the netns %d no more", netns), func(m maps) error {
		return remove(m.nets, uint64(netns))
	})
}

// next waits for the next process that was stopped. The error is ringbuf.ErrFlushed when there is none after a flush.
func (w *watcher) next() (event, error) {
	record, err := w.reader.Read()
	if err != nil {
		return event{}, err //nolint:wrapcheck // the caller looks for one error, and reports others
	}
	var e event
	if err := binary.Read(bytes.NewReader(record.RawSample), binary.NativeEndian, &e); err != nil {
		return event{}, fmt.Errorf("reading an event of the BPF program: %w", err)
	}
	return e, nil
}

// settle says which execs in a mount namespace are to stop.
func (w *watcher) settle(mount uint64, verdict uint32) error {
	return w.change("noting the mount namespace of a container", func(m maps) error {
		return m.known.Put(mount, verdict)
	})
}

// forget makes the next exec in a mount namespace stop.
func (w *watcher) forget(mount uint64) error {
	return w.change("forgetting the mount namespace of a container", func(m maps) error {
		return remove(m.known, mount)
	})
}

// detach takes the program from the tracepoint. The events so far can still be read.
func (w *watcher) detach() error {
	if w.link == nil {
		return nil
	}
	err := w.link.Close()
	w.link = nil
	if err != nil {
		return fmt.Errorf("detaching the BPF program: %w", err)
	}
	return nil
}

// close frees the watcher's objects in the kernel. Errors of closing are of no use: no descriptor is left.
func (w *watcher) close() {
	_ = w.detach()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.reader != nil {
		_ = w.reader.Close()
	}
	if w.program != nil {
		_ = w.program.Close()
	}
	for _, m := range []*ebpf.Map{
		w.maps.nets, w.maps.known, w.maps.looked, w.maps.updaters, w.maps.events,
	} {
		if m != nil {
			_ = m.Close()
		}
	}
}

// inodeOf is the inode of a namespace, which has 32 bits.
func inodeOf(path string) (uint32, error) {
	var info unix.Stat_t
	if err := unix.Stat(path, &info); err != nil {
		return 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if info.Ino > math.MaxUint32 {
		return 0, fmt.Errorf("%s has the inode %d", path, info.Ino)
	}
	return uint32(info.Ino), nil
}
