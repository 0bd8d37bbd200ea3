package testbed

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/sluice-cni/sluice/plugin/attach"
)

// ProxyAddress is where the node's proxy listens.
const ProxyAddress = "127.0.0.1:18080"

// Program is a running program of the node.
type Program struct {
	tb   TB
	name string
	cmd  *exec.Cmd
	log  *Log
	done chan struct{}
}

// Log is a log that is read while it is written. The zero value is empty.
type Log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// Count is how often the log has a text.
func (l *Log) Count(text string) int { return strings.Count(l.String(), text) }

// Launch starts a program in h; it is killed when the test ends, and its log shown if the test failed.
func Launch(h *Host, name string, args ...string) *Program {
	h.tb.Helper()
	return launch(h, filepath.Base(name), exec.Command(name, args...), 0)
}

// launch is Launch for a program with a name, in new namespaces (CLONE_NEW…).
func launch(h *Host, name string, cmd *exec.Cmd, namespaces uintptr) *Program {
	h.tb.Helper()
	p := &Program{tb: h.tb, name: name, cmd: cmd, log: &Log{}, done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Cloneflags: namespaces}
	if err := h.Start(p.cmd); err != nil {
		h.tb.Fatalf("starting %s: %v", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	h.tb.Cleanup(func() {
		p.Kill()
		if log := p.Log(); h.tb.Failed() || strings.Contains(log, "DATA RACE") {
			h.tb.Logf("log of %s:\n%s", p.name, log)
		}
	})
	return p
}

// Log is the output of the program so far.
func (p *Program) Log() string { return p.log.String() }

// Pid is the program's process ID.
func (p *Program) Pid() int { return p.cmd.Process.Pid }

// Signal sends sig to the program.
func (p *Program) Signal(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) }

// Kill ends the program with SIGKILL and waits for its end; a second time is harmless.
func (p *Program) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.done
}

// Freeze stops the program with SIGSTOP and returns when it has stopped. It no longer answers, but the kernel still
// takes connections for it.
func (p *Program) Freeze() {
	p.tb.Helper()
	p.Signal(syscall.SIGSTOP)
	Eventually(p.tb, p.name+" has stopped", func() bool {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid()))
		return err == nil && bytes.Contains(status, []byte("State:\tT"))
	})
}

// Stop ends the program with SIGTERM and waits for its end.
func (p *Program) Stop() {
	p.tb.Helper()
	p.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		p.tb.Fatalf("%s does not end when it is told to", p.name)
	}
}

// Ended tells whether the program has ended.
func (p *Program) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Daemon is a running sluiced.
type Daemon struct {
	*Program
	client *attach.Client
}

// StartDaemon starts sluiced on the node and waits until it answers.
func (n *Node) StartDaemon() *Daemon {
	n.tb.Helper()
	d := n.LaunchDaemon()
	Eventually(n.tb, "sluiced answers", func() bool {
		if d.Ended() {
			n.tb.Fatalf("sluiced ended: %s", d.Log())
		}
		_, err := d.client.Status(context.Background())
		return err == nil
	})
	return d
}

// LaunchDaemon starts sluiced on the node, and does not wait for it.
func (n *Node) LaunchDaemon() *Daemon {
	n.tb.Helper()
	data, err := yaml.Marshal(n.Config)
	if err != nil {
		n.tb.Fatalf("configuration: %v", err)
	}
	file := filepath.Join(n.Dir, "sluiced.yaml")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		n.tb.Fatalf("configuration: %v", err)
	}
	d := &Daemon{client: attach.NewClient(n.AgentSocket())}
	args := []string{"run", "--config", file, "--log-level", n.LogLevel}
	if n.ProbeSocket != "" {
		args = append(args, "--probe-socket", n.ProbeSocket)
	}
	if n.ConfDir != "" {
		args = append(args, "--install", "--cni-conf-dir", n.ConfDir, "--cni-bin-dir", n.binDir())
	}
	program := n.Binary("sluiced")
	if n.Resolvers != nil {
		program, args = withResolvConf(n, program, args)
	}
	d.Program = Launch(n.Host, program, args...)
	n.tb.Cleanup(func() {
		if strings.Contains(d.Log(), "DATA RACE") {
			n.tb.Fatalf("sluiced has a data race")
		}
	})
	return d
}

// withResolvConf makes a program see a resolv.conf with the node's Resolvers, in a mount namespace of its own to which
// later mounts of netns propagate.
func withResolvConf(n *Node, program string, args []string) (string, []string) {
	n.tb.Helper()
	var text strings.Builder
	for _, r := range n.Resolvers {
		fmt.Fprintf(&text, "nameserver %s\n", r)
	}
	file := filepath.Join(n.Dir, "resolv.conf")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		n.tb.Fatalf("resolv.conf: %v", err)
	}
	const script = `mount --bind "$0" /etc/resolv.conf && exec "$@"`
	return "unshare", append([]string{"--mount", "--propagation", "slave", "sh", "-c", script, file, program}, args...)
}

// Status is the answer of the daemon's status API.
func (d *Daemon) Status() attach.Status {
	d.tb.Helper()
	s, err := d.client.Status(context.Background())
	if err != nil {
		d.tb.Fatalf("status: %v", err)
	}
	return s
}

// Of is the part of the status about one pod.
func (d *Daemon) Of(p *Pod) attach.AttachmentStatus {
	d.tb.Helper()
	for _, a := range d.Status().Attachments {
		if strings.HasPrefix(a.Attachment, p.ID+"/") {
			return a
		}
	}
	d.tb.Fatalf("the daemon does not know %s", p)
	return attach.AttachmentStatus{}
}

// WaitListening waits until the program accepts at address on the node.
func (n *Node) WaitListening(p *Program, address string) {
	n.tb.Helper()
	Eventually(n.tb, fmt.Sprintf("%s listens on %s", p.name, address), func() bool {
		if p.Ended() {
			n.tb.Fatalf("%s ended: %s", p.name, p.Log())
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		c, err := n.Dial(ctx, "tcp", address)
		if err != nil {
			return false
		}
		_ = c.Close() // it was accepted
		return true
	})
}

// Records are the attachment records on disk.
func (n *Node) Records() []attach.Record {
	n.tb.Helper()
	r, err := attach.NewStore(n.StateDir()).List()
	if err != nil {
		n.tb.Fatalf("%v", err)
	}
	return r
}

// JSON is v as one line, for messages.
func JSON(v any) string {
	b, _ := json.Marshal(v)
	return string(b)
}

// Waiting is the number of connections of these pods that wait.
func (d *Daemon) Waiting(pods ...*Pod) int {
	d.tb.Helper()
	count := 0
	for _, p := range pods {
		count += d.Of(p).Waiting
	}
	return count
}

// HandOver starts another daemon while d runs, and returns it when it has taken over.
func (n *Node) HandOver(d *Daemon) *Daemon {
	n.tb.Helper()
	next := n.StartDaemon()
	Eventually(n.tb, "the daemon has handed over to the next", func() bool {
		return strings.Contains(d.Log(), "handed over") && strings.Contains(next.Log(), "sluiced is up")
	})
	return next
}

// Sluiced runs a command of sluiced on the node and returns its output.
func (n *Node) Sluiced(args ...string) (string, error) {
	// The race detector sleeps for a second at the end of every program, for reports of threads that still run.
	return n.TryExec("env", append([]string{"GORACE=atexit_sleep_ms=0", n.Binary("sluiced")}, args...)...)
}
