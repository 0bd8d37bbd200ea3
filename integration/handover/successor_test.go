package handover

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// TestSuccessorThatCannotStart fails before it takes over: the daemon before it goes on, and no connection is lost.
func TestSuccessorThatCannotStart(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		spoil func(n *testbed.Node) error
		want  string
	}{
		"a metrics address of another machine": {func(n *testbed.Node) error {
			n.Config["metricsAddress"] = "192.0.2.1:15090"
			return nil
		}, "metricsAddress: "},
		"a folder in the place of the proxy socket": {func(n *testbed.Node) error {
			return makeFolder(n.ProxySocket())
		}, "proxySocket: "},
		"a data folder that is a file": {func(n *testbed.Node) error {
			n.Config["dataDir"] = filepath.Join(n.Dir, "sluiced.yaml")
			return nil
		}, "not a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := testbed.New(t)
			testbed.ServeEcho(n)
			d := n.StartDaemon()
			pod := n.AddPod("web")
			outcome := testbed.Echoes(t, 20, 100, pod.Host)
			testbed.Eventually(t, "all of them wait", func() bool { return d.Waiting(pod) == 20 })
			if err := tc.spoil(n); err != nil {
				t.Fatal(err)
			}
			next := n.LaunchDaemon()
			testbed.Eventually(t, "the next daemon ends", next.Ended)
			if !strings.Contains(next.Log(), tc.want) {
				t.Errorf("got log %q, want %q in it", next.Log(), tc.want)
			}
			testbed.StartConnectProxy(n)
			testbed.WantServed(t, outcome, 20)
			testbed.EchoAll(t, 2, 100, pod.Host, n.AddPod("new").Host)
			if strings.Contains(d.Log(), "handed over") {
				t.Error("the daemon before it has handed over")
			}
			files, err := filepath.Glob(filepath.Join(n.Dir, ".*"))
			if err != nil || len(files) > 0 {
				t.Errorf("the next daemon has left %q, %v; want nothing", files, err)
			}
		})
	}
}

// makeFolder replaces a file by a folder that is not empty.
func makeFolder(path string) error {
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	return os.MkdirAll(filepath.Join(path, "x"), 0o755)
}

// TestSuccessorBesideAFolderOfTheProxy: the container of a proxy can write in the folder of the proxy socket. The next
// daemon takes over all the same.
func TestSuccessorBesideAFolderOfTheProxy(t *testing.T) {
	t.Parallel()
	n, d, pod := relayingNode(t)
	if err := makeFolder(n.ProxySocket() + ".new"); err != nil {
		t.Fatal(err)
	}
	next := n.HandOver(d)
	testbed.EchoAll(t, 4, 100, pod.Host)
	testbed.Eventually(t, "the former daemon ends", d.Ended)
	if next.Ended() {
		t.Errorf("the next daemon has ended: %s", next.Log())
	}
}

// TestSuccessorWithoutInotify: other programs of the node have all instances. The next daemon takes over, and looks at
// the CNI directories from time to time.
func TestSuccessorWithoutInotify(t *testing.T) {
	t.Parallel()
	binaries := testbed.Binaries(t)
	dir := t.TempDir()
	for _, name := range []string{"sluice", "sluiced", "connectproxy"} {
		if err := os.Symlink(filepath.Join(binaries, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	n := testbed.NewNode(t, dir)
	n.Install()
	testbed.ServeEcho(n)
	testbed.StartConnectProxy(n)
	d := n.StartDaemon()
	installed := func() bool {
		conf, err := os.ReadFile(n.ConfFile())
		return err == nil && strings.Contains(string(conf), `"sluice"`)
	}
	testbed.Eventually(t, "the plugin is installed", installed)
	pod := n.AddPod("web")

	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\n%s=%s exec %s \"$@\"\n", withoutInotify, n.Binary("sluiced")+".real", self)
	for _, err := range []error{
		os.Rename(n.Binary("sluiced"), n.Binary("sluiced")+".real"),
		os.WriteFile(n.Binary("sluiced"), []byte(script), 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	next := n.HandOver(d)
	testbed.Eventually(t, "the former daemon ends", d.Ended)
	if err := os.WriteFile(n.ConfFile(), n.Primary(), 0o600); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the plugin is installed again", installed)
	testbed.EchoAll(t, 4, 100, pod.Host)
	if next.Ended() || !strings.Contains(next.Log(), "the CNI directories are not watched") {
		t.Errorf("got log %q, want it to say that nothing is watched", next.Log())
	}
}

// withoutInotify is an environment variable that names a program: the test binary becomes that program, for which the
// kernel has no inotify instance.
const withoutInotify = "SLUICE_TEST_WITHOUT_INOTIFY"

// becomeWithoutInotify returns only with an error.
func becomeWithoutInotify(program string) error {
	runtime.LockOSThread() // the filter is the thread's
	const number = 0       // its offset in struct seccomp_data (linux/seccomp.h)
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_INOTIFY_INIT1, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EMFILE)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	f := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&f)), 0, 0)
	if err != nil {
		return fmt.Errorf("refusing inotify: %w", err)
	}
	return unix.Exec(program, append([]string{program}, os.Args[1:]...), os.Environ())
}

// TestProbesAskTheirOwnDaemon, and not the one that serves the agent socket: kubelet ends the daemon that hangs, and no
// other.
func TestProbesAskTheirOwnDaemon(t *testing.T) {
	t.Parallel()
	n, _, pod := relayingNode(t)
	start := func(name string) (d *testbed.Daemon, probe func(flag string) error) {
		n.ProbeSocket = filepath.Join(n.Dir, name+".sock")
		socket := n.ProbeSocket
		return n.StartDaemon(), func(flag string) error {
			out, err := n.Sluiced("status", flag, "--agent-socket", socket)
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}
	}
	want := func(what string, err error, ok bool, message string) {
		t.Helper()
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), message) {
			t.Errorf("%s: got %v; want success: %t, or an error with %q", what, err, ok, message)
		}
	}
	first, probeFirst := start("first")
	testbed.Eventually(t, "the first is ready", func() bool { return probeFirst("--ready") == nil })
	want("first, alive", probeFirst("--alive"), true, "")

	open := testbed.MustOpen(t, pod.Host, testbed.EchoAddresses[0])
	testbed.WantEcho(t, open, "before")
	second, probeSecond := start("second")
	testbed.Eventually(t, "the second is ready", func() bool { return probeSecond("--ready") == nil })
	want("first, ready, when the second has taken over", probeFirst("--ready"), false, "another sluiced has taken over")
	want("first, alive, when the second has taken over", probeFirst("--alive"), true, "")

	second.Freeze()
	want("second, ready, when it hangs", probeSecond("--ready"), false, "does not answer")
	want("second, alive, when it hangs", probeSecond("--alive"), false, "does not answer")
	want("first, alive, when the second hangs", probeFirst("--alive"), true, "")

	_, probeThird := start("third")
	testbed.Eventually(t, "the third is ready", func() bool { return probeThird("--ready") == nil })
	want("third, alive, beside the one that hangs", probeThird("--alive"), true, "")
	want("second, alive, beside the third", probeSecond("--alive"), false, "does not answer")
	testbed.WantEcho(t, open, "by the first")
	second.Signal(syscall.SIGCONT)
	testbed.Eventually(t, "the second notices when it wakes", func() bool {
		return probeSecond("--alive") == nil || second.Ended()
	})
	if first.Ended() {
		t.Error("the first has ended while it had a connection to relay")
	}
}
