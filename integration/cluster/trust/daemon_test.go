package trust

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sluice-cni/sluice/daemon/trust"
	"github.com/sluice-cni/sluice/integration/pki"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

const (
	daemonVariable = "SLUICE_TRUST_DAEMON" // the folder of a daemon
	procVariable   = "SLUICE_TRUST_PROC"   // the folder of the host's processes
)

// daemonMain is a daemon with nothing but the plugin. A pod is wanted if the folder wanted has a file of its UID,
// and the runtime stops a container while there is a file stopping. Each line of standard input, "ready ID" or
// "state ID", gets a line.
func daemonMain() error {
	dir := os.Getenv(daemonVariable)
	plugin := filepath.Join(dir, "sluice")
	t, err := trust.New(trust.Config{
		Socket: filepath.Join(dir, "nri.sock"), CAFile: filepath.Join(dir, "ca/ca.pem"), Dir: filepath.Join(dir, "run"),
		Hook: plugin, Plugin: plugin, Proc: os.Getenv(procVariable),
		Wanted: func(id string) bool {
			_, err := os.Stat(filepath.Join(dir, "wanted", id))
			return err == nil
		},
		Stopping: func() bool {
			_, err := os.Stat(filepath.Join(dir, "stopping"))
			return err == nil
		},
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- t.Run(ctx) }()
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		command, id, _ := strings.Cut(lines.Text(), " ")
		if command == "ready" {
			if err := t.Ready(ctx, id); err != nil {
				return err
			}
		}
		data, err := json.Marshal(t.State(id))
		if err != nil {
			return err
		}
		fmt.Println(string(data))
	}
	cancel()
	return <-ended
}

// daemon is a process with the plugin.
type daemon struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines *bufio.Scanner
	kill  func()
}

// buildPlugin builds the plugin as it is released, once.
var buildPlugin = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.Getenv(folderVariable), "sluice")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", path, "./plugin")
	cmd.Dir = "../../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the plugin: %w\n%s", err, out)
	}
	return path, nil
})

// prepare lays down the plugin and a CA for the daemons of a containerd.
func (c *containerd) prepare() {
	c.t.Helper()
	plugin, err := buildPlugin()
	c.must(err)
	c.must(os.Link(plugin, c.dir+"/sluice"))
	for _, folder := range []string{"ca", "wanted"} {
		c.must(os.Mkdir(filepath.Join(c.dir, folder), 0o755))
	}
	c.setCA(pki.NewCA("first").Cert)
}

func (c *containerd) setCA(ca []byte) {
	c.t.Helper()
	c.must(os.WriteFile(c.dir+"/ca/.new", ca, 0o644))
	c.must(os.Rename(c.dir+"/ca/.new", c.dir+"/ca/ca.pem"))
}

// want makes a pod a wanted one.
func (p *pod) want() *pod {
	p.c.t.Helper()
	p.c.must(os.WriteFile(filepath.Join(p.c.dir, "wanted", p.uid()), nil, 0o600))
	return p
}

// newDaemon starts a daemon and waits until it has asked the runtime. prefix is a command that runs it.
func (c *containerd) newDaemon(prefix ...string) *daemon {
	c.t.Helper()
	program, err := os.Executable()
	c.must(err)
	args := slices.Concat(prefix, []string{program})
	d := &daemon{t: c.t, cmd: exec.Command(args[0], args[1:]...)}
	d.cmd.Env = append(os.Environ(), stageVariable+"=daemon", daemonVariable+"="+c.dir)
	log, err := os.CreateTemp(c.dir, "daemon-*.log")
	c.must(err)
	d.cmd.Stderr = log
	d.stdin, err = d.cmd.StdinPipe()
	c.must(err)
	stdout, err := d.cmd.StdoutPipe()
	c.must(err)
	d.lines = bufio.NewScanner(stdout)
	c.must(d.cmd.Start())
	d.kill = sync.OnceFunc(func() {
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait() // killed
	})
	c.t.Cleanup(func() {
		d.kill()
		if c.t.Failed() {
			text, _ := os.ReadFile(log.Name()) // empty: the test has failed anyway
			c.t.Logf("daemon:\n%s", text)
		}
	})
	d.ask("ready none")
	return d
}

func (d *daemon) ask(command string) trust.Pod {
	d.t.Helper()
	if _, err := io.WriteString(d.stdin, command+"\n"); err != nil {
		d.t.Fatal(err)
	}
	if !d.lines.Scan() {
		d.t.Fatalf("%s: the daemon has ended: %v", command, d.lines.Err())
	}
	var answer trust.Pod
	if err := json.Unmarshal(d.lines.Bytes(), &answer); err != nil {
		d.t.Fatal(err)
	}
	return answer
}

// wantReady waits until a pod is ready, and compares its state.
func (d *daemon) wantReady(p *pod, state truststore.State) trust.Pod {
	d.t.Helper()
	got := d.ask("ready " + p.uid())
	if got.State != state {
		d.t.Errorf("got %+v, want the state %s", got, state)
	}
	return got
}

func (d *daemon) signal(s syscall.Signal) {
	d.t.Helper()
	if err := d.cmd.Process.Signal(s); err != nil {
		d.t.Fatal(err)
	}
}
