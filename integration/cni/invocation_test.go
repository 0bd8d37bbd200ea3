package cni

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// call is one run of the plugin's binary, as a runtime runs it.
type call struct {
	node        *testbed.Node
	containerID string
	netns       string
	ifName      string
	args        string
	// conf is the network configuration without prevResult. Its keys are added to those of node.Plugin.
	conf map[string]any
	// prevResult is added to conf unless it is nil.
	prevResult any
	// stdin, unless it is nil, takes the place of the configuration.
	stdin []byte
	// env are more variables of the environment.
	env []string
	// path is put before PATH.
	path string
	// setup is a script that runs first, in a new mount namespace with the plugin.
	setup string
}

// callFor describes a call for a pod. A pod that the chain has not added gets a prevResult with addresses.
func callFor(n *testbed.Node, p *testbed.Pod) *call {
	c := &call{
		node: n, containerID: p.ID, netns: p.Path(), ifName: "eth0",
		args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=" + p.Name() + ";K8S_POD_UID=" + p.UID(),
	}
	if c.prevResult = any(p.Result); p.Result == nil {
		c.prevResult = resultOf("1.0.0", "10.88.0.200/16", "fd00:88::200/64")
	}
	return c
}

// resultOf is a result as of a primary plugin.
func resultOf(version string, addresses ...string) map[string]any {
	ips := []map[string]any{}
	for _, a := range addresses {
		ip := map[string]any{"address": a}
		if strings.HasPrefix(version, "0.") {
			ip["version"] = "4"
			if strings.Contains(a, ":") {
				ip["version"] = "6"
			}
		}
		ips = append(ips, ip)
	}
	return map[string]any{"cniVersion": version, "ips": ips, "dns": map[string]any{}}
}

// command is the run of a verb, to be started on the node.
func (c *call) command(t *testing.T, verb string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(c.node.Binary("sluice"))
	if c.setup != "" {
		script := c.setup + "\nexec \"$0\""
		cmd = exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-euc", script, cmd.Path)
	}
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+c.containerID, "CNI_NETNS="+c.netns,
		"CNI_IFNAME="+c.ifName, "CNI_ARGS="+c.args, "CNI_PATH="+c.node.Binaries())
	cmd.Env = append(cmd.Env, c.env...)
	if c.path != "" {
		cmd.Env = append(cmd.Env, "PATH="+c.path+":"+os.Getenv("PATH"))
	}
	cmd.Stdin = bytes.NewReader(c.input(t))
	return cmd
}

// run returns the output of the plugin. An error is the one that it printed.
func (c *call) run(t *testing.T, verb string) ([]byte, error) {
	t.Helper()
	cmd := c.command(t, verb)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := c.node.Start(cmd); err != nil {
		t.Fatalf("starting the plugin: %v", err)
	}
	err := cmd.Wait()
	if log.Len() > 0 {
		t.Logf("%s: %s", verb, bytes.TrimSpace(log.Bytes()))
	}
	if err == nil {
		return out.Bytes(), nil
	}
	var said types.Error
	if jerr := json.Unmarshal(out.Bytes(), &said); jerr != nil || said.Msg == "" {
		t.Errorf("%s failed (%v) without an error that a runtime can read: %q", verb, err, out.Bytes())
		return nil, err
	}
	return nil, &said
}

func (c *call) input(t *testing.T) []byte {
	t.Helper()
	if c.stdin != nil {
		return c.stdin
	}
	conf := map[string]any{"cniVersion": "1.0.0", "name": "pods"}
	for _, from := range []map[string]any{c.node.Plugin, c.conf} {
		maps.Copy(conf, from)
	}
	if c.prevResult != nil {
		conf["prevResult"] = c.prevResult
	}
	data, err := json.Marshal(conf)
	if err != nil {
		t.Fatalf("configuration: %v", err)
	}
	return data
}

// must is run for a call that succeeds.
func (c *call) must(t *testing.T, verb string) []byte {
	t.Helper()
	out, err := c.run(t, verb)
	if err != nil {
		t.Fatalf("%s: %v", verb, testbed.Describe(err))
	}
	return out
}

func (c call) with(change func(*call)) *call {
	change(&c)
	return &c
}
