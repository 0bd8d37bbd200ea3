package drill

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

var sluiceEntry = regexp.MustCompile(`"type":\s*"sluice"`)

// clobberConflist writes the chain without sluice, in every way that other installers do. Running pods notice nothing,
// and sluice comes back. A new daemon then starts its backoff anew: one Keeper gives way to a program that undoes its
// work again and again.
func (s *drillScene) clobberConflist() {
	file, bare := s.n.ConfFile(), s.n.Primary()
	write := func(data []byte) {
		if err := os.WriteFile(file, data, 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	back := func() {
		s.over = time.Now()
		testbed.Eventually(s.t, "sluice is back in the conflist", func() bool {
			data, err := os.ReadFile(file)
			return err == nil && sluiceEntry.Match(data)
		})
		s.recovered()
	}
	back() // from the first start
	write(bare)
	back()

	beside := file + ".new"
	if err := errors.Join(os.WriteFile(beside, bare, 0o600), os.Rename(beside, file)); err != nil {
		s.t.Fatal(err)
	}
	back()

	for _, first := range [][]byte{nil, bare[:len(bare)/2]} {
		write(first)
		s.pause() // a slow writer
		write(bare)
		back()
	}
	s.comesAndGoes("after")
	s.succeed()
}

// comesAndGoes adds a pod that connects, and removes the pod.
func (s *drillScene) comesAndGoes(name string) {
	s.t.Helper()
	p := s.addPod(name)
	testbed.EchoAll(s.t, 2, 100, p.Host)
	if state := s.d.Of(p).State; state != attach.Captured {
		s.t.Errorf("%s is %s", p, state)
	}
	s.removePod(p)
}

// mountStateDir mounts a small file system on the state directory.
func (s *drillScene) mountStateDir() {
	dir := s.n.StateDir()
	if err := errors.Join(os.Mkdir(dir, 0o700), unix.Mount("none", dir, "tmpfs", 0, "size=4m")); err != nil {
		s.t.Fatalf("mounting the state directory: %v", err)
	}
	s.t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			s.t.Errorf("unmounting the state directory: %v", err)
		}
	})
}

// fillDisk leaves no free byte under the state directory. ADD fails then and leaves nothing behind; DEL, hand-over and
// a start after a kill succeed.
func (s *drillScene) fillDisk() {
	fill := func() {
		f, err := os.OpenFile(s.fullFile(), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			s.t.Fatal(err)
		}
		defer f.Close() //nolint:errcheck // the last write fails on purpose
		for err == nil {
			_, err = f.Write(make([]byte, 512))
		}
		if !errors.Is(err, unix.ENOSPC) {
			s.t.Fatalf("filling the disk: %v", err)
		}
	}
	old := s.addPod("old")
	fill()
	unlucky := s.newPod("unlucky")
	testbed.WantErrorLike(s.t, unlucky.Add(), "recording attachment .*no space left")
	s.removePod(unlucky)
	s.removePod(old)
	fill() // the room of its record
	s.succeed()
	s.killDaemon()
	s.start()
}

// emptyDisk takes that file away. No other is left.
func (s *drillScene) emptyDisk() {
	if left, err := filepath.Glob(filepath.Join(s.n.StateDir(), "*", "*.tmp")); err != nil || len(left) > 0 {
		s.t.Errorf("half-written files are left: %q, %v", left, err)
	}
	if err := os.Remove(s.fullFile()); err != nil {
		s.t.Fatal(err)
	}
	s.comesAndGoes("after")
}

func (s *drillScene) fullFile() string { return filepath.Join(s.n.StateDir(), "full") }

// useUpDescriptors leaves the daemon a few descriptors, and makes it use them. Connections that the daemon cannot
// accept wait in the kernel; those that it cannot bring to the upstream wait in the daemon. For a proxy that runs out
// of descriptors see TestProxyWithFewDescriptors.
func (s *drillScene) useUpDescriptors() {
	pid := s.d.Pid()
	var enough unix.Rlimit
	s.limitDescriptors(nil, &enough)
	ranOut := func() int { return strings.Count(s.d.Log(), "too many open files") }
	before, few := ranOut(), enough
	var idle []net.Conn
	testbed.Eventually(s.t, "the daemon has run out of descriptors", func() bool {
		used, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			s.t.Fatal(err)
		}
		// There are hardly any gaps, since the kernel takes the lowest free number.
		few.Cur = min(few.Cur, uint64(len(used))+4)
		s.limitDescriptors(&few, nil)
		c, err := net.Dial("unix", s.n.AgentSocket())
		if err != nil {
			s.t.Fatal(err)
		}
		idle = append(idle, c)
		return ranOut() > before
	})
	s.moreDescriptors = func() {
		s.limitDescriptors(&enough, nil)
		for _, c := range idle {
			_ = c.Close() // nothing was sent on it
		}
	}
}

func (s *drillScene) limitDescriptors(now, was *unix.Rlimit) {
	if err := unix.Prlimit(s.d.Pid(), unix.RLIMIT_NOFILE, now, was); err != nil {
		s.t.Fatalf("limiting the daemon's descriptors: %v", err)
	}
}

// freeDescriptors gives the daemon its descriptors back.
func (s *drillScene) freeDescriptors() { s.moreDescriptors() }

// fillConntrack fills the conntrack table of one pod: the limit is the same for all netns, and each is counted by
// itself. The kernel then drops the first packet of a connection, so that none leaves the pod without a look at nat.
func (s *drillScene) fillConntrack() {
	pod := s.pods[0].Host
	dropped := func() (n int) {
		for _, m := range conntrackDrops.FindAllStringSubmatch(pod.Exec("conntrack", "--stats"), -1) {
			drops, _ := strconv.Atoi(m[1])
			n += drops
		}
		return n
	}
	before := dropped()
	if err := fillTable(pod, s.conntrackNumber("sysctl", "-n", "net.netfilter.nf_conntrack_max")); err != nil {
		s.t.Fatal(err)
	}
	testbed.Eventually(s.t, "the table is full", func() bool { return dropped() > before })
}

// emptyConntrack takes the entries out again.
func (s *drillScene) emptyConntrack() {
	if err := emptyTable(s.pods[0].Host); err != nil {
		s.t.Fatal(err)
	}
	limit := s.conntrackNumber("sysctl", "-n", "net.netfilter.nf_conntrack_max")
	testbed.Eventually(s.t, "the table has room again", func() bool {
		return s.conntrackNumber("conntrack", "--count") < limit/2
	})
}

// conntrackNumber is the output of a command in that pod.
func (s *drillScene) conntrackNumber(name string, args ...string) int {
	n, err := strconv.Atoi(strings.TrimSpace(s.pods[0].Exec(name, args...)))
	if err != nil {
		s.t.Fatalf("%s: %v", name, err)
	}
	return n
}

var conntrackDrops = regexp.MustCompile(`\bdrop=(\d+)`)

// jumpClock has the effect of a jump of the wall clock on the daemon. The daemon measures time by the monotonic clock,
// except the age of files: a jump makes them files of the future, or very old. The clock itself belongs to the whole
// machine and stays as it is.
func (s *drillScene) jumpClock() {
	for _, jump := range []time.Duration{time.Hour, -time.Hour} {
		then := time.Now().Add(jump)
		err := filepath.WalkDir(s.n.StateDir(), func(path string, _ os.DirEntry, err error) error {
			return errors.Join(err, os.Chtimes(path, then, then))
		})
		if err != nil {
			s.t.Fatal(err)
		}
		s.comesAndGoes("during")
		s.pause()
	}
	s.succeed()
}
