package trust

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
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/sluice-cni/sluice/integration/cluster/images"
	"github.com/sluice-cni/sluice/integration/cluster/programs"
)

const containerdConfig = `version = 3

[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = 'localhost/pause:node'

[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false

[plugins.'io.containerd.nri.v1.nri']
  socket_path = '%[1]s/nri.sock'
  plugin_path = '%[1]s/none'
  plugin_config_path = '%[1]s/none'
`

// containerd is a containerd with its CRI.
type containerd struct {
	t        testing.TB
	dir      string
	programs map[string]string
	cmd      *exec.Cmd
	conn     *grpc.ClientConn
	cri      cri.RuntimeServiceClient
	images   cri.ImageServiceClient
	log      *os.File
}

// build builds the programs once.
var build = sync.OnceValues(func() (map[string]string, error) {
	source, err := filepath.Abs("..")
	if err != nil {
		return nil, err
	}
	return programs.Build(context.Background(), source, filepath.Join(source, "../../bin/cluster"), os.Stderr)
})

// newContainerd starts a containerd that ends with the test.
func newContainerd(t testing.TB) *containerd {
	t.Helper()
	paths, err := build()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(os.Getenv(folderVariable), "c") //nolint:usetesting // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	c := &containerd{t: t, dir: dir, programs: paths}
	for _, folder := range []string{os.Getenv(folderVariable), dir} { // for root of a user namespace
		c.must(os.Chmod(folder, 0o711))
	}
	c.must(os.WriteFile(filepath.Join(dir, "config.toml"), fmt.Appendf(nil, containerdConfig, dir), 0o600))
	c.log, err = os.Create(filepath.Join(dir, "containerd.log"))
	c.must(err)
	c.conn, err = grpc.NewClient("unix://"+dir+"/containerd.sock",
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	c.must(err)
	c.cri, c.images = cri.NewRuntimeServiceClient(c.conn), cri.NewImageServiceClient(c.conn)
	c.start()
	t.Cleanup(c.close)
	c.load(images.Pause())
	c.load(images.Tools())
	c.load(images.Sluice())
	return c
}

func (c *containerd) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// start starts the process and waits until the CRI responds.
func (c *containerd) start() {
	c.t.Helper()
	c.cmd = exec.Command(c.programs["containerd"], "--config", c.dir+"/config.toml", "--root", c.dir+"/root",
		"--state", c.dir+"/state", "--address", c.dir+"/containerd.sock")
	c.cmd.Env = append(os.Environ(),
		"PATH="+filepath.Dir(c.programs["containerd"])+":"+os.Getenv("PATH")+":/usr/sbin:/sbin")
	c.cmd.Stdout, c.cmd.Stderr = c.log, c.log
	c.must(c.cmd.Start())
	c.eventually("containerd responds", func() bool {
		_, err := c.cri.Version(c.t.Context(), &cri.VersionRequest{})
		return err == nil
	})
}

func (c *containerd) stop() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait() // killed
}

// close removes the pods and ends the process.
func (c *containerd) close() {
	ctx := context.Background()
	if pods, err := c.cri.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{}); err == nil {
		for _, p := range pods.Items {
			// Whatever remains ends with the namespaces.
			_, _ = c.cri.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.Id})
			_, _ = c.cri.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.Id})
		}
	}
	c.stop()
	_ = c.conn.Close()
	if c.t.Failed() {
		log, _ := os.ReadFile(c.log.Name()) // empty: the test has failed anyway
		c.t.Logf("containerd:\n%s", tail(string(log), 40))
	}
}

func tail(text string, lines int) string {
	all := strings.SplitAfter(text, "\n")
	return strings.Join(all[max(0, len(all)-lines):], "")
}

func (c *containerd) load(i images.Image, err error) {
	c.t.Helper()
	c.must(err)
	tar, err := i.Bytes()
	c.must(err)
	cmd := exec.Command(c.programs["ctr"], "--address", c.dir+"/containerd.sock", "-n", "k8s.io",
		"images", "import", "-")
	cmd.Stdin = bytes.NewReader(tar)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("importing an image: %v\n%s", err, out)
	}
}

// pod is a sandbox in the network of the test.
type pod struct {
	c      *containerd
	id     string
	config *cri.PodSandboxConfig
}

func (p *pod) uid() string { return p.config.Metadata.Uid }

func (c *containerd) newPod(name string, adjust ...func(*cri.NamespaceOption)) *pod {
	c.t.Helper()
	config := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Uid: name, Namespace: "test"},
		Linux: &cri.LinuxPodSandboxConfig{
			CgroupParent: "/" + filepath.Base(os.Getenv(folderVariable)),
			SecurityContext: &cri.LinuxSandboxSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE},
			},
		},
	}
	for _, f := range adjust {
		f(config.Linux.SecurityContext.NamespaceOptions)
	}
	response, err := c.cri.RunPodSandbox(c.t.Context(), &cri.RunPodSandboxRequest{Config: config})
	c.must(err)
	return &pod{c: c, id: response.PodSandboxId, config: config}
}

// container is a container of a pod.
type container struct {
	pod *pod
	id  string
}

// create creates a container that sleeps.
func (p *pod) create(name, image string, adjust ...func(*cri.ContainerConfig)) *container {
	p.c.t.Helper()
	config := &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: image},
		Command: []string{"/bin/sleep", "100000"},
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: p.config.Linux.SecurityContext.NamespaceOptions,
		}},
	}
	for _, f := range adjust {
		f(config)
	}
	response, err := p.c.cri.CreateContainer(p.c.t.Context(), &cri.CreateContainerRequest{
		PodSandboxId: p.id, Config: config, SandboxConfig: p.config,
	})
	p.c.must(err)
	return &container{pod: p, id: response.ContainerId}
}

// run creates and starts a container.
func (p *pod) run(name, image string, adjust ...func(*cri.ContainerConfig)) *container {
	p.c.t.Helper()
	c := p.create(name, image, adjust...)
	c.start()
	return c
}

func (c *container) start() {
	c.pod.c.t.Helper()
	_, err := c.pod.c.cri.StartContainer(c.pod.c.t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
	c.pod.c.must(err)
}

// remove stops and removes a container.
func (c *container) remove() {
	c.pod.c.t.Helper()
	_, err := c.pod.c.cri.StopContainer(c.pod.c.t.Context(), &cri.StopContainerRequest{ContainerId: c.id})
	c.pod.c.must(err)
	_, err = c.pod.c.cri.RemoveContainer(c.pod.c.t.Context(), &cri.RemoveContainerRequest{ContainerId: c.id})
	c.pod.c.must(err)
}

// sh runs a command in a container, as `kubectl exec` does, and returns its output.
func (c *container) sh(script string) string {
	c.pod.c.t.Helper()
	response, err := c.pod.c.cri.ExecSync(c.pod.c.t.Context(), &cri.ExecSyncRequest{
		ContainerId: c.id, Cmd: []string{"/bin/sh", "-c", script},
	})
	c.pod.c.must(err)
	if response.ExitCode != 0 {
		c.pod.c.t.Errorf("%s: exit code %d: %s", script, response.ExitCode, response.Stderr)
	}
	return string(response.Stdout)
}

// pid is the PID of a container's first process.
func (c *container) pid() int {
	c.pod.c.t.Helper()
	response, err := c.pod.c.cri.ContainerStatus(c.pod.c.t.Context(), &cri.ContainerStatusRequest{
		ContainerId: c.id, Verbose: true,
	})
	c.pod.c.must(err)
	var info struct {
		PID int `json:"pid"`
	}
	c.pod.c.must(json.Unmarshal([]byte(response.Info["info"]), &info))
	return info.PID
}

// spec is the config.json that runc gets.
func (c *container) spec() string {
	c.pod.c.t.Helper()
	tasks := filepath.Join(c.pod.c.dir, "state/io.containerd.runtime.v2.task/k8s.io")
	data, err := os.ReadFile(filepath.Join(tasks, c.id, "config.json"))
	c.pod.c.must(err)
	return string(data)
}

// eventually waits up to a minute for a condition.
func (c *containerd) eventually(wanted string, cond func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(time.Minute); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("timed out waiting for: %s", wanted)
		}
	}
}
