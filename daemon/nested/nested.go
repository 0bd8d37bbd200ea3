// Package nested makes the containers that a Docker in a captured pod starts trust the CA of the node's proxy. Nothing
// is written into them, so an image that is built there has no trace of the CA.
//
//	e := nested.New(nested.Config{CAFile: …, Proc: "/proc", Changed: …, Log: …})
//	go e.Run(ctx)
//	e.Watch(map[uint32]string{netnsInode: podUID}) // the pods that have opted in
//	e.State(podUID)
//
// # A container starts
//
// A BPF program (program.go) at the tracepoint sched_process_exec sees each program that a process of the node
// executes. It sends SIGSTOP to the first one in a mount namespace that is new, below a watched pod. That is the
// container's first program: runc makes the namespaces after its own last exec. The process stops before its first
// instruction, and an event tells this process about it.
//
// The daemon opens the container's root, mounts a copy with the CA over each trust store there (plugin/truststore), and
// lets the process go on, in some milliseconds. A container whose stores take longer than the deadline goes on without,
// and counts as one that does not trust the CA.
//
// The process is given environment variables, too, for clients that read no store (variables.go). So is each one that
// enters the container later, as by `docker exec`. Their children inherit them.
//
// # A trust store is updated
//
// No program can rename a file over a mount, so update-ca-certificates, dpkg and the like would fail. Their execs stop
// too. The daemon takes the mounts away before they go on. Meanwhile each exec in that container stops. The first one
// after the updater's end, or that end itself, brings the mounts back.
//
// Programs such as rm and cp stop, too. They count as updaters if an argument leads to a store (editors.go). Else they
// go on at once.
//
// # A trust store appears
//
// An exec that comes two seconds or more after the last look at a container stops, and the daemon looks again.
//
// # Parents that see the stop
//
// A shell with job control would report its command as stopped, and go on to the next one. So the jobs of such a shell
// do not stop in a container that is known, and the daemon does its work while they run. Other parents stop themselves
// when they see a stopped child. They are let go on (parents.go).
//
// # Processes that are no containers of a Docker
//
// The program knows the pod's own containers by their PID namespaces: those right below the daemon's, whose first
// process is in the pod's netns. Processes in the mount namespace of that one, or with its root, pass, such as those of
// unshare(1). The daemon looks again at each stopped process, and never mounts anything in the mount namespaces of the
// node, of the daemon, or of the pod's own container.
//
// # The end of the daemon
//
// The program is in the kernel as long as the daemon has its descriptor: nothing stops any more when the daemon is
// gone, however it ended. A daemon that ends handles all events before. A process that one has left stopped, because it
// was killed, goes on some seconds after the next one has started: resumeAll knows it by its state, stopped at the end
// of an exec for longer than a daemon that runs would take. A daemon that runs looks again at intervals.
package nested

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/throttle"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// Config is the configuration of an Engine.
type Config struct {
	// CAFile has the CA certificates in PEM. It may appear and change at any time; Update says so.
	CAFile string
	// Proc is the folder of the node's processes.
	Proc string
	// Changed is called after the state of a container in a pod may have changed. It must not block.
	Changed func(podUID string)
	// Tell is called before a process goes on, and returns when the proxies know the states of containers.
	Tell func()
	Log  *slog.Logger
}

// Container is the state of a container.
type Container struct {
	// Name is that of its cgroup, or its PID.
	Name string
	// Addresses are those of its own network. There are none if it uses the network of the pod.
	Addresses []netip.Addr
	// PodNetwork is true for one in the network of the pod.
	PodNetwork bool
	State      truststore.State
	// Note is the reason for another state than trusted.
	Note string
}

const (
	// deadline bounds how long a process is stopped. It takes milliseconds, and more on a node that has no time.
	deadline = 5 * time.Second
	// maxContainers bounds the containers of a pod that are remembered.
	maxContainers = 1024
	// refreshInterval is the time between looks at the addresses of containers: a Docker may connect them to more
	// networks.
	refreshInterval = 5 * time.Second
	// resumeInterval is the time between looks for processes that stay stopped.
	resumeInterval = 20 * time.Second
)

// Engine makes nested containers trust the CA.
type Engine struct {
	config Config
	work   sync.WaitGroup // the looks that go on
	// parents are those of processes that were stopped.
	parents *parents
	stopped throttle.Lines // about processes that stay stopped
	// interval is the time between looks for processes that stay stopped, and patience how long they do.
	interval, patience time.Duration
	// numbers is true if the kernel tells the number of the mount namespace of a process.
	numbers bool

	mu         sync.Mutex             // guards the fields below
	running    bool                   // between the start and the end of Run
	pods       map[uint32]*watchedPod // by the inode of the netns
	watcher    *watcher               // nil while no pod is watched, or if that is not possible
	problem    string                 // the reason why not
	containers map[uint64]*container
	// lasting are the readers, the looks for processes that stay stopped, and the waits for the end of processes.
	lasting sync.WaitGroup
}

// New makes an engine. Run does the work.
func New(config Config) *Engine {
	e := &Engine{
		config: config, numbers: tellsNumbers(),
		pods: map[uint32]*watchedPod{}, containers: map[uint64]*container{},
	}
	e.parents = newParents(config.Proc, e.letGo)
	e.interval, e.patience = resumeInterval, deadline+time.Second
	return e
}

// Run works until ctx ends. Then nothing is stopped any more.
func (e *Engine) Run(ctx context.Context) error {
	e.lasting.Go(func() { e.resumeLeft(ctx) })
	e.mu.Lock()
	e.running = true
	e.watchLocked(e.pods)
	e.mu.Unlock()
	refresh := time.NewTicker(refreshInterval)
	defer refresh.Stop()
	for {
		select {
		case <-refresh.C:
			e.refresh()
		case <-ctx.Done():
			e.mu.Lock()
			e.running = false
			e.stopLocked()
			e.mu.Unlock()
			e.lasting.Wait()
			e.work.Wait()
			e.parents.finish()
			e.closeAll()
			return nil
		}
	}
}

// closeAll closes the copies of all pods.
func (e *Engine) closeAll() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, pod := range e.pods {
		pod.tmpfs.close()
	}
}

// watches reports whether any pods are to be watched.
func (e *Engine) watches() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.pods) > 0
}

// resumeLeft lets processes go on that this daemon or an earlier one has left behind, now and at intervals.
func (e *Engine) resumeLeft(ctx context.Context) {
	again := time.NewTicker(e.interval)
	defer again.Stop()
	for {
		count, err := resumeAll(ctx, e.config.Proc, e.patience, e.letGo)
		if err != nil {
			if lines, due := e.stopped.Due("looked for"); due {
				e.config.Log.Warn("not all processes that a daemon has stopped are looked for", "err", err,
					"count", lines)
			}
		}
		if count > 0 {
			e.config.Log.Warn("processes that a daemon had stopped go on", "processes", count)
		}
		for done := false; !done; done = e.watches() {
			select {
			case <-again.C:
			case <-ctx.Done():
				return
			}
		}
	}
}

// letGo lets a stopped process go on, and its parent, if that has stopped itself because it has seen the stop.
func (e *Engine) letGo(p *process) bool {
	parent, parentErr := e.parents.of(p)
	err := p.resume()
	if parent != nil {
		e.parents.look(parent)
	}
	if joined := errors.Join(err, parentErr); joined != nil {
		e.warnOfStopped(joined)
	}
	return err == nil
}

// warnOfStopped logs that a process cannot be let go on, unless there was such a line just now.
func (e *Engine) warnOfStopped(err error) {
	if count, due := e.stopped.Due("stopped"); due {
		e.config.Log.Error("a process in a nested container may stay stopped", "err", err, "count", count)
	}
}

// Watch sets the pods that have opted in: their UIDs by the inode of their netns. Containers that run already are
// looked at. Those of other pods lose their mounts.
func (e *Engine) Watch(pods map[uint32]string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.pods
	e.pods = map[uint32]*watchedPod{}
	fresh := map[uint32]*watchedPod{}
	for netns, uid := range pods {
		if p := before[netns]; p != nil && p.uid == uid {
			e.pods[netns] = p
			continue
		}
		fresh[netns] = newWatchedPod(uid)
		e.pods[netns] = fresh[netns]
	}
	for netns, p := range before {
		if e.pods[netns] != p {
			e.unwatchLocked(netns, p)
		}
	}
	if e.watcher == nil {
		fresh = e.pods
	}
	e.watchLocked(fresh)
}

// watchLocked watches fresh pods, if the engine runs.
func (e *Engine) watchLocked(fresh map[uint32]*watchedPod) {
	switch {
	case !e.running:
	case len(e.pods) == 0:
		e.stopLocked()
	case e.watcher != nil || e.startLocked():
		if w := e.watcher; len(fresh) > 0 {
			e.work.Go(func() { e.begin(w, fresh) })
		}
	}
}

// startLocked begins to watch. It is tried again with the next Watch if it fails.
func (e *Engine) startLocked() bool {
	err := checkPrivileges(e.config.Proc)
	var w *watcher
	if err == nil {
		err = checkKernel()
	}
	if err == nil {
		w, err = newWatcher()
	}
	if err != nil {
		if problem := err.Error(); problem != e.problem {
			e.config.Log.Error("nested containers are not given the CA: their TLS is passed through", "err", err)
			e.problem = problem
		}
		return false
	}
	if !e.numbers {
		e.config.Log.Warn("nested containers that run already are looked at when they start a program: " +
			"Linux is older than 6.11")
	}
	e.watcher, e.problem = w, ""
	e.lasting.Go(func() { e.read(w) })
	return true
}

// stopLocked ends watching. The reader closes the watcher when it has handled the last event.
func (e *Engine) stopLocked() {
	if e.watcher == nil {
		return
	}
	if err := e.watcher.detach(); err != nil {
		e.config.Log.Error("nested containers are watched on", "err", err)
	}
	if err := e.watcher.reader.Flush(); err != nil {
		e.config.Log.Error("nested containers are watched on", "err", err)
	}
	e.forgetAllLocked()
}

// forgetAllLocked forgets the watcher and all containers. These keep their mounts.
func (e *Engine) forgetAllLocked() {
	e.watcher = nil
	for _, c := range e.containers {
		c.forget()
	}
	e.containers = map[uint64]*container{}
}

// unwatchLocked watches a pod no more, and takes the mounts away from its containers.
func (e *Engine) unwatchLocked(netns uint32, pod *watchedPod) {
	pod.tmpfs.close()
	if e.watcher == nil {
		return
	}
	if err := e.watcher.unwatch(netns); err != nil {
		e.config.Log.Error("nested containers are watched on", "err", err)
	}
	for id, c := range e.containers {
		if c.pod != pod {
			continue
		}
		delete(e.containers, id)
		p, err := c.first.again()
		c.forget()
		if err == nil { // else it has ended
			e.work.Go(func() { e.release(c, p) })
		}
	}
}

// read handles events until the watcher is detached, and no event is left.
func (e *Engine) read(w *watcher) {
	defer w.close()
	var handling sync.WaitGroup
	defer handling.Wait() // they use the watcher
	for {
		event, err := w.next()
		switch {
		case err == nil:
			handling.Go(func() { e.handle(w, event) })
		case errors.Is(err, ringbuf.ErrFlushed):
			return
		default:
			e.fail(w, err)
			return
		}
	}
}

// fail gives up a watcher after an error of reading its events. The next Watch starts again.
func (e *Engine) fail(w *watcher, err error) {
	e.config.Log.Error("nested containers are not given the CA: their TLS is passed through", "err", err)
	e.mu.Lock()
	var pods []string
	if e.watcher == w {
		e.forgetAllLocked()
		e.problem = err.Error()
		for _, pod := range e.pods {
			pods = append(pods, pod.uid)
		}
	}
	e.mu.Unlock()
	for _, pod := range pods {
		e.config.Changed(pod)
	}
}

// handle looks at a process that has stopped, and lets it go on.
func (e *Engine) handle(w *watcher, ev event) {
	p, err := openProcess(e.config.Proc, ev.PID, ev.Start)
	if err != nil {
		if !saysEnded(err) {
			e.warnOfStopped(err)
		}
		return
	}
	defer p.close()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	letGo := sync.OnceFunc(func() {
		if ev.Flags&flagJob == 0 {
			e.letGo(p)
		}
	})
	defer context.AfterFunc(ctx, letGo)()
	defer letGo()
	e.mu.Lock()
	pod, watched := e.pods[ev.Netns]
	e.mu.Unlock()
	if !watched {
		return
	}
	c, err := e.find(w, p, ev, pod)
	if err != nil {
		pod.warn(e.config.Log, "", err)
		return
	}
	if c == nil {
		return
	}
	name := ev.name()
	if !isUpdater(name) && (!c.settled.Load() || ev.Flags&flagLook != 0) {
		e.do(c, p, func() error { return e.equip(ctx, w, c, c.inRoot(p)) })
	}
	var variables map[string]string
	if ctx.Err() == nil && ev.Flags&(flagEntry|flagJob) == flagEntry {
		variables = e.addVariables(ctx, c, p)
	}
	if u := e.updateBy(ctx, c, p, name, variables); u != updateNone {
		e.do(c, p, func() error { return e.stepAside(ctx, w, c, p, u) })
	}
}

// do changes the mounts of a container before a process in it goes on, and tells of a change of its state.
func (e *Engine) do(c *container, p *process, change func() error) {
	before := c.state()
	if err := change(); err != nil && !p.ended() {
		c.pod.warn(e.config.Log, c.name, err)
	}
	now := c.state()
	if now.State == before.State && now.Note == before.Note {
		return // as most looks end
	}
	e.config.Changed(c.pod.uid)
	e.config.Tell()
}

// name is that of the program, or the beginning of it.
func (ev event) name() string { return strings.TrimRight(string(ev.Name[:]), "\x00") }

// find returns the container of a process, or nil if the process is none that is to be looked at.
func (e *Engine) find(w *watcher, p *process, ev event, pod *watchedPod) (*container, error) {
	e.mu.Lock()
	c := e.containers[ev.Mount]
	e.mu.Unlock()
	if c != nil {
		return c, nil
	}
	owner, err := openProcess(e.config.Proc, ev.Owner, 0)
	if err != nil {
		return nil, fmt.Errorf("looking at the pod's own container: %w", err)
	}
	defer owner.close()
	own, err := isOwn(e.config.Proc, p, owner)
	if err != nil {
		return nil, err
	}
	if own {
		return nil, w.settle(ev.Mount, knownOwn)
	}
	if len(e.of(pod.uid)) >= maxContainers {
		return nil, fmt.Errorf("the pod has %d nested containers, and no more are looked at", maxContainers)
	}
	first, late := p, false
	if !e.numbers { // it may have run before, unseen
		late = !p.isFirst()
	}
	if late {
		if earlier := firstOf(e.config.Proc, p); earlier != nil {
			defer earlier.close()
			first = earlier
		}
	}
	c, err = newContainer(first, ev.Mount, ev.Netns, pod)
	if err != nil {
		return nil, err
	}
	c.lateStart = late
	return e.add(w, c), nil
}

// isOwn reports whether a process is one of the pod's own container, or of the node.
func isOwn(proc string, p, owner *process) (bool, error) {
	same, err := sameInode(p, owner, "root")
	if err != nil || same {
		return same, err
	}
	self, err := openProcess(proc, uint32(os.Getpid()), 0)
	if err != nil {
		return false, err
	}
	defer self.close()
	for _, other := range []*process{owner, self} {
		if same, err := sameInode(p, other, "ns/mnt"); err != nil || same {
			return same, err
		}
	}
	node, err := openProcess(proc, 1, 0)
	if err != nil {
		return false, err
	}
	defer node.close()
	same, err = sameInode(p, node, "ns/mnt")
	if errors.Is(err, fs.ErrPermission) { // the node's first process may have more capabilities
		return false, nil
	}
	return same, err
}

// add remembers a container until its first process ends. It returns the container that is remembered, or nil if the
// pod is not watched any more.
func (e *Engine) add(w *watcher, c *container) *container {
	e.mu.Lock()
	defer e.mu.Unlock()
	if other := e.containers[c.mount]; other != nil {
		c.first.close()
		return other
	}
	if e.watcher != w || e.pods[c.netns] != c.pod {
		c.first.close()
		return nil
	}
	e.containers[c.mount] = c
	c.known, c.forget = context.WithCancel(context.Background())
	e.lasting.Go(func() { e.forgetAtEnd(w, c) })
	return c
}

// forgetAtEnd forgets a container when its first process ends.
func (e *Engine) forgetAtEnd(w *watcher, c *container) {
	defer c.first.close()
	err := c.first.await(c.known)
	e.mu.Lock()
	if c.known.Err() != nil {
		e.mu.Unlock()
		return
	}
	if err == nil {
		delete(e.containers, c.mount)
		c.forget()
		err = w.forget(c.mount)
	}
	e.mu.Unlock()
	if err != nil {
		e.warnOfEnd(c, err)
	}
	e.config.Changed(c.pod.uid)
}

func (e *Engine) warnOfEnd(c *container, err error) {
	e.config.Log.Warn("the end of a process in a nested container is not seen", "container", c.name, "err", err)
}

// State returns the states of a pod's nested containers, and the reason why nothing is known about them, if so.
func (e *Engine) State(podUID string) (containers []Container, problem string) {
	for _, c := range e.of(podUID) {
		containers = append(containers, c.state())
	}
	slices.SortFunc(containers, func(a, b Container) int { return cmp.Compare(a.Name, b.Name) })
	e.mu.Lock()
	defer e.mu.Unlock()
	return containers, e.problem
}

// of returns the containers of a pod, or all for no UID.
func (e *Engine) of(podUID string) []*container {
	e.mu.Lock()
	defer e.mu.Unlock()
	var found []*container
	for _, c := range e.containers {
		if podUID == "" || c.pod.uid == podUID {
			found = append(found, c)
		}
	}
	return found
}

// Update gives the running containers the CA after it has changed.
func (e *Engine) Update() {
	e.mu.Lock()
	w := e.watcher
	if w != nil {
		e.work.Go(func() { e.updateAll(w) })
	}
	e.mu.Unlock()
}

// updateAll looks at all containers, those of each pod one after another.
func (e *Engine) updateAll(w *watcher) {
	of := map[*watchedPod][]*container{}
	for _, c := range e.of("") {
		of[c.pod] = append(of[c.pod], c)
	}
	forEachPod(e, of, func(c *container) { e.equipRunning(w, c) })
}

// forEachPod begins to call do for the items of pods, those of each pod one after another.
func forEachPod[T any](e *Engine, of map[*watchedPod][]T, do func(T)) {
	for _, items := range of {
		e.work.Go(func() {
			for _, item := range items {
				do(item)
			}
		})
	}
}

// refresh looks at the addresses of containers.
func (e *Engine) refresh() {
	changed := map[string]bool{}
	for _, c := range e.of("") {
		if c.refresh() {
			changed[c.pod.uid] = true
		}
	}
	for pod := range changed {
		e.config.Changed(pod)
	}
}

// needed are the capabilities that the engine needs, by their numbers.
var needed = map[int]string{
	unix.CAP_SYS_ADMIN:    "SYS_ADMIN",    // BPF, mounts, setns(2)
	unix.CAP_SYS_PTRACE:   "SYS_PTRACE",   // the roots and namespaces of processes, and variables
	unix.CAP_SYS_CHROOT:   "SYS_CHROOT",   // setns(2) into a mount namespace
	unix.CAP_KILL:         "KILL",         // SIGCONT for processes of other users
	unix.CAP_DAC_OVERRIDE: "DAC_OVERRIDE", // stores that only their owner may read
	unix.CAP_CHOWN:        "CHOWN",        // copies keep the owner
}

// checkKernel asks for the newest of the system calls that mounts over trust stores take. The kernel's types (BTF) are
// asked for by newWatcher.
func checkKernel() error {
	err := unix.MountSetattr(-1, "", 0, &unix.MountAttr{})
	if errors.Is(err, unix.ENOSYS) {
		return errors.New("the kernel has no mount_setattr: it is older than Linux 5.12")
	}
	return nil
}

// checkPrivileges names the privileges that this process lacks.
func checkPrivileges(proc string) error {
	self, err := os.Readlink(proc + "/self")
	if err != nil || self != strconv.Itoa(os.Getpid()) {
		return errors.New("the daemon is not in the node's PID namespace: set nested.enabled in the chart (hostPID)")
	}
	var header = unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("reading the capabilities of the daemon: %w", err)
	}
	var missing []string
	for number, name := range needed {
		if data[number/32].Effective&(1<<(number%32)) == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return fmt.Errorf("the daemon lacks the capabilities %s: set nested.enabled in the chart",
			strings.Join(missing, ", "))
	}
	return nil
}
