// Package node runs a Kubernetes node on a Linux machine, in namespaces of its own (mount, PID, network, UTS, IPC):
// control plane, containerd, kubelet and kube-proxy.
//
// The node's root is a copy-on-write overlay on the machine's root, with its own /run. Every path is the same as on a
// real node (/etc/cni/net.d, /opt/cni/bin, /run/netns, /var/lib/kubelet), and the machine's files do not change. Any
// number of nodes can run side by side. When a node's first process ends, all its processes end.
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

// Name is the name of the node and its host name.
const Name = "node"

// Config describes a node.
type Config struct {
	// Dir is the folder of the node's state. It must be on a file system that can be the upper layer of an overlay, so
	// not on an overlay.
	Dir string `json:"dir"`
	// DualStack gives pods and Services IPv6 addresses too.
	DualStack bool `json:"dualStack"`
	// Port is the port of the API server on the node's loopback and on the machine's loopback. Up sets it.
	Port int `json:"port"`
}

// state is the record of a started node, in the file node.json.
type state struct {
	Config
	PID int `json:"pid"` // of the node's first process
	// Started is the start time of that process. It tells the process from a later one with the same PID.
	Started string `json:"started"`
}

func (c Config) path(parts ...string) string {
	return filepath.Join(append([]string{c.Dir}, parts...)...)
}

// Kubeconfig returns the path of the administrator's kubeconfig. The file is valid on the machine and on the node.
func (c Config) Kubeconfig() string { return c.path("kubeconfig") }

// cgroup returns the name of the node's cgroup in each hierarchy.
func (c Config) cgroup() string {
	return fmt.Sprintf("sluice-node-%x", sha256.Sum256([]byte(c.Dir)))[:len("sluice-node-")+8]
}

// First arguments by which Main recognises the node's own processes.
const (
	initName      = "node-init"
	superviseName = "node-supervise"
)

// Main must be the first call of a program that calls Up, because Up starts the same program again for the node's own
// processes. In these processes Main does not return.
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

// Up starts a node and returns when the node is ready to run pods. programs maps the names of the node's programs to
// their paths, and pause is the archive of the sandbox image. If Up fails or ctx ends, Up stops all processes that it
// has started and keeps the logs.
func Up(ctx context.Context, c Config, programs map[string]string, pause []byte, progress io.Writer) error {
	if s, err := c.load(); err == nil && s.running() {
		return fmt.Errorf("a node already runs in %s: take it down first, with `cluster down`", c.Dir)
	}
	if err := c.remove(); err != nil {
		return fmt.Errorf("clearing %s: %w", c.Dir, err)
	}
	// A socket stays in the netns in which it was created. The node's processes inherit this one, and so can accept
	// connections on the machine's loopback.
	api, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("finding a port for the API server: %w", err)
	}
	defer api.Close() //nolint:errcheck // the node has its own descriptor
	c.Port = api.Addr().(*net.TCPAddr).Port
	if err := c.layDown(programs, pause); err != nil {
		return fmt.Errorf("writing the files of the node in %s: %w", c.Dir, err)
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
	defer listener.Close() //nolint:errcheck // the node has its own descriptor
	reports, report, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reports.Close() //nolint:errcheck // only read
	defer report.Close()  //nolint:errcheck // closed below
	log, err := os.Create(c.path("node.log"))
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // the node has its own descriptor
	argument, err := json.Marshal(c)
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", initName, string(argument))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{report, listener}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true,
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}
	// The first process waits for a line on its standard input, which is written after node.json. If this process ends
	// before that, the first process ends too, so no node runs without a record.
	begin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the node's first process: %w", err)
	}
	go cmd.Wait() //nolint:errcheck // reaps the process; follow notices its end
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

// Lines that the node's processes write to the process that starts them. The last one is lineReady.
const (
	lineProgress = "progress "
	lineReady    = "ready"
)

// follow copies the node's progress to progress until the node is ready. If the reports end before that, the error
// contains the other lines.
func follow(reports io.Reader, progress io.Writer) error {
	var messages []string
	for lines := bufio.NewScanner(reports); lines.Scan(); {
		line := lines.Text()
		if line == lineReady {
			return nil
		}
		if text, ok := strings.CutPrefix(line, lineProgress); ok {
			fmt.Fprintln(progress, text)
			continue
		}
		messages = append(messages, line)
	}
	if messages == nil {
		messages = []string{"its first process ended without a message"}
	}
	return fmt.Errorf("the node did not become ready: %s", strings.Join(messages, "\n"))
}

// Down stops a node and removes its files and cgroups. It succeeds if there is none.
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
	// When the first process of a PID namespace ends, the kernel kills all others. The node's mounts and its network
	// end with the last process.
	if err := syscall.Kill(s.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("killing the node's first process, %d: %w", s.PID, err)
	}
	for deadline := time.Now().Add(30 * time.Second); s.running(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("the first process of the node in %s, %d, still runs 30 s after SIGKILL", c.Dir, s.PID)
		}
	}
	return nil
}

// remove removes the cgroups, and the files in Dir that this package creates. It keeps any other file: the caller chose
// Dir.
func (c Config) remove() error {
	errs := []error{c.removeCgroups()}
	for _, name := range []string{
		rootDir, workDir, mergedDir, containerdDir, kubeletDir, "kubectl", "kubeconfig", "node.log", "node.json",
	} {
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

// startTime returns the start time of a process as /proc has it. It fails for a zombie, which has ended.
func startTime(pid int) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The second field, the name in parentheses, may contain spaces and parentheses. The fields after it begin with the
	// third.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return "", os.ErrProcessDone
	}
	return fields[19], nil
}

// Command returns the argument vector and the environment that run a command on the node in c.Dir. With world, the
// command runs in the network of the world outside, and in the node's other namespaces.
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

// Load imports the images of an archive, as `docker save` writes it, into the containerd of the node in c.Dir.
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
