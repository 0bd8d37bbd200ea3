package runner

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// Buildkit is a buildkitd that is a container of a pod.
type Buildkit struct {
	tb      testbed.TB
	address string
}

// configuration is that of buildkitd. Steps of builds have a network of their own, by CNI, unless they ask for that of
// buildkitd.
const configuration = `root = %[1]q
insecure-entitlements = ["network.host"]
[grpc]
  address = [%[2]q]
[worker.containerd]
  enabled = false
[worker.oci]
  snapshotter = "overlayfs"
  defaultCgroupParent = %[3]q
  networkMode = "cni"
  cniConfigPath = %[4]q
  cniBinaryPath = %[5]q
`

// StartBuildkit starts a buildkitd as a container of the pod.
func (s *Scene) StartBuildkit(p *testbed.Pod) *Buildkit {
	s.tb.Helper()
	dir := filepath.Join(p.DockerDir(), "buildkit")
	s.must(os.MkdirAll(dir, 0o755))
	b := &Buildkit{s.tb, "unix://" + filepath.Join(dir, "buildkit.sock")}
	network, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "buildkit", "type": "bridge", "bridge": "buildkit0", "isGateway": true,
		"ipMasq": true, "ipam": map[string]any{
			"type": "host-local", "dataDir": filepath.Join(dir, "ipam"), "subnet": "172.19.0.0/16",
			"routes": []map[string]string{{"dst": "0.0.0.0/0"}},
		},
	})
	s.must(err)
	cni, toml := filepath.Join(dir, "cni.json"), filepath.Join(dir, "buildkitd.toml")
	s.must(os.WriteFile(cni, network, 0o600))
	c := s.newContainer(p, testbed.Tool(s.tb, "buildkitd"), "--config", toml)
	s.must(os.WriteFile(toml, fmt.Appendf(nil, configuration,
		filepath.Join(dir, "root"), b.address, c.Spec.Linux.CgroupsPath, cni, testbed.CNIPlugins), 0o600))
	c.Bind(testbed.Tool(s.tb, "buildkitd"), testbed.Tool(s.tb, "buildkitd"))
	p.PrepareBridges()
	s.runtime.Start(c, p.UID())
	testbed.Eventually(s.tb, "buildkitd answers", func() bool {
		return b.Command("debug", "workers").Run() == nil
	})
	return b
}

// Command is a command of BuildKit's client.
func (b *Buildkit) Command(args ...string) *exec.Cmd {
	b.tb.Helper()
	return exec.Command(testbed.Tool(b.tb, "buildctl"), append([]string{"--addr", b.address}, args...)...)
}
