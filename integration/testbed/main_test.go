package testbed

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/plugin/attach"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

// TestSmallWorld does the same as most tests: a node, a pod added through a real chain, a daemon, a connection that
// waits and is then relayed.
func TestSmallWorld(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			n := New(t)
			n.Plugin["backend"] = backend
			early := n.AddPod("early")
			d := n.StartDaemon()
			late := n.AddPod("late")
			nested := late.Nested()
			n.World.Serve("["+WorldIPv6+"]:80", func(c net.Conn) { _, _ = io.WriteString(c, "hello") })
			got := make(chan string)
			hosts := []*Host{early.Host, late.Host, nested}
			for _, h := range hosts {
				go func() { got <- ask(t, h, "["+WorldIPv6+"]:80") }()
			}
			Eventually(t, "all connections wait", func() bool {
				return d.Of(early).Waiting == 1 && d.Of(late).Waiting == 2
			})
			if syns := n.SYNs(); syns != 0 {
				t.Errorf("%d SYNs left the pods, want none", syns)
			}
			Launch(n.Host, n.Binary("connectproxy"))
			for range hosts {
				if g := <-got; g != "hello" {
					t.Errorf("got %s", g)
				}
			}
			for _, p := range []*Pod{early, late} {
				if s := d.Of(p); s.State != attach.Captured {
					t.Errorf("%s is %s", p, s.State)
				}
				if err := p.Check(); err != nil {
					t.Errorf("CHECK %s: %v", p, err)
				}
				if err := p.Del(); err != nil {
					t.Errorf("DEL %s: %v", p, err)
				}
			}
		})
	}
}

func ask(t *testing.T, h *Host, address string) string {
	c, err := h.Dial(t.Context(), "tcp", address)
	if err != nil {
		return err.Error()
	}
	defer c.Close() //nolint:errcheck // read to its end
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err.Error()
	}
	b, err := io.ReadAll(c)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// TestMainWithoutRoot runs the small world as a plain user: Main makes a user namespace.
func TestMainWithoutRoot(t *testing.T) {
	t.Parallel()
	if os.Getenv(inUserNS) != "" {
		return // the whole package is run so already
	}
	cmd := withoutRoot(t)
	out, err := cmd.CombinedOutput()
	passed := strings.Count(string(out), "--- PASS: TestSmallWorld") == 3
	if err != nil || !passed || strings.Contains(string(out), "SKIP") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestMainWithoutUserNamespaces: where there are none, Main says that it needs them, and no test is skipped.
func TestMainWithoutUserNamespaces(t *testing.T) {
	t.Parallel()
	if os.Getenv(inUserNS) != "" {
		return // there are some
	}
	cmd := withoutRoot(t)
	// In a user namespace that allows no further ones.
	cmd.Args = append([]string{"sh", "-euc", `echo 0 >/proc/sys/user/max_user_namespaces; exec "$0" "$@"`}, cmd.Args...)
	cmd.Path = "/bin/sh"
	all := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: all, GidMappings: all, GidMappingsEnableSetgroups: true,
	}
	const needed = "run them as root, or where unprivileged user namespaces are allowed"
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), needed) || strings.Contains(string(out), "PASS") {
		t.Errorf("%v\n%s", err, out)
	}
}

// withoutRoot is a command that runs the small world as user 65534, with the PATH of a plain user. That user may
// not be allowed to see the module, so the binaries are copied.
func withoutRoot(t *testing.T) *exec.Cmd {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-binaries-") //nolint:usetesting // t.TempDir is in a folder for its user alone
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	self := filepath.Join(dir, "testbed.test")
	Run(t, "cp", fmt.Sprintf("/proc/%d/exe", os.Getpid()), self)
	for name := range programs {
		Run(t, "cp", filepath.Join(Binaries(t), name), dir)
	}
	Run(t, "chmod", "0755", dir, self)
	cmd := exec.Command("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups",
		self, "-test.run", "^TestSmallWorld$", "-test.v", "-test.timeout", "2m")
	cmd.Dir = dir
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + dir, "TMPDIR=/tmp", binariesVariable + "=" + dir}
	return cmd
}
