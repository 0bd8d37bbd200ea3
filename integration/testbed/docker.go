package testbed

import (
	"archive/tar"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// dockerImage is the only image of a Docker: busybox.
const dockerImage = "busybox"

//go:embed dockerd.sh
var startDocker string

// Docker is a dockerd in a pod, as CI runners have it.
type Docker struct {
	pod     *Pod
	program *Program // nil unless StartDocker has started it
	client  *http.Client
}

// StartDocker starts dockerd in the pod's netns, and waits until it answers. docker0 has the addresses 172.17.0.1/16
// and fd00:d0c::1/64. dockerd uses the iptables of the variant, nft or legacy, and gets further options.
func (p *Pod) StartDocker(variant string, options ...string) *Docker {
	p.tb.Helper()
	args := append(p.PrepareDocker(), options...)
	tools := filepath.Join(p.DockerDir(), "iptables")
	if err := linkTools(tools, variant); err != nil {
		p.tb.Fatalf("the iptables of dockerd: %v", err)
	}
	cmd := exec.Command("sh", append([]string{"-euc", startDocker, "sh", tools}, args...)...)
	if _, err := cmd.StdinPipe(); err != nil { // never written to; it ends with this process
		p.tb.Fatalf("the input of dockerd: %v", err)
	}
	program := launch(p.Host, "dockerd", cmd, unix.CLONE_NEWNS|unix.CLONE_NEWPID)
	d := p.ConnectDocker(func() {
		if program.Ended() {
			p.tb.Fatalf("dockerd ended: %s", program.Log())
		}
	})
	d.program = program
	image, err := archive(map[string]string{"bin/busybox": "/bin/busybox"}, nil)
	if err != nil {
		p.tb.Fatalf("making an image: %v", err)
	}
	d.stream("/images/create", url.Values{"fromSrc": {"-"}, "repo": {dockerImage}}, image)
	return d
}

// DockerDir is the folder for the files of the pod's dockerd.
func (p *Pod) DockerDir() string { return filepath.Join(p.node.Dir, p.Name()) }

func (p *Pod) dockerSocket() string { return filepath.Join(p.DockerDir(), "docker.sock") }

// PrepareDocker makes the pod ready for a dockerd, and returns the arguments of dockerd.
func (p *Pod) PrepareDocker() []string {
	p.tb.Helper()
	if os.Getenv(inUserNS) != "" {
		p.tb.Fatalf("dockerd needs root: run this test as root")
	}
	cgroup := p.Cgroup()
	args := []string{
		"--host", "unix://" + p.dockerSocket(), "--data-root", filepath.Join(p.DockerDir(), "data"),
		"--exec-root", "/run/docker", "--pidfile", "/run/docker.pid",
		"--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", cgroup,
		"--bip", "172.17.0.1/16", "--ipv6", "--fixed-cidr-v6", "fd00:d0c::/64", "--ip6tables", "--experimental",
	}
	// Without CAP_SYS_RESOURCE dockerd cannot set its default score. Its newer versions leave the score alone.
	if strings.Contains(Run(p.tb, "dockerd", "--help"), "--oom-score-adjust") {
		args = append(args, "--oom-score-adjust", "0")
	}
	// dockerd sets the policy of FORWARD to DROP only if it turns forwarding on.
	p.Exec("sysctl", "-qw", "net.ipv4.ip_forward=0")
	p.PrepareBridges()
	return args
}

// Cgroup returns the name of the pod's cgroup. It is removed when the test ends, after all that is started in it has.
func (p *Pod) Cgroup() string {
	p.tb.Helper()
	if p.cgroup != "" {
		return p.cgroup
	}
	p.cgroup = "/" + p.Host.Name
	p.tb.Cleanup(func() {
		// The first thread of a killed dockerd is gone before the others are, on a machine under load for long.
		Eventually(p.tb, "the processes of "+p.String()+" have left its cgroup", func() bool {
			err := removeCgroups(p.cgroup)
			if err != nil && !errors.Is(err, unix.EBUSY) {
				p.tb.Fatalf("%v", err)
			}
			return err == nil
		})
	})
	return p.cgroup
}

// ConnectDocker waits until a dockerd with the arguments of PrepareDocker answers, and calls check meanwhile.
func (p *Pod) ConnectDocker(check func()) *Docker {
	p.tb.Helper()
	d := &Docker{pod: p}
	d.client = &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", p.dockerSocket())
		},
	}}
	Eventually(p.tb, "dockerd answers", func() bool {
		check()
		_, err := d.call(http.MethodGet, "/_ping", nil)
		return err == nil
	})
	return d
}

// PrepareBridges sets sysctls of the pod for bridges that will be added: their frames pass iptables, as on a node with
// the module br_netfilter, and their addresses are valid at once.
func (p *Pod) PrepareBridges() {
	p.tb.Helper()
	out, err := p.TryExec("sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0",
		"net.bridge.bridge-nf-call-iptables=1", "net.bridge.bridge-nf-call-ip6tables=1")
	if err != nil {
		p.tb.Fatalf("preparing bridges, which needs the kernel module br_netfilter: %v\n%s", err, out)
	}
}

// linkTools makes a folder in which iptables and ip6tables are those of the variant.
func linkTools(dir, variant string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"iptables", "ip6tables"} {
		tool, err := exec.LookPath(name + "-" + variant)
		if err != nil {
			return err
		}
		if err := os.Symlink(tool, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// removeCgroups removes a cgroup and those in it from all hierarchies. It fails with EBUSY while they have processes.
func removeCgroups(name string) error {
	roots, err := hierarchies()
	errs := []error{err}
	for _, root := range roots {
		errs = append(errs, removeCgroup(filepath.Join(root, name)))
	}
	return errors.Join(errs...)
}

// hierarchies are the folders in which the hierarchies of cgroups are mounted.
func hierarchies() (roots []string, err error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(mounts)) {
		if w := strings.Fields(line); len(w) > 2 && (w[2] == "cgroup" || w[2] == "cgroup2") {
			roots = append(roots, w[1])
		}
	}
	return roots, nil
}

// Processes returns the processes of a pod that is prepared for a Docker: dockerd, those that it has started, and those
// of its containers.
func (p *Pod) Processes() (pids []int) {
	p.tb.Helper()
	roots, err := hierarchies()
	if err != nil {
		p.tb.Fatalf("the processes of %s: %v", p, err)
	}
	for _, root := range roots {
		err := filepath.WalkDir(filepath.Join(root, p.Host.Name), func(dir string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) || err == nil && !e.IsDir() {
				return nil // a container that has ended is gone, and so may be the pod in this hierarchy
			}
			if err != nil {
				return err
			}
			procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) {
				return err
			}
			for line := range strings.Lines(string(procs)) {
				pid, err := strconv.Atoi(strings.TrimSpace(line))
				if err != nil {
					return err
				}
				pids = append(pids, pid)
			}
			return nil
		})
		if err != nil {
			p.tb.Fatalf("the processes of %s: %v", p, err)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

// removeCgroup removes from the leaves up. The kernel removes the files.
func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, removeCgroup(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(append(errs, unix.Rmdir(dir))...)
}

// Command is a command of Docker's client, of the version of this dockerd.
func (d *Docker) Command(args ...string) *exec.Cmd {
	cmd := exec.Command("/usr/bin/docker", append([]string{"--host", "unix://" + d.pod.dockerSocket()}, args...)...)
	cmd.Env = append(os.Environ(), "DOCKER_CONFIG="+d.pod.DockerDir()) // nothing of the user's own
	return cmd
}

// CreateNetwork creates a user-defined bridge network with these subnets.
func (d *Docker) CreateNetwork(name string, subnets ...string) {
	d.pod.tb.Helper()
	var config []map[string]string
	ipv6 := false
	for _, s := range subnets {
		config = append(config, map[string]string{"Subnet": s})
		ipv6 = ipv6 || strings.Contains(s, ":")
	}
	d.post("/networks/create", map[string]any{
		"Name": name, "EnableIPv6": ipv6, "IPAM": map[string]any{"Config": config},
	})
}

// Connect connects a container to one more network.
func (d *Docker) Connect(network string, c *Container) {
	d.pod.tb.Helper()
	d.post("/networks/"+network+"/connect", map[string]any{"Container": c.ID})
	d.inspect(c)
}

// Container is a container of a Docker. It does nothing; tests connect and serve in its netns.
type Container struct {
	*Host
	ID string
	// Addresses are those of the container by the name of the network; the default is called bridge.
	Addresses map[string]Addresses
}

// Addresses of a host in one network.
type Addresses struct {
	IPv4 string `json:"IPAddress"`
	IPv6 string `json:"GlobalIPv6Address"`
}

// Run runs a container in the network, and publishes its ports: "8080:80" is port 80 by port 8080 of the pod.
func (d *Docker) Run(name, network string, publish ...string) *Container {
	d.pod.tb.Helper()
	exposed, bindings := map[string]any{}, map[string]any{}
	for _, p := range publish {
		outer, inner, _ := strings.Cut(p, ":")
		exposed[inner+"/tcp"] = struct{}{}
		bindings[inner+"/tcp"] = []map[string]string{{"HostPort": outer}}
	}
	var created struct{ ID string }
	d.decode(d.post("/containers/create", map[string]any{
		"Image": dockerImage, "Cmd": []string{"/bin/busybox", "sleep", "1000"}, "ExposedPorts": exposed,
		"HostConfig": map[string]any{"NetworkMode": network, "PortBindings": bindings},
	}), &created)
	d.post("/containers/"+created.ID+"/start", nil)
	c := &Container{ID: created.ID}
	pid := d.inspect(c)
	// The PID is one of dockerd's PID namespace, and so is the /proc that dockerd sees.
	c.Host = adoptHost(d.pod.tb, name, fmt.Sprintf("/proc/%d/root/proc/%d/ns/net", d.program.Pid(), pid))
	return c
}

// inspect learns the addresses of a container, and returns its PID as dockerd knows it.
func (d *Docker) inspect(c *Container) int {
	d.pod.tb.Helper()
	answer, err := d.call(http.MethodGet, "/containers/"+c.ID+"/json", nil)
	if err != nil {
		d.pod.tb.Fatalf("docker: %v", err)
	}
	var container struct {
		State           struct{ Pid int }
		NetworkSettings struct{ Networks map[string]Addresses }
	}
	d.decode(answer, &container)
	c.Addresses = container.NetworkSettings.Networks
	return container.State.Pid
}

// Pull pulls an image from a registry.
func (d *Docker) Pull(repository, tag string) {
	d.pod.tb.Helper()
	d.stream("/images/create", url.Values{"fromImage": {repository}, "tag": {tag}}, nil)
}

// RunToEnd runs a command in a container of an image until it ends, and returns its output and its exit code.
func (d *Docker) RunToEnd(image, network string, command ...string) (output string, code int) {
	d.pod.tb.Helper()
	var created struct{ ID string }
	d.decode(d.post("/containers/create", map[string]any{
		"Image": image, "Cmd": command, "Tty": true, // without it, frames divide the output
		"HostConfig": map[string]any{"NetworkMode": network},
	}), &created)
	d.post("/containers/"+created.ID+"/start", nil)
	var ended struct{ StatusCode int }
	d.decode(d.post("/containers/"+created.ID+"/wait", nil), &ended)
	answer, err := d.call(http.MethodGet, "/containers/"+created.ID+"/logs?stdout=1&stderr=1", nil)
	if err != nil {
		d.pod.tb.Fatalf("docker: %v", err)
	}
	return string(answer), ended.StatusCode
}

// RunImage runs a command in a container of an image until the test ends.
func (d *Docker) RunImage(image, network string, command ...string) *Container {
	d.pod.tb.Helper()
	var created struct{ ID string }
	d.decode(d.post("/containers/create", map[string]any{
		"Image": image, "Cmd": command, "HostConfig": map[string]any{"NetworkMode": network},
	}), &created)
	d.post("/containers/"+created.ID+"/start", nil)
	return &Container{ID: created.ID}
}

// Save returns an image as docker save does: an archive with the layers.
func (d *Docker) Save(image string) []byte {
	d.pod.tb.Helper()
	answer, err := d.call(http.MethodGet, "/images/"+image+"/get", nil)
	if err != nil {
		d.pod.tb.Fatalf("docker: %v", err)
	}
	return answer
}

// Build builds an image whose only step runs a command of busybox in the network, and returns the output.
func (d *Docker) Build(network string, command ...string) string {
	d.pod.tb.Helper()
	return d.BuildFrom(dockerImage, network, append([]string{"/bin/busybox"}, command...)...)
}

// BuildFrom builds an image on top of another one. Its only step runs a command in the network. It returns the output.
func (d *Docker) BuildFrom(image, network string, command ...string) string {
	d.pod.tb.Helper()
	step := JSON(command)
	source, err := archive(nil, map[string]string{"Dockerfile": "FROM " + image + "\nRUN " + step + "\n"})
	if err != nil {
		d.pod.tb.Fatalf("the context of a build: %v", err)
	}
	return d.stream("/build", url.Values{"nocache": {"1"}, "networkmode": {network}}, source)
}

// post posts a value. A failure ends the test.
func (d *Docker) post(path string, value any) []byte {
	d.pod.tb.Helper()
	body, err := json.Marshal(value)
	if err != nil {
		d.pod.tb.Fatalf("docker: %v", err)
	}
	answer, err := d.call(http.MethodPost, path, bytes.NewReader(body))
	if err != nil {
		d.pod.tb.Fatalf("docker: %v", err)
	}
	return answer
}

// stream posts an archive, and returns the text of the answer, which comes in pieces. A failure ends the test.
func (d *Docker) stream(path string, query url.Values, body io.Reader) string {
	d.pod.tb.Helper()
	answer, err := d.call(http.MethodPost, path+"?"+query.Encode(), body)
	var text strings.Builder
	for pieces := json.NewDecoder(bytes.NewReader(answer)); err == nil; {
		var piece struct{ Stream, Error string }
		if err = pieces.Decode(&piece); piece.Error != "" {
			err = errors.New(piece.Error)
		}
		text.WriteString(piece.Stream)
	}
	if !errors.Is(err, io.EOF) {
		d.pod.tb.Fatalf("docker %s: %v\n%s", path, err, text.String())
	}
	return text.String()
}

func (d *Docker) decode(answer []byte, into any) {
	d.pod.tb.Helper()
	if err := json.Unmarshal(answer, into); err != nil {
		d.pod.tb.Fatalf("docker answered %q: %v", answer, err)
	}
}

// call makes a request of the API, in dockerd's own version of it.
func (d *Docker) call(method, path string, body io.Reader) ([]byte, error) {
	req, err := http.NewRequestWithContext(context.Background(), method, "http://docker"+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if strings.Contains(path, "?") {
		req.Header.Set("Content-Type", "application/x-tar")
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= http.StatusBadRequest {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	return answer, err
}

// archive makes a tar archive of programs, by their paths on this machine, and of texts.
func archive(programs, texts map[string]string) (io.Reader, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(name string, data []byte, mode int64) error {
		header := tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(data)), Mode: mode}
		if err := w.WriteHeader(&header); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	}
	for name, path := range programs {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if err := add(name, data, 0o755); err != nil {
			return nil, err
		}
	}
	for name, text := range texts {
		if err := add(name, []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	return &b, w.Close()
}
