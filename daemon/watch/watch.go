// Package watch watches the netns of captured pods: it tells when their rules or interfaces may have changed, and
// counts the packets that their walls have stopped.
//
// The kernel reports changes of nftables, of interfaces and of addresses, and the tools of iptables-nft change nftables
// too. It does not report changes that the legacy tools make, nor packets that were stopped; a [Round] is for those.
package watch

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/epoll"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Watcher watches the netns of this node.
type Watcher struct {
	changed chan struct{}
	reader  sync.WaitGroup

	mu      sync.Mutex // guards the fields below; held while the kernel is asked, which takes microseconds
	epoll   *epoll.Set // of the sockets of all netns; nil while none is watched
	netns   map[attach.NetnsID]*netns
	sockets map[int]*netns           // each netns by its sockets
	stopped map[ruleset.Cause]uint64 // by all pods, also by those that are gone
}

// netns is one netns that is watched.
type netns struct {
	events   []int // sockets that get events
	counters *ruleset.Counters

	// Guarded by Watcher.mu.
	changed bool
	suspect bool                     // to be returned by Suspect
	taken   time.Time                // when a change was last returned by Take
	read    map[ruleset.Cause]uint64 // the counters as they were read last
	stopped map[ruleset.Cause]uint64 // since the netns is watched
}

// New makes a Watcher that watches no netns.
func New() *Watcher {
	return &Watcher{
		changed: make(chan struct{}, 1),
		netns:   map[attach.NetnsID]*netns{}, sockets: map[int]*netns{}, stopped: map[ruleset.Cause]uint64{},
	}
}

// Sync makes the watched netns those at the paths. A netns that is new counts as changed. One that is gone is left out;
// the error names the others that cannot be watched.
func (w *Watcher) Sync(paths map[attach.NetnsID]string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, n := range w.netns {
		if _, ok := paths[id]; !ok {
			delete(w.netns, id)
			w.dropLocked(n)
		}
	}
	var errs []error
	for id, path := range paths {
		if w.netns[id] != nil {
			continue
		}
		now, err := attach.StatNetns(path)
		if errors.Is(err, attach.ErrNetnsGone) || err == nil && !now.SameFile(id) {
			continue
		}
		n, err := open(path)
		if err == nil {
			if err = w.addLocked(n); err != nil {
				w.dropLocked(n)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("watching netns %s: %w", path, err))
			continue
		}
		w.netns[id] = n
		w.noteLocked(n)
	}
	return errors.Join(errs...)
}

// addLocked begins to wait for the events of n.
func (w *Watcher) addLocked(n *netns) error {
	if w.epoll == nil {
		set, err := epoll.New()
		if err != nil {
			return err
		}
		w.epoll = set
		w.reader.Go(func() { set.Wait(w.ready) })
	}
	for _, fd := range n.events {
		if err := w.epoll.Add(fd); err != nil {
			return err
		}
		w.sockets[fd] = n
	}
	return nil
}

// dropLocked ends waiting for the events of n.
func (w *Watcher) dropLocked(n *netns) {
	for _, fd := range n.events {
		delete(w.sockets, fd)
	}
	n.close()
}

// Close ends watching.
func (w *Watcher) Close() {
	_ = w.Sync(nil) // nothing to open
	w.mu.Lock()
	if w.epoll != nil {
		_ = w.epoll.Close() // ends the reader
		w.epoll = nil
	}
	w.mu.Unlock()
	w.reader.Wait()
}

// groups are the events that matter: those of nftables (linux/netfilter/nfnetlink.h), and of interfaces and addresses.
var groups = map[int]uint32{
	unix.NETLINK_NETFILTER: 1 << (unix.NFNLGRP_NFTABLES - 1),
	unix.NETLINK_ROUTE:     unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR,
}

func open(path string) (*netns, error) {
	n := &netns{read: map[ruleset.Cause]uint64{}, stopped: map[ruleset.Cause]uint64{}}
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		if n.counters, err = ruleset.OpenCounters(); err != nil {
			return err
		}
		for family, group := range groups {
			fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, family)
			if err != nil {
				return fmt.Errorf("listening to events: %w", err)
			}
			n.events = append(n.events, fd)
			if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: group}); err != nil {
				return fmt.Errorf("listening to events: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// close closes the sockets, which also ends waiting for them.
func (n *netns) close() {
	for _, fd := range n.events {
		_ = unix.Close(fd) // nothing was written
	}
	if n.counters != nil {
		_ = n.counters.Close()
	}
}

// ready notes the changes that a socket reports.
func (w *Watcher) ready(fd int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := w.sockets[fd]; n != nil {
		drain(fd)
		w.noteLocked(n)
	}
}

// drain takes all events from a socket. Their content does not matter.
func drain(fd int) {
	var b [1]byte
	for {
		_, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) { // events were lost: go on
			return
		}
	}
}

func (w *Watcher) noteLocked(n *netns) {
	n.changed = true
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// Again makes a later Take return a netns again.
func (w *Watcher) Again(id attach.NetnsID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := w.netns[id]; n != nil {
		n.changed = true // not noted: Take is called once a second anyway
	}
}

// Changed receives when Take may return something.
func (w *Watcher) Changed() <-chan struct{} { return w.changed }

// rest is the time between two returns of one netns by Take. A pod that changes its rules all the time does not keep
// the daemon busy.
const rest = time.Second

// Take returns the netns that have changed. One that was returned less than a second ago is returned by a later call.
func (w *Watcher) Take(now time.Time) []attach.NetnsID {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []attach.NetnsID
	for id, n := range w.netns {
		if n.changed && now.Sub(n.taken).Abs() >= rest {
			n.changed, n.taken = false, now
			all = append(all, id)
		}
	}
	return all
}

// Round goes around the watched netns. The zero value begins with the first one.
type Round struct{ last attach.NetnsID }

// Next returns the next netns of a round, up to n different ones.
func (w *Watcher) Next(r *Round, n int) []attach.NetnsID {
	w.mu.Lock()
	all := slices.SortedFunc(maps.Keys(w.netns), compare)
	w.mu.Unlock()
	if len(all) == 0 {
		return nil
	}
	i := max(0, slices.IndexFunc(all, func(id attach.NetnsID) bool { return compare(id, r.last) > 0 }))
	next := slices.Concat(all[i:], all[:i])[:min(n, len(all))]
	r.last = next[len(next)-1]
	return next
}

func compare(a, b attach.NetnsID) int {
	return slices.Compare([]uint64{a.Dev, a.Ino, a.Cookie}, []uint64{b.Dev, b.Ino, b.Cookie})
}

// Suspect returns a netns among some whose wall has stopped packets, as far as they were counted, since it was last
// returned. Where rules of nat are missing, the wall stops what they would have redirected. among must not call the
// Watcher.
func (w *Watcher) Suspect(among func(attach.NetnsID) bool) (id attach.NetnsID, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, n := range w.netns {
		if n.suspect && among(id) {
			n.suspect = false
			return id, true
		}
	}
	return attach.NetnsID{}, false
}

// Count reads the counters of a netns that has a wall. It returns the causes for which no packet was stopped there
// before.
func (w *Watcher) Count(id attach.NetnsID) (first []ruleset.Cause, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.netns[id]
	if n == nil {
		return nil, nil
	}
	read, err := n.counters.Stopped()
	if err != nil {
		return nil, err
	}
	for _, cause := range slices.Sorted(maps.Keys(read)) {
		more := read[cause] - n.read[cause]
		if read[cause] < n.read[cause] { // the wall was installed anew
			more = read[cause]
		}
		if more > 0 && n.stopped[cause] == 0 {
			first = append(first, cause)
		}
		n.suspect = n.suspect || more > 0 && cause != ruleset.CauseQUIC
		n.stopped[cause] += more
		w.stopped[cause] += more
	}
	n.read = read
	return first, nil
}

// Stopped returns how many packets were stopped in one netns, as far as they were counted.
func (w *Watcher) Stopped(id attach.NetnsID) map[ruleset.Cause]uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := w.netns[id]; n != nil {
		return maps.Clone(n.stopped)
	}
	return nil
}

// Total returns how many packets were stopped in all netns, also in those that are gone.
func (w *Watcher) Total() map[ruleset.Cause]uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.stopped)
}
