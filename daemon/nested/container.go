package nested

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/printable"
	"github.com/sluice-cni/sluice/daemon/trust"
	"github.com/sluice-cni/sluice/plugin/files"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

// container is a container that a Docker in a pod has started.
type container struct {
	mount      uint64 // the number of its mount namespace
	netns      uint32 // that of the pod
	pod        *watchedPod
	name       string
	first      *process
	known      context.Context // ends when the container is forgotten, by forget
	forget     func()
	podNetwork bool
	lateStart  bool // it ran when it was found, and was not given the CA yet
	// settled is true if its stores have been looked at since it started, or since an updater ran.
	settled atomic.Bool

	silent  atomic.Int32  // 1 while work there hangs
	working chan struct{} // taken by the one that changes mounts (alone); guards the next fields
	busy    []*process    // updaters that run
	late    bool          // it was given the CA while it ran

	mu        sync.Mutex // guards the fields below
	trust     truststore.State
	note      string
	addresses []netip.Addr
	// stores are the paths of the stores that have the CA, or had it before an updater.
	stores []string
	bundle string // the path of one in PEM with all roots, if there is one
}

// newContainer describes the container of a process, which has a descriptor of its own there.
func newContainer(p *process, mount uint64, netns uint32, pod *watchedPod) (*container, error) {
	first, err := p.again()
	if err != nil {
		return nil, err
	}
	c := &container{
		mount: mount, netns: netns, pod: pod, name: nameOf(p), first: first, working: make(chan struct{}, 1),
		trust: truststore.Unknown, note: "not looked at yet",
	}
	_, inode, err := p.inode("ns/net")
	if err != nil {
		c.first.close()
		return nil, err
	}
	c.podNetwork = inode == uint64(netns)
	c.refresh()
	return c, nil
}

// inRoot returns a process if its root is that of the container, else the first one. Another root is a folder, such as
// one in which a build makes a file system by chroot(1): nothing is to be mounted there.
func (c *container) inRoot(p *process) *process {
	if same, err := sameInode(p, c.first, "root"); err == nil && !same {
		return c.first
	}
	return p
}

const (
	// shownName is how much of a cgroup's name is shown, as of a Docker's ID.
	shownName = 12
	// maxNote bounds a note, in bytes: paths are the container's to choose.
	maxNote = 300
)

// nameOf is the name of the cgroup of a process, which has the ID of the container, or else its PID.
func nameOf(p *process) string {
	longest := ""
	data, _ := p.read("cgroup") // without it the PID is left
	for line := range strings.Lines(string(data)) {
		if _, rest, ok := strings.Cut(line, ":/"); ok && len(rest) > len(longest) {
			longest = strings.TrimSpace(rest)
		}
	}
	name := path.Base("/" + longest)
	if name == "/" {
		name = "pid " + path.Base(p.dir.Name())
	}
	return printable.Text(name, shownName)
}

func (c *container) state() Container {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Container{
		Name: c.name, Addresses: slices.Clone(c.addresses), PodNetwork: c.podNetwork, State: c.trust, Note: c.note,
	}
}

func (c *container) set(state truststore.State, note string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trust, c.note = state, printable.Text(note, maxNote)
}

// refresh looks at the container's addresses, and reports whether they have changed.
func (c *container) refresh() bool {
	if c.podNetwork {
		return false
	}
	var all []netns.Address
	err := c.first.use(func(fd int) (err error) {
		all, err = netns.Addresses(fmt.Sprintf("/proc/self/fd/%d/ns/net", fd))
		return err
	})
	if err != nil {
		return false // it has ended
	}
	var found []netip.Addr
	for _, a := range all {
		if !a.Loopback {
			found = append(found, a.Addr)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	changed := !slices.Equal(found, c.addresses)
	c.addresses = found
	return changed
}

// maxCA bounds the file of the CA.
const maxCA = 1 << 20

// equip makes a container trust the CA, unless an updater of its stores runs. p is a process in it.
func (e *Engine) equip(ctx context.Context, w *watcher, c *container, p *process) error {
	err := c.alone(ctx, func() error {
		if c.known.Err() != nil || c.hasUpdater() {
			return nil
		}
		defer c.settled.Store(true)
		ca, err := files.ReadBounded(e.config.CAFile, maxCA)
		if err != nil {
			c.set(truststore.Unknown, "the proxy has no CA yet")
			return w.settle(c.mount, knownSettled)
		}
		report, stores, err := e.bind(c, p, ca)
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			c.lateStart = true // the process has gone on
			defer e.config.Changed(c.pod.uid)
		}
		c.judge(report)
		c.mu.Lock()
		c.stores, c.bundle = stores, bundleOf(report)
		c.mu.Unlock()
		return w.settle(c.mount, knownSettled)
	})
	if err != nil {
		c.set(truststore.Unknown, err.Error())
	}
	return err
}

// equipRunning makes a container trust the CA while its programs run.
func (e *Engine) equipRunning(w *watcher, c *container) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := e.equip(ctx, w, c, c.first); err != nil && !c.first.ended() {
		c.pod.warn(e.config.Log, c.name, err)
	}
	e.config.Changed(c.pod.uid)
}

// bundleOf is the path of the machine's bundle in PEM if it has the CA, else empty.
func bundleOf(report truststore.Report) string {
	for _, s := range report.Stores {
		if s.Action != truststore.Failed && slices.Contains(truststore.MachineBundles, s.Path) {
			return s.Path
		}
	}
	return ""
}

// machineBundle returns the path of the machine's bundle in PEM, if it has the CA, or had it before an updater.
func (c *container) machineBundle() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bundle
}

// addVariables adds the variables to a program that enters a container, if the container has a bundle with the CA, and
// is the program's root. It returns all variables of the program then.
func (e *Engine) addVariables(ctx context.Context, c *container, p *process) map[string]string {
	bundle := c.machineBundle()
	if bundle == "" || c.inRoot(p) != p {
		return nil
	}
	all, err := look(ctx, c.pod, func() map[string]string {
		all, err := p.withVariables(ctx, variablesFor(bundle))
		e.warnOfVariables(c, err)
		return all
	})
	e.warnOfVariables(c, err)
	return all
}

func (e *Engine) warnOfVariables(c *container, err error) {
	if err == nil {
		return
	}
	if count, due := c.pod.lines.Due("variables"); due {
		e.config.Log.Warn("a program in a nested container lacks variables for the CA", "uid", c.pod.uid,
			"container", c.name, "err", err, "count", count)
	}
}

// boundStores returns the paths of the stores that have the CA, or had it before an updater.
func (c *container) boundStores() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stores
}

// isBusy reports whether a process is one of the updaters that run.
func (c *container) isBusy(p *process) bool {
	wanted, err := p.identity()
	return err == nil && slices.ContainsFunc(c.busy, func(b *process) bool {
		id, err := b.identity()
		return err == nil && id == wanted
	})
}

// hasUpdater reports whether a program that writes stores runs in the container.
func (c *container) hasUpdater() bool {
	c.busy = slices.DeleteFunc(c.busy, (*process).ended)
	return len(c.busy) > 0
}

// judge derives the state from a report.
func (c *container) judge(report truststore.Report) {
	bound := slices.ContainsFunc(report.Stores, func(s truststore.Store) bool { return s.Action == truststore.Bound })
	c.late = c.late || c.lateStart && bound
	c.lateStart = false
	state, note := report.State, trust.NoteOf(report)
	switch {
	case report.Error != "":
		note = report.Error
	case len(report.Stores) == 0:
		note = "it has no trust store"
	case c.late:
		state, note = truststore.Unknown, "given the CA while it ran: its programs may have read their stores before"
	}
	c.set(state, note)
}

// bind mounts copies with the CA over the stores of the container of a process, and returns the paths of the mounts. It
// does not return while a file system there hangs.
func (e *Engine) bind(c *container, p *process, ca []byte) (truststore.Report, []string, error) {
	root, namespace, err := p.openContainer()
	if err != nil {
		return truststore.Report{}, nil, err
	}
	defer func() { _, _ = root.Close(), namespace.Close() }() // only looked through
	copies := newCopies(&c.pod.tmpfs)
	defer copies.close()
	bind := &truststore.Bind{
		Copy: copies.New, Mountinfo: func() ([]byte, error) { return p.read("mountinfo") },
	}
	report := truststore.Add(context.Background(), fmt.Sprintf("/proc/self/fd/%d", root.Fd()), ca, truststore.Options{
		Named: trust.NamedStores(p.environment()), Enter: func() error { return enter(namespace) }, Bind: bind,
	})
	stores, err := bind.Mounted()
	if err != nil {
		return report, nil, fmt.Errorf("looking for the mounts over trust stores: %w", err)
	}
	return report, stores, nil
}

// openContainer opens the root of a process and its mount namespace. An open mount namespace keeps its mounts, so it is
// closed soon.
func (p *process) openContainer() (root, namespace *os.File, err error) {
	if root, err = p.open("root", unix.O_PATH|unix.O_DIRECTORY); err != nil {
		return nil, nil, fmt.Errorf("opening the container's root: %w", err)
	}
	if namespace, err = p.open("ns/mnt", unix.O_RDONLY); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("opening the container's mount namespace: %w", err), root.Close())
	}
	return root, namespace, nil
}

// enter moves the calling thread into a mount namespace. A thread that shares its root may not change its own.
func enter(namespace *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("entering the container: unsharing the working directory: %w", err)
	}
	if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering the container's mount namespace: %w", err)
	}
	return nil
}

// maxBusy bounds the updaters of a container that are waited for.
const maxBusy = 16

// stepAside takes the mounts away for an update by a process, until that ends.
func (e *Engine) stepAside(ctx context.Context, w *watcher, c *container, p *process, u update) error {
	err := c.alone(ctx, func() error {
		if !c.hasUpdater() || !c.isBusy(p) {
			updater, err := p.again()
			if err != nil {
				return err
			}
			if len(c.busy) == maxBusy || !e.comeBack(w, c, updater) {
				updater.close()
				return nil
			}
			c.busy = append(c.busy, updater)
		}
		c.settled.Store(false)
		if u == updateAll {
			c.set(truststore.FilesOnly, "an updater of its trust stores runs")
		}
		if err := w.settle(c.mount, knownAside); err != nil {
			return err
		}
		return unbind(p, u == updatePackages)
	})
	if err != nil {
		return fmt.Errorf("stepping aside for an updater: %w", err)
	}
	return nil
}

// unbind takes the mounts over the stores of the container of a process away, or over those in Python packages alone.
// It does not return while a file system there hangs.
func unbind(p *process, packagesOnly bool) error {
	root, namespace, err := p.openContainer()
	if err != nil {
		return err
	}
	defer func() { _, _ = root.Close(), namespace.Close() }() // only looked through
	bind := &truststore.Bind{Mountinfo: func() ([]byte, error) { return p.read("mountinfo") }}
	return truststore.Unbind(fmt.Sprintf("/proc/self/fd/%d", root.Fd()), bind,
		packagesOnly, func() error { return enter(namespace) })
}

// comeBack brings the mounts back when an updater has ended. It reports false if the container is forgotten.
func (e *Engine) comeBack(w *watcher, c *container, updater *process) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.known.Err() != nil {
		return false
	}
	e.lasting.Go(func() {
		defer updater.close()
		err := updater.await(c.known)
		switch {
		case c.known.Err() != nil:
		case err != nil:
			e.warnOfEnd(c, err)
		default:
			e.equipRunning(w, c)
		}
	})
	return true
}

// release takes the mounts away from a container that is forgotten, by one of its processes.
func (e *Engine) release(c *container, p *process) {
	defer p.close()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := c.alone(ctx, func() error { return unbind(p, false) }); err != nil && !p.ended() {
		e.config.Log.Warn("mounts stay over the trust stores of a nested container", "uid", c.pod.uid,
			"container", c.name, "err", err)
	}
	e.mu.Lock()
	w, again := e.watcher, e.containers[c.mount]
	e.mu.Unlock()
	if again != nil { // the pod has opted in again, and the mounts may have been the new ones
		e.equipRunning(w, again)
	}
}
