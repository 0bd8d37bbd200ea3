package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/daemon/netns"
	"github.com/sluice-cni/sluice/daemon/optin"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// netnsDir is where runtimes mount the network namespaces of pods.
const netnsDir = "/run/netns"

// searchAgain is the time after which the addresses of a netns are listed again. To list them takes some tenths of a
// millisecond, and a pod that is not found is searched for at every change of any pod.
const searchAgain = time.Minute

// unreadyAgain is searchAgain for a netns without an address: its ADD may have gone on since, or it is of a program
// that gives it none.
const unreadyAgain = 5 * time.Second

// netnsSearch finds the netns of pods by their addresses. Its zero value is ready to use.
type netnsSearch struct {
	mu    sync.Mutex            // one search at a time; guards known
	known map[string]knownNetns // by the name of the file in netnsDir
}

// knownNetns is the addresses of a netns.
type knownNetns struct {
	id        attach.NetnsID // without the cookie
	addresses []netns.Address
	at        time.Time // when they were listed
}

// find returns the attachments of the missing pods, which are among the running ones. Netns that are attached belong to
// other pods. A process with NET_ADMIN in a pod can give itself the address of any other pod. So a netns is taken for
// that of a pod only if no other has one of its addresses, and it has no address of another pod; else the pod is
// ambiguous.
func (s *netnsSearch) find(
	missing, running []optin.Running, attached map[attach.NetnsID]bool, now time.Time,
) (found []attach.Attachment, ambiguous []attach.Pod, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err = s.listLocked(attached, now)
	for _, p := range missing {
		var of []attach.Attachment
		for name, n := range s.known {
			if i := n.indexOf(p); i >= 0 && !attached[n.id] {
				of = append(of, attach.Attachment{
					// No runtime knows this ID, so no DEL names it. The attachment goes with the netns.
					ID:    attach.ID{ContainerID: p.Pod.UID, IfName: n.addresses[i].Interface},
					Netns: filepath.Join(netnsDir, name), Pod: p.Pod, IPs: p.IPs,
				})
			}
		}
		switch {
		case len(of) > 1 || len(of) == 1 && s.known[filepath.Base(of[0].Netns)].hasOther(p, running):
			ambiguous = append(ambiguous, p.Pod)
		case len(of) == 1:
			found = append(found, of[0])
		}
	}
	return found, ambiguous, err
}

// indexOf returns the index of an address of p, or -1.
func (n knownNetns) indexOf(p optin.Running) int {
	return slices.IndexFunc(n.addresses, func(a netns.Address) bool { return a.IsOf(p.IPs) })
}

// hasOther reports whether n has an address of a running pod other than p.
func (n knownNetns) hasOther(p optin.Running, running []optin.Running) bool {
	return slices.ContainsFunc(running, func(other optin.Running) bool {
		return other.Pod != p.Pod && !other.HostNetwork && n.indexOf(other) >= 0
	})
}

// listLocked brings the known netns up to date, without those that are attached.
func (s *netnsSearch) listLocked(attached map[attach.NetnsID]bool, now time.Time) error {
	entries, err := os.ReadDir(netnsDir)
	if err != nil {
		return fmt.Errorf("looking for the netns of running pods: %w", err)
	}
	known := map[string]knownNetns{}
	var errs []error
	for _, entry := range entries {
		path := filepath.Join(netnsDir, entry.Name())
		id, err := attach.StatNetns(path)
		if err != nil || attached[id] {
			continue // gone since, or another pod's
		}
		n, ok := s.known[entry.Name()]
		if !ok || n.id != id || now.Sub(n.at).Abs() >= n.lookAgain() {
			n = knownNetns{id: id, at: now}
			if n.addresses, err = netns.Addresses(path); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		known[entry.Name()] = n
	}
	s.known = known
	return errors.Join(errs...)
}

// lookAgain is the time after which the addresses of n are listed again.
func (n knownNetns) lookAgain() time.Duration {
	if slices.ContainsFunc(n.addresses, func(a netns.Address) bool { return !a.Loopback && !a.IsLinkLocalUnicast() }) {
		return searchAgain
	}
	return unreadyAgain
}
