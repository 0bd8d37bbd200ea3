package nested

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// begin begins to watch pods. Containers that run before are found first: their next program is not their first. Those
// that start meanwhile are found then.
func (e *Engine) begin(w *watcher, pods map[uint32]*watchedPod) {
	e.sweep(w, pods)
	e.mu.Lock()
	for netns, pod := range pods {
		if e.watcher != w || e.pods[netns] != pod {
			continue
		}
		if err := w.watch(netns); err != nil {
			e.config.Log.Error("nested containers are not given the CA: their TLS is passed through", "err", err)
		}
	}
	e.mu.Unlock()
	e.sweep(w, pods)
}

// running is a nested container that runs when it is looked for.
type running struct {
	c     *container
	known bool // since before
	// writers are those of its processes that may write trust stores, by their names.
	writers []*process
}

// sweep looks at the nested containers that run already in pods, those of each pod one after another.
func (e *Engine) sweep(w *watcher, pods map[uint32]*watchedPod) {
	if !e.numbers {
		return
	}
	found, err := e.list(pods)
	if err != nil {
		e.config.Log.Warn("a nested container is not given the CA", "err", err)
	}
	of := map[*watchedPod][]*running{}
	for _, r := range found {
		r.c.lateStart = true // before others see it
		c := e.add(w, r.c)
		r.known, r.c = c != r.c, c
		if c == nil {
			r.close()
			continue
		}
		of[c.pod] = append(of[c.pod], r)
	}
	forEachPod(e, of, func(r *running) { e.begun(w, r) })
}

func (r *running) close() {
	for _, p := range r.writers {
		p.close()
	}
}

// begun gives a container that runs the CA, unless it is known. An updater that has started unseen is waited for.
func (e *Engine) begun(w *watcher, r *running) {
	defer r.close()
	for _, p := range r.writers {
		e.waitForWriter(w, r.c, p)
	}
	if !r.known {
		e.equipRunning(w, r.c)
	}
}

// waitForWriter steps aside for a process that may write trust stores, if it does.
func (e *Engine) waitForWriter(w *watcher, c *container, p *process) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	name, err := p.name()
	if err == nil {
		if u := e.updateBy(ctx, c, p, name, nil); u != updateNone {
			err = e.stepAside(ctx, w, c, p, u)
			e.config.Changed(c.pod.uid)
		}
	}
	if err != nil && !p.ended() {
		c.pod.warn(e.config.Log, c.name, err)
	}
}

// list lists the nested containers of pods, by the numbers of their mount namespaces. With an error it may have missed
// some.
func (e *Engine) list(pods map[uint32]*watchedPod) (map[uint64]*running, error) {
	own, err := inodeOf("/proc/self/ns/pid")
	if err != nil {
		return nil, err
	}
	all, err := pids(e.config.Proc)
	if err != nil {
		return nil, err
	}
	l := lister{own: uint64(own), owners: map[uint64]uint64{}, inits: map[uint64]*process{}}
	defer l.close()
	for _, pid := range all {
		if p, err := openProcess(e.config.Proc, pid, 0); err == nil && !l.keep(p) {
			p.close()
		}
	}
	found := map[uint64]*running{}
	for _, p := range l.processes { // no process can hide others by an error
		if noteErr := e.note(found, &l, p, pods); noteErr != nil && !p.ended() {
			err = noteErr // one stands for all
		}
	}
	return found, err
}

// note notes the container of a process, if it is one in these pods.
func (e *Engine) note(found map[uint64]*running, l *lister, p *process, pods map[uint32]*watchedPod) error {
	owner := l.inits[l.ownerOf(p)]
	if owner == nil {
		return nil
	}
	_, inode, err := owner.inode("ns/net")
	if err != nil {
		return err
	}
	netns := uint32(inode)
	pod, wanted := pods[netns]
	if !wanted {
		return nil
	}
	if own, err := isOwn(e.config.Proc, p, owner); err != nil || own {
		return err
	}
	mount, err := p.mountNumber()
	if err != nil {
		return err
	}
	r := found[mount]
	if r == nil {
		c, err := newContainer(p, mount, netns, pod)
		if err != nil {
			return err
		}
		r = &running{c: c}
		found[mount] = r
	}
	name, err := p.name()
	if err != nil || !isUpdater(name) && !slices.Contains(byArguments, name) {
		return err
	}
	writer, err := p.again()
	if err == nil {
		r.writers = append(r.writers, writer)
	}
	return err
}

// lister finds the pods' own containers of processes.
type lister struct {
	own       uint64              // the PID namespace of this process
	owners    map[uint64]uint64   // of a PID namespace: the one above it that is right below own, or 0
	inits     map[uint64]*process // the first processes of those
	processes []*process          // in other PID namespaces than own
}

func (l *lister) close() {
	for _, p := range l.processes {
		p.close()
	}
}

// keep takes over a process of a container.
func (l *lister) keep(p *process) bool {
	owner := l.ownerOf(p)
	if owner == 0 {
		return false
	}
	_, inode, err := p.inode("ns/pid")
	if err != nil {
		return false // it has ended
	}
	if inode == owner && p.isFirst() {
		l.inits[owner] = p
	}
	l.processes = append(l.processes, p)
	return true
}

// firstOf opens the first process of the PID namespace of a process, whose end is that of the container. It is nil if
// that process has another mount namespace.
func firstOf(proc string, p *process) *process {
	all, _ := pids(proc) // without them there is none
	for _, pid := range all {
		first, err := openProcess(proc, pid, 0)
		if err != nil {
			continue // it has ended
		}
		samePID, pidErr := sameInode(first, p, "ns/pid")
		sameMount, mountErr := sameInode(first, p, "ns/mnt")
		if pidErr == nil && mountErr == nil && samePID && sameMount && first.isFirst() {
			return first
		}
		first.close()
	}
	return nil
}

// ownerOf is the PID namespace of the pod's own container in or below which a process is, or 0.
func (l *lister) ownerOf(p *process) uint64 {
	_, inode, err := p.inode("ns/pid")
	if err != nil || inode == l.own {
		return 0
	}
	if owner, ok := l.owners[inode]; ok {
		return owner
	}
	owner, err := l.climb(p)
	if err != nil {
		return 0 // it has ended, or it is in no namespace below
	}
	l.owners[inode] = owner
	return owner
}

// climb goes up from the PID namespace of a process.
func (l *lister) climb(p *process) (uint64, error) {
	at, err := p.open("ns/pid", unix.O_RDONLY)
	if err != nil {
		return 0, err
	}
	for range maxLevels {
		inode, err := inodeOfFile(at)
		if err != nil {
			return 0, errors.Join(err, at.Close())
		}
		fd, err := unix.IoctlRetInt(int(at.Fd()), unix.NS_GET_PARENT)
		if err = errors.Join(err, at.Close()); err != nil {
			return 0, fmt.Errorf("looking for the parent of a PID namespace: %w", err)
		}
		at = os.NewFile(uintptr(fd), "the parent of a PID namespace")
		if above, err := inodeOfFile(at); err != nil || above == l.own {
			return inode, errors.Join(err, at.Close())
		}
	}
	return 0, at.Close()
}

func inodeOfFile(f *os.File) (uint64, error) {
	var info unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &info); err != nil {
		return 0, &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	return info.Ino, nil
}

// getMountNumber is the ioctl NS_GET_MNTNS_ID of linux/nsfs.h, since Linux 6.11.
const getMountNumber = 0x8008b705

// mountNumber is the number of a process's mount namespace, as the BPF program reads it.
func (p *process) mountNumber() (uint64, error) {
	f, err := p.open("ns/mnt", unix.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }() // only asked
	var number uint64
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), getMountNumber, uintptr(unsafe.Pointer(&number)))
	if errno != 0 {
		return 0, fmt.Errorf("asking for the number of a mount namespace: %w", errno)
	}
	return number, nil
}

// tellsNumbers reports whether the kernel has that ioctl, by asking for the number of this process.
func tellsNumbers() bool {
	self, err := openProcess("/proc", uint32(os.Getpid()), 0)
	if err != nil {
		return false
	}
	defer self.close()
	_, err = self.mountNumber()
	return err == nil
}
