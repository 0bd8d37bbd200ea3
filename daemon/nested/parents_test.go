package nested

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// addSystem gives containers the programs of this machine, and a su(1) that lets root through. BusyBox stays at /bin.
func (p *pod) addSystem() {
	p.t.Helper()
	for name, text := range map[string]string{
		"passwd":   "root:x:0:0:root:/:/bin/sh\nuser:x:1000:1000:user:/:/bin/sh\n",
		"group":    "root:x:0:\nuser:x:1000:\n",
		"pam.d/su": "auth sufficient pam_rootok.so\naccount required pam_permit.so\nsession required pam_permit.so\n",
	} {
		path := filepath.Join(p.root, "etc", name)
		must(p.t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(p.t, os.WriteFile(path, []byte(text), 0o644))
	}
	must(p.t, os.Symlink("su", filepath.Join(p.root, "etc/pam.d/runuser")))
	for _, name := range []string{"lib", "lib64"} {
		must(p.t, os.Symlink("usr/"+name, filepath.Join(p.root, name)))
	}
	must(p.t, os.Chmod(filepath.Join(p.root, "tmp"), 0o777))
	p.run("mkdir $root/usr $root/proc && mount --bind /usr $root/usr")
	p.wantEnded(1)
}

// addScript adds a program to the root of containers.
func (p *pod) addScript(path, script string) {
	p.t.Helper()
	must(p.t, os.WriteFile(filepath.Join(p.root, path), []byte(script), 0o755))
}

// TestStoppedParents: programs that wait for stops of their child stop themselves then, and go on all the same.
func TestStoppedParents(t *testing.T) {
	for name, command := range map[string]string{
		"su":       "/usr/bin/su user -c \"/bin/cp /out /tmp/copy\"",
		"su in su": "/usr/bin/su -c \"exec /usr/bin/su user -c /tmp/copy.sh\"",
		"runuser":  "/usr/sbin/runuser user -c \"/bin/cp /out /tmp/copy\"",
		"nsenter":  "/usr/bin/nsenter --pid=/proc/1/ns/pid /bin/cp /out /tmp/copy",
		"unshare":  "/usr/bin/unshare --fork /bin/cp /out /tmp/copy",
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			p.addSystem()
			p.addScript("tmp/copy.sh", "#!/bin/sh\nexec /bin/cp /out /tmp/copy\n")
			newEngine(t, p)
			p.start("for i in 1 2 3; do "+command+" || exit; done; echo done >>/out", "--mount-proc")
			p.wantEnded(2)
			if got := p.output(); got != "done\n" {
				t.Errorf("got %q, want a container that has run to its end", got)
			}
		})
	}
}

// TestHasStoppedItself: a process that has stopped itself is told from one that its user has stopped.
func TestHasStoppedItself(t *testing.T) {
	start := func(script string) (*process, *os.Process) {
		cmd := exec.Command("sh", "-c", script)
		must(t, cmd.Start())
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // killed
		})
		p, err := openProcess("/proc", uint32(cmd.Process.Pid), 0)
		must(t, err)
		t.Cleanup(p.close)
		return p, cmd.Process
	}
	wantStopped := func(p *process) {
		t.Helper()
		testbed.Eventually(t, "a process stops", func() bool {
			s, err := p.stat()
			must(t, err)
			return s.state == 'T'
		})
	}
	itself, _ := start("kill -STOP $$; exit")
	wantStopped(itself)
	if !itself.hasStoppedItself() {
		t.Error("a process that has stopped itself is not known")
	}
	other, killer := start("exec sleep 1000")
	must(t, killer.Signal(unix.SIGSTOP))
	wantStopped(other)
	if other.hasStoppedItself() {
		t.Error("a process that its user has stopped counts as one that has stopped itself")
	}
}

// TestParentOutside: a parent in the daemon's PID namespace is never looked at.
func TestParentOutside(t *testing.T) {
	p := newPod(t)
	l := newParents("/proc", nil)
	testbed.Eventually(t, "the pod has a first process", func() (found bool) {
		all, err := pids("/proc")
		must(t, err)
		for _, pid := range all {
			child, err := openProcess("/proc", pid, 0)
			if err != nil {
				continue // it has ended
			}
			if s, err := child.stat(); err == nil && int(s.parent) == p.cmd.Process.Pid {
				found = true
				parent, err := l.of(child)
				must(t, err)
				if parent != nil {
					t.Error("the parent of the pod's first process is in the pod")
					parent.close()
				}
			}
			child.close()
		}
		return found
	})
}

// TestJobs: a job of a shell with job control does not stop, because that shell would take it for one that its user has
// stopped. The programs that a job starts stop, and so does a program with a session of its own, such as the dpkg that
// apt starts.
func TestJobs(t *testing.T) {
	w, p := newTestWatcher(t), newPod(t)
	p.addSystem()
	p.addScript("shell", "set -m\n/bin/rm -f /tmp/none\necho $? >>/out\n"+
		"/bin/sh -c '/bin/cp /out /tmp/copy; :'\necho $? >>/out\n")
	must(t, w.watch(p.netns))
	p.start("/usr/bin/bash /shell; /usr/bin/setsid --wait /bin/mv /tmp/copy /tmp/new")
	for _, want := range []struct {
		name string
		job  bool
	}{{"sh", false}, {"rm", true}, {"cp", false}, {"mv", false}} {
		e, err := w.next()
		must(t, err)
		if job := e.Flags&flagJob != 0; e.name() != want.name || job != want.job {
			t.Errorf("got %s, a job: %t; want %+v", e.Name, job, want)
		}
		if want.job {
			continue
		}
		held, err := openProcess("/proc", e.PID, e.Start)
		must(t, err)
		must(t, held.resume())
		held.close()
	}
	p.wantEnded(2)
	if got := p.output(); got != "0\n0\n" {
		t.Errorf("got the exit statuses %q, want those of programs that have ended well", got)
	}
	wantNone(t, w)
}

// TestUpdaterAsJob: the mounts step aside for an updater that does not stop, too, while it runs.
func TestUpdaterAsJob(t *testing.T) {
	p := newPod(t)
	p.addSystem()
	must(t, os.Remove(filepath.Join(p.root, "bin/dpkg")))
	p.addScript("bin/dpkg", "#!/bin/sh\necho new >/tmp/new\nuntil busybox mv /tmp/new /"+store+" 2>/tmp/log\n"+
		"do sleep 0.01\ndone\n")
	p.addScript("shell", "set -m\n/bin/dpkg\necho $? >>/out\n")
	newEngine(t, p)
	p.start("/usr/bin/bash /shell")
	p.wantEnded(2)
	if got := p.output(); got != "0\n" {
		t.Errorf("got the exit status %q, want that of a program that has ended well", got)
	}
	data, err := os.ReadFile(filepath.Join(p.root, store))
	must(t, err)
	if string(data) != "new\n" {
		t.Errorf("got the store %q, want the updater's", data)
	}
}

// TestInteractiveShell: a shell at a terminal sees no stop of its commands, which would end them for it with the status
// 147.
func TestInteractiveShell(t *testing.T) {
	p := newPod(t)
	p.addSystem()
	p.addScript("shell", "/bin/rm -f /tmp/none; echo status $?\n/bin/cp /out /tmp/copy; echo status $?\n"+
		"echo text | /bin/tee /tmp/copy >/tmp/other; echo status $?\n")
	newEngine(t, p)
	p.run("mkdir $root/dev && mount --rbind /dev $root/dev")
	p.start("for i in 1 2 3 4 5; do /usr/bin/script -qec \"/usr/bin/bash --norc -i /shell\" /tmp/log >>/out; done")
	p.wantEnded(3)
	want := strings.Repeat("status 0\n", 15)
	if got := strings.ReplaceAll(p.output(), "\r", ""); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
