package nested

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
)

// fault is something that happens to sluiced. It returns when another one, or the same, is up again.
type fault struct {
	name string
	do   func(l *lab)
}

var faults = []fault{
	{"killed", func(l *lab) {
		l.Daemon.Kill()
		l.Daemon = l.Node.StartDaemon()
	}},
	{"stopped", func(l *lab) {
		l.Daemon.Freeze()
		l.Daemon.Signal(syscall.SIGCONT)
	}},
	{"ended", func(l *lab) {
		l.Daemon.Stop()
		l.Daemon = l.Node.StartDaemon()
	}},
	{"replaced", func(l *lab) { l.Daemon = l.Node.HandOver(l.Daemon) }},
}

// TestFaults: sluiced is killed, stopped, ended and replaced at random moments while containers start. All of them
// connect and end, no process stays stopped, and no mount is left.
func TestFaults(t *testing.T) {
	l := newLab(t, inspect())
	i := busyboxImage(t)
	l.publish(i)
	name := registryAddress + "/" + i.repository
	l.mustRun(l.docker.Command("pull", "--quiet", name))
	before := l.stateOf(t)
	const containers = 16
	ended := make(chan error)
	go func() {
		for range containers {
			out, err := run(l.docker.Command("run", "--rm", "--add-host", hosts, name, "sh", "-c",
				"nc "+server+" 443 < /dev/null"))
			if err != nil {
				err = fmt.Errorf("a container: %w\n%s", err, out)
			}
			ended <- err
		}
		close(ended)
	}()
	// The next container starts when one has ended, and a fault begins then, too. How far the container has come is
	// different each time.
	count, order := 0, rand.Perm(2*len(faults))
	for err := range ended {
		if err != nil {
			t.Error(err)
		}
		if count < len(order) {
			f := faults[order[count]%len(faults)]
			t.Logf("sluiced is %s", f.name)
			f.do(l)
		}
		count++
	}
	l.wantState(t, before)
}
