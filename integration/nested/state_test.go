package nested

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/runner"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// state is what containers, and sluiced, must leave as it is.
type state struct {
	node   []string // the mounts in the namespace of sluiced
	docker []string // those in the namespace of dockerd
	daemon []string // the namespaces of sluiced: probes run there
}

// stateOf returns the state when no container runs: the pod has the processes of dockerd alone.
func (l *lab) stateOf(t *testing.T) state {
	t.Helper()
	own := namespaceOf(os.Getpid())
	var s state
	testbed.Eventually(t, "no container runs", func() bool {
		var namespaces []string
		for _, pid := range l.pod.Processes() {
			namespace := namespaceOf(pid)
			if namespace == "" || slices.Contains(namespaces, namespace) {
				continue
			}
			namespaces = append(namespaces, namespace)
			s.docker = mountsOf(t, pid)
		}
		return len(namespaces) == 1 && namespaces[0] != own
	})
	s.node = mountsOf(t, os.Getpid())
	s.daemon = testbed.Namespaces(t, l.Daemon.Pid())
	return s
}

// namespaceOf is the mount namespace of a process; empty if it has ended.
func namespaceOf(pid int) string {
	namespace, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)) // the process may have ended
	return namespace
}

// mountsOf are the mounts that a process sees: the file system, its part that is mounted, and the mount point.
func mountsOf(t *testing.T, pid int) (mounts []string) {
	t.Helper()
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/mountinfo")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		w := strings.Fields(line)
		mounts = append(mounts, strings.Join(w[2:5], " "))
	}
	slices.Sort(mounts)
	return mounts
}

// wantState fails if a mount has been added or removed, or a process of the pod is stopped.
func (l *lab) wantState(t *testing.T, want state) {
	t.Helper()
	got := l.stateOf(t)
	// Mounts of other tests vanish from the first namespace when these remove the mount points.
	if added := without(got.node, want.node); len(added) != 0 {
		t.Errorf("new mounts in sluiced's namespace: %q", added)
	}
	if !slices.Equal(got.docker, want.docker) {
		t.Errorf("the mounts of dockerd's namespace: new are %q, gone are %q",
			without(got.docker, want.docker), without(want.docker, got.docker))
	}
	if !slices.Equal(got.daemon, want.daemon) {
		t.Errorf("sluiced is in the namespaces %q, want %q", got.daemon, want.daemon)
	}
	if stopped := l.stopped(); stopped != nil {
		t.Errorf("these processes are stopped: %q", stopped)
	}
}

// without returns the mounts that are not among others.
func without(mounts, others []string) []string {
	return slices.DeleteFunc(slices.Clone(mounts), func(m string) bool { return slices.Contains(others, m) })
}

// stopped are the stopped processes of the pod.
func (l *lab) stopped() (names []string) {
	for _, pid := range l.pod.Processes() {
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // the process may have ended
		if strings.Contains(string(status), "\nState:\tT") {
			name, _, _ := strings.Cut(string(status), "\n")
			names = append(names, fmt.Sprintf("%d %s", pid, name))
		}
	}
	return names
}

// TestState: a mount that a container leaves in the namespace of dockerd, and a process that is stopped, are noticed.
func TestState(t *testing.T) {
	l := newLab(t, inspect())
	i := busyboxImage(t)
	l.publish(i)
	name := registryAddress + "/" + i.repository
	before := l.stateOf(t)
	l.mustRun(l.docker.Command("run", "--rm", "--volume", runner.SharedMount+":/mnt:rshared", "--cap-add", "SYS_ADMIN",
		"--security-opt", "apparmor=unconfined", name, "mount", "-t", "tmpfs", "tmpfs", "/mnt"))
	after := l.stateOf(t)
	if added := without(after.docker, before.docker); len(added) != 1 {
		t.Errorf("new mounts in dockerd's namespace: got %q, want one", added)
	}
	if added := without(after.node, before.node); len(added) != 0 {
		t.Errorf("new mounts in sluiced's namespace: got %q, want none", added)
	}
	l.mustRun(l.docker.Command("run", "--detach", name, "sh", "-c", "sleep 1000 & kill -STOP $!; wait"))
	testbed.Eventually(t, "a process is stopped", func() bool { return len(l.stopped()) == 1 })
}
