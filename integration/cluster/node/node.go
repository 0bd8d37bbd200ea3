// Package node runs a Kubernetes node beside the machine that it is on: control plane, containerd, kubelet and
// kube-proxy live in namespaces of their own (mounts, processes, network, host name).
//
// The node's root is the machine's, copy on write, with an own /run: every path is where a real node has it
// (/etc/cni/net.d, /opt/cni/bin, /run/netns, /var/lib/kubelet), the machine's stays as it is, any number of nodes
// live side by side, and all of a node ends with its first process.
//
//	world (198.51.100.10, 2001:db8::10) ──veth── node (198.51.100.1) ──bridge cni0── pod, pod, …
//	machine: 127.0.0.1:port ──forwarded── node: 127.0.0.1:port, kube-apiserver
package node

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Name is the node's name, and its host name.
const Name = "node"

// Config is what a node is to be.
type Config struct {
	// Dir holds all of the node's state. It is on a file system that overlayfs can write to: not on an overlay.
	Dir string `json:"dir"`
	// DualStack gives pods and Services IPv6 addresses too.
	DualStack bool `json:"dualStack"`
	// Port is that of the API server, on the node's loopback and on the machine's.
	Port int `json:"port"`
}

// state is what is recorded about a node that was started.
type state struct {
	Config
	PID int `json:"pid"`
	// Started tells the process from a later one with its PID.
	Started string `json:"started"`
}

func (c Config) path(parts ...string) string {
	return filepath.Join(append([]string{c.Dir}, parts...)...)
}

// Kubeconfig is the path of the administrator's kubeconfig, good on the machine and on the node.
func (c Config) Kubeconfig() string { return c.path("kubeconfig") }

// cgroup is the name of the node's cgroup in each hierarchy.
func (c Config) cgroup() string {
	return fmt.Sprintf("sluice-node-%x", sha256.Sum256([]byte(c.Dir)))[:len("sluice-node-")+8]
}

// What Main takes for a call of the node's own.
const (
	initName      = "node-init"
	superviseName = "node-supervise"
)

// Main is the first thing that a program calls which calls Up: the node's own processes are that program, called
// again. For them it does not return.
func Main() {
	if len(os.Args) != 3 {
		return
	}
	var err error
	switch os.Args[1] {
	case initName:
		err = initialize(os.Args[2])
	case superviseName:
		err = supervise(os.Args[2])
	default:
		return
	}
	fmt.Fprintln(os.Stderr, err) // into the node's log
	os.Exit(1)
}

// Up starts a node and returns when it is ready to run pods. programs are the paths of its programs, pause is the
// image for sandboxes. What Up has started by the time it fails or ctx ends is stopped; the logs stay.
func Up(ctx context.Context, c Config, programs map[string]string, pause []byte, progress io.Writer) error {
	if s, err := c.load(); err == nil && s.running() {
		return fmt.Errorf("a node runs in %s already: take it down first", c.Dir)
	}
	if err := c.remove(); err != nil {
		return fmt.Errorf("clearing %s: %w", c.Dir, err)
	}
	// A socket stays in the netns that it was made in: the node takes this one along.
	api, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("finding a port for the API server: %w", err)
	}
	defer api.Close() //nolint:errcheck // the node has its own descriptor
	c.Port = api.Addr().(*net.TCPAddr).Port
	if err := c.layDown(programs, pause); err != nil {
		return fmt.Errorf("laying down the files of the node in %s: %w", c.Dir, err)
	}
	if err := c.start(ctx, api.(*net.TCPListener), progress); err != nil {
		return errors.Join(err, c.stop())
	}
	return nil
}

// start starts the node's first process and follows it until the node is ready.
func (c Config) start(ctx context.Context, api *net.TCPListener, progress io.Writer) error {
	listener, err := api.File()
	if err != nil {
		return err
	}
	defer listener.Close() //nolint:errcheck // the node has its own
	reports, report, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reports.Close() //nolint:errcheck // read to its end, or of no use
	defer report.Close()  //nolint:errcheck // closed below
	log, err := os.Create(c.path("node.log"))
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // the node has its own
	argument, err := json.Marshal(c)
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", initName, string(argument))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{report, listener}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}
	// It waits for a word on its standard input: before that it is recorded, or else it ends with this process.
	begin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the node's first process: %w", err)
	}
	go cmd.Wait() //nolint:errcheck // it is not to end; when it does, the reports end
	_ = report.Close()
	started, err := startTime(cmd.Process.Pid)
	if err == nil {
		err = c.save(state{c, cmd.Process.Pid, started})
	}
	if err == nil {
		_, err = io.WriteString(begin, "begin\n")
	}
	if err != nil {
		return errors.Join(fmt.Errorf("recording the node's first process: %w", err), cmd.Process.Kill())
	}
	defer context.AfterFunc(ctx, func() { _ = reports.Close() })()
	if err := follow(reports, progress); err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	return nil
}

// What the node's processes say to the one that starts them: lines, the last of which is ready.
const (
	lineProgress = "progress "
	lineReady    = "ready"
)

// follow shows the node's progress until it is ready. If it never is, the error is what it said last.
func follow(reports io.Reader, progress io.Writer) error {
	var said []string
	for lines := bufio.NewScanner(reports); lines.Scan(); {
		line := lines.Text()
		if line == lineReady {
			return nil
		}
		if text, ok := strings.CutPrefix(line, lineProgress); ok {
			fmt.Fprintln(progress, text)
			continue
		}
		said = append(said, line)
	}
	if said == nil {
		said = []string{"it ended without a word"}
	}
	return fmt.Errorf("the node did not come up: %s", strings.Join(said, "\n"))
}

// Down ends a node and removes everything of it; where there is none, that is fine.
func Down(c Config) error { return errors.Join(c.stop(), c.remove()) }

// stop ends the node's processes.
func (c Config) stop() error {
	s, err := c.load()
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !s.running() {
		return nil
	}
	// With the first process of a PID namespace go all others, with the last of them its mounts and its network.
	if err := syscall.Kill(s.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("killing the node's first process, %d: %w", s.PID, err)
	}
	for deadline := time.Now().Add(30 * time.Second); s.running(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d of the node in %s does not end", s.PID, c.Dir)
		}
	}
	return nil
}

// remove removes what is in Dir, and the cgroups. It knows what it made: Dir may be anything.
func (c Config) remove() error {
	errs := []error{c.removeCgroups()}
	for _, name := range []string{rootDir, workDir, mergedDir, containerdDir, kubeletDir, "kubectl", "kubeconfig", "node.log", "node.json"} {
		errs = append(errs, os.RemoveAll(c.path(name)))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.Remove(c.Dir); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENOTEMPTY) {
		return err
	}
	return nil
}

func (c Config) load() (s state, err error) {
	data, err := os.ReadFile(c.path("node.json"))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("reading %s: %w", c.path("node.json"), err)
	}
	return s, nil
}

func (c Config) save(s state) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(c.path("node.json"), data, 0o600)
}

func (s state) running() bool {
	started, err := startTime(s.PID)
	return err == nil && started == s.Started
}

// startTime is when a process started, in the kernel's words; a zombie has ended.
func startTime(pid int) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The name, in parentheses, may hold anything; the fields after it are counted from the third.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return "", os.ErrProcessDone
	}
	return fields[19], nil
}

// Command is a command line that runs a command on the node that runs in c.Dir, or, with its network only changed
// for that of the world outside, in the world; and the environment for it.
func Command(c Config, world bool, args ...string) (argv, env []string, err error) {
	s, err := c.load()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, err
	}
	if err != nil || !s.running() {
		return nil, nil, fmt.Errorf("the node in %s is down", c.Dir)
	}
	enter := []string{"nsenter", "--target", strconv.Itoa(s.PID), "--mount", "--pid", "--uts", "--ipc"}
	network := "--net"
	if world {
		network += fmt.Sprintf("=/proc/%d/root/run/netns/%s", s.PID, worldName)
	}
	argv = append(append(enter, network, "--"), args...)
	return argv, append(os.Environ(), environment...), nil
}

// Load gives the node that runs in c.Dir the images of an archive, as `docker save` writes it.
func Load(ctx context.Context, c Config, archive io.Reader) error {
	argv, env, err := Command(c, false, "ctr", "-n", "k8s.io", "images", "import", "-")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Stdin = env, archive
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("importing images: %w: %s", err, out)
	}
	return nil
}
