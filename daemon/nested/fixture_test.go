package nested

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// As in sluiced.
func init() { runtime.LockOSThread() }

// TestMain runs the tests in a mount namespace of their own.
func TestMain(m *testing.M) { os.Exit(testbed.InMountNS(0, func() int { return testbed.Main(m) })) }

// store is the trust store in the root of the containers.
const store = "etc/ssl/certs/ca-certificates.crt"

// pod is a shell in a PID namespace, a mount namespace and a netns of its own, as the container of a pod is.
type pod struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines *os.File
	netns uint32
	// root is the root of the containers, with busybox and a store. out is a file in it.
	root, out string
}

// newPod starts a pod.
func newPod(t *testing.T) *pod {
	t.Helper()
	p := &pod{t: t, root: t.TempDir()}
	p.out = filepath.Join(p.root, "out")
	must(t, os.Chmod(p.root, 0o755))
	for _, folder := range []string{"bin", "tmp", filepath.Dir(store)} {
		must(t, os.MkdirAll(filepath.Join(p.root, folder), 0o755))
	}
	busybox, err := os.ReadFile("/bin/busybox")
	must(t, err)
	must(t, os.WriteFile(filepath.Join(p.root, "bin/busybox"), busybox, 0o755))
	for _, name := range append([]string{"sh", "cat", "dpkg", "sleep", "grep"}, editors...) {
		must(t, os.Symlink("busybox", filepath.Join(p.root, "bin", name)))
	}
	must(t, os.WriteFile(filepath.Join(p.root, store), pki.NewCA("a public root").Cert, 0o644))
	must(t, os.WriteFile(p.out, nil, 0o666))
	read, write, err := os.Pipe()
	must(t, err)
	p.lines = write
	const script = `mount --make-rprivate / && mount --bind "$root" "$root" || exit 1
		while read line; do eval "$line"; echo "ended $?"; done`
	p.cmd = exec.Command("unshare", "--pid", "--fork", "--kill-child", "--net", "--mount-proc", "bash", "-c", script)
	p.cmd.Stdin = read
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "root=" + p.root}
	ended, err := os.Create(filepath.Join(p.root, "log"))
	must(t, err)
	p.cmd.Stdout, p.cmd.Stderr = ended, ended
	must(t, p.cmd.Start())
	must(t, read.Close())
	t.Cleanup(func() {
		_ = write.Close()
		_ = p.cmd.Process.Kill() // its input has ended, and it may have
		_ = p.cmd.Wait()
	})
	own, err := inodeOf("/proc/self/ns/net")
	must(t, err)
	testbed.Eventually(t, "the pod has a netns", func() bool {
		p.netns, err = inodeOf(fmt.Sprintf("/proc/%d/ns/net", p.cmd.Process.Pid))
		return err == nil && p.netns != own
	})
	return p
}

// run runs a command in the pod, in the shell.
func (p *pod) run(command string) {
	p.t.Helper()
	_, err := p.lines.WriteString(command + "\n")
	must(p.t, err)
}

// start runs a script of busybox in a container of the pod, with the options of unshare(1).
func (p *pod) start(script string, options ...string) {
	p.t.Helper()
	p.run(fmt.Sprintf("unshare --mount --pid --fork %s --root=%s /bin/sh -c '%s'",
		strings.Join(options, " "), p.root, script))
}

// wantEnded waits until commands have ended, each without an error.
func (p *pod) wantEnded(count int) {
	p.t.Helper()
	testbed.Eventually(p.t, fmt.Sprintf("%d commands have ended", count), func() bool {
		return strings.Count(p.log(), "ended ") == count
	})
	if log := p.log(); strings.Count(log, "ended 0\n") != count {
		p.t.Fatalf("a command has failed:\n%s", log)
	}
}

func (p *pod) log() string {
	data, err := os.ReadFile(filepath.Join(p.root, "log"))
	must(p.t, err)
	return string(data)
}

// output is the text that containers have written to /out.
func (p *pod) output() string {
	data, err := os.ReadFile(p.out)
	must(p.t, err)
	return string(data)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// node is an engine with a CA.
type node struct {
	*Engine
	ca      string // its file
	stop    func()
	changes atomic.Int32 // the calls of Changed
}

// newEngine starts an engine that watches a pod with the UID "uid".
func newEngine(t *testing.T, p *pod) *node {
	t.Helper()
	return newEngineWith(t, p, true)
}

// newEngineWith starts one that can, or cannot, ask the kernel for the numbers of mount namespaces.
func newEngineWith(t *testing.T, p *pod, numbers bool) *node {
	t.Helper()
	n := newTestEngine(t)
	n.numbers = numbers
	n.Watch(map[uint32]string{p.netns: "uid"})
	n.stop = run(t, n.Engine)
	testbed.Eventually(t, "the engine watches", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.problem != "" {
			t.Fatal(n.problem)
		}
		return n.watcher != nil
	})
	n.work.Wait()
	return n
}

// newTestEngine makes an engine that does not run.
func newTestEngine(t *testing.T) *node {
	t.Helper()
	n := &node{ca: filepath.Join(t.TempDir(), "ca.pem")}
	must(t, os.WriteFile(n.ca, pki.NewCA("the proxy").Cert, 0o600))
	n.Engine = New(Config{
		CAFile: n.ca, Proc: "/proc", Changed: func(string) { n.changes.Add(1) }, Tell: func() {},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	return n
}
