package docs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/integration/testbed"
)

// commandTimeout bounds one command of a page.
const commandTimeout = 90 * time.Second

// sandbox is a node for the commands of one page: with the daemon, the plugin in the network configuration, a proxy,
// and the captured pod default/web. Commands run in the node's netns, and in a mount and a PID namespace of the
// sandbox: the daemon's default paths lead to the node's files, and no file and no process of the machine is changed.
type sandbox struct {
	tb     *testing.T
	node   *testbed.Node
	daemon *testbed.Daemon
	proxy  *testbed.Program // nil while the proxy is late
	holder *testbed.Program // it holds the namespaces, and ends every process in them when it is killed
	pid    int              // of a process in the namespaces
	dir    string           // the working directory of commands
}

// setup makes the sandbox's view of the file system. Directories to which commands may write are overlays, with upper
// directories in a tmpfs. The repository is the working directory, with the built binaries in bin/.
//
// $1: an empty directory, $2: the file that says that all is done, $3: the repository, $4: the binaries, $5: node.Dir,
// $6: the text of /etc/sluice/config.yaml, which has the paths of the running daemon
const setup = `
mount -t tmpfs tmpfs "$1"
mkdir "$1/netns" "$1/upper" "$1/work" "$1/repository"
mount --rbind /run/netns "$1/netns"
overlay() { # ROOT LOWER NAME TARGET
	mkdir "$1/upper/$3" "$1/work/$3"
	mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper/$3,workdir=$1/work/$3" "$4"
}
for dir in etc opt root run var; do
	overlay "$1" "/$dir" "$dir" "/$dir"
done
overlay "$1" /usr/local local /usr/local
overlay "$1" "$3" repository "$1/repository"
mkdir -p /run/netns /run/sluice /etc/sluice /etc/cni/net.d /opt/cni/bin "$1/repository/bin"
mount --rbind "$1/netns" /run/netns
mount --bind "$5" /run/sluice
mount --bind "$5/cni-conf" /etc/cni/net.d
mount --bind "$5/cni-bin" /opt/cni/bin
mount --bind "$4" "$1/repository/bin"
printf %s "$6" >/etc/sluice/config.yaml
touch "$2"
exec sleep infinity
`

func newSandbox(t *testing.T) *sandbox {
	t.Helper()
	bin := testbed.Binaries(t)
	s := &sandbox{tb: t, node: testbed.NewNode(t, bin)}
	s.node.Config["stateDir"] = s.node.Dir
	s.node.Config["metricsAddress"] = "127.0.0.1:15090"
	s.node.Install()
	s.daemon = s.node.StartDaemon()
	s.setProxy(true)
	testbed.Eventually(t, "the plugin is installed", func() bool { return s.daemon.Status().NotReady == "" })
	s.node.AddPod("web")

	config, err := yaml.Marshal(s.node.Config)
	if err != nil {
		t.Fatalf("the configuration of the sandbox: %v", err)
	}
	root, ready := t.TempDir(), filepath.Join(t.TempDir(), "ready")
	s.holder = testbed.Launch(s.node.Host, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
		"--propagation", "slave", "sh", "-euc", setup, "sh", root, ready, page.Root(t), bin, s.node.Dir, string(config))
	testbed.Eventually(t, "the sandbox is set up", func() bool {
		if s.holder.Ended() {
			t.Fatalf("setting up the sandbox: %s", s.holder.Log())
		}
		_, err := os.Stat(ready)
		return err == nil
	})
	child, err := exec.Command("pgrep", "--parent", strconv.Itoa(s.holder.Pid())).Output()
	if err != nil {
		t.Fatalf("finding the sandbox's process: %v", err)
	}
	if s.pid, err = strconv.Atoi(strings.TrimSpace(string(child))); err != nil {
		t.Fatalf("finding the sandbox's process: %v", err)
	}
	t.Cleanup(s.holder.Kill) // before the directories that it holds are removed
	s.dir = filepath.Join(root, "repository")
	return s
}

// setProxy starts or kills the proxy, and waits until the daemon knows.
func (s *sandbox) setProxy(ready bool) {
	s.tb.Helper()
	switch {
	case ready && s.proxy == nil:
		s.proxy = testbed.Launch(s.node.Host, filepath.Join(testbed.Binaries(s.tb), "connectproxy"),
			"-listen", testbed.ProxyAddress)
	case !ready && s.proxy != nil:
		s.proxy.Kill()
		s.proxy = nil
	}
	testbed.Eventually(s.tb, fmt.Sprintf("the daemon knows that the proxy's readiness is %v", ready), func() bool {
		up := s.daemon.Status().Upstream
		return up.Ready == ready && (ready || strings.Contains(up.Reason, "refused"))
	})
}

// foreground matches a command that runs the daemon, which does not end. The reader goes on in another terminal.
var foreground = regexp.MustCompile(`(^|&& )sluiced run\b[^&]*$`)

// run runs a command by sh -euc, and returns the lines that it prints. A daemon goes on running.
func (s *sandbox) run(command string) ([]string, error) {
	if foreground.MatchString(command) {
		s.runDaemon(command)
		return nil, nil
	}
	// A file, because a process that the command leaves in the background keeps a pipe open.
	out, err := os.Create(filepath.Join(s.tb.TempDir(), "output"))
	if err != nil {
		return nil, err
	}
	defer out.Close() //nolint:errcheck // it is read by its name
	ctx, cancel := context.WithTimeout(s.tb.Context(), commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", s.args(command)...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), "HOME=/root", "GORACE=atexit_sleep_ms=0")
	err = cmd.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("it has not ended after %s", commandTimeout)
	}
	text, rerr := os.ReadFile(out.Name())
	return strings.Split(string(text), "\n"), errors.Join(err, rerr)
}

// args are the arguments of nsenter for a command.
func (s *sandbox) args(command string) []string {
	return []string{
		"--target", strconv.Itoa(s.pid), "--mount", "--pid", "--net",
		"sh", "-c", `cd "$1" && PATH=$PWD/bin:$PATH exec sh -euc "$2"`, "sh", s.dir, command,
	}
}

// runDaemon runs a command that starts a daemon, and waits until that daemon is ready. It takes over from the daemon
// that ran before, and ends with the sandbox.
func (s *sandbox) runDaemon(command string) {
	s.tb.Helper()
	p := testbed.Launch(s.node.Host, "nsenter", s.args(command)...)
	// Before the end of p is waited for: the daemon is a child of nsenter, and ends with the PID namespace alone.
	s.tb.Cleanup(s.holder.Kill)
	testbed.Eventually(s.tb, command+": the daemon is ready", func() bool {
		if p.Ended() {
			s.tb.Fatalf("%s: it ended: %s", command, p.Log())
		}
		return strings.Contains(p.Log(), "sluiced is up") && s.daemon.Status().NotReady == ""
	})
}

// TestSandbox: commands see the node, with the daemon's default paths, and change nothing outside.
func TestSandbox(t *testing.T) {
	t.Parallel()
	s := newSandbox(t)
	for command, want := range map[string]string{
		"sluiced install": "already installed",
		"ip -o addr show cni0 | grep -c 10.88.0.1/": "1",
		"pgrep --count sluiced || true":             "0",
		"sleep 1000 & echo started":                 "started",
		"echo $((1 + 1)); false; echo not reached":  "2",
		"test -e go.mod; ls bin/sluiced":            "bin/sluiced",
	} {
		got, err := s.run(command)
		if failed := err != nil; failed != strings.Contains(command, "false;") || strings.Join(got, "\n") != want+"\n" {
			t.Errorf("%s: got %q, %v; want %q", command, got, err, want)
		}
	}
	for range 2 {
		if _, err := s.run("sluiced run --install"); err != nil {
			t.Errorf("running the daemon: %v", err)
		}
	}
	if _, err := s.run("sluiced wait --timeout 10s"); err != nil {
		t.Errorf("after the start of another daemon: %v", err)
	}
	const name = "sluice-sandbox-test"
	dirs := []string{"/etc", "/opt", "/root", "/run", "/usr/local/bin", "/var/lib"}
	for _, dir := range dirs {
		if _, err := s.run("touch " + filepath.Join(dir, name)); err != nil {
			t.Errorf("writing to %s: %v", dir, err)
		}
	}
	if _, err := s.run("touch " + name); err != nil {
		t.Errorf("writing to the working directory: %v", err)
	}
	for _, dir := range append(dirs, page.Root(t)) {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			t.Errorf("a command has written to the machine's %s", dir)
		}
	}
}
