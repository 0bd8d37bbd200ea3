package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// benchAdd measures whole processes of the plugins, started one after the other as a runtime starts a chain.
func benchAdd(b *bench) {
	pods, starts := 40, 200
	if b.short {
		pods, starts = 6, 20
	}
	n := b.newNode()
	n.StartDaemon()
	b.progress("ADD and DEL of %d pods", pods)
	backends := []string{"iptables", "nftables"}
	took := map[string][]float64{}
	for i := range pods * len(backends) {
		backend := backends[i%len(backends)]
		bridge, ours := b.addOnce(n, fmt.Sprint("pod", i), backend)
		if i < len(backends) {
			continue // warm-up: creates the bridge and fills the page cache
		}
		took["bridge"] = append(took["bridge"], bridge)
		took["bridge before "+backend] = append(took["bridge before "+backend], bridge)
		took[backend] = append(took[backend], ours)
	}
	for _, backend := range backends {
		ours, theirs := took[backend], took["bridge before "+backend]
		b.add(measured("add", "ADD with "+backend+", relative to bridge", median(ours)/median(theirs), "").
			atMost(0.5).
			beside("sluice", median(ours), "ms").beside("minimum", slices.Min(ours), "ms").
			beside("bridge", median(theirs), "ms").beside("minimum", slices.Min(theirs), "ms"))
	}
	b.addPlugin(n, starts)
	b.addWall(pods)
}

// addPlugin measures the size of the plugin and the time of a start in which it only reports its versions.
func (b *bench) addPlugin(n *testbed.Node, runs int) {
	path := filepath.Join(b.bin, "sluice")
	info, err := os.Stat(path)
	b.tb.must(err, "the plugin")
	b.add(measured("add", "size of the stripped plugin", float64(info.Size())/(1<<20), "MiB"))
	var took, nothing []float64
	for range runs {
		_, t := b.runPlugin(n, path, "VERSION", nil, []byte(`{"cniVersion":"1.0.0"}`))
		took = append(took, t)
		_, t = b.runPlugin(n, "true", "", nil, nil)
		nothing = append(nothing, t)
	}
	b.add(measured("add", "run of the plugin for VERSION", median(took), "ms").
		beside("minimum", slices.Min(took), "ms").beside("/bin/true", median(nothing), "ms"))
}

// addOnce adds and deletes a pod. It returns the duration of each plugin's ADD in ms.
func (b *bench) addOnce(n *testbed.Node, name, backend string) (bridge, ours float64) {
	b.tb.within(func() {
		pod := n.NewPod(name)
		first, second := b.chain(n, backend)
		call := func(plugin, verb string, conf map[string]any) (out []byte, ms float64) {
			stdin, err := json.Marshal(conf)
			b.tb.must(err, "configuration")
			return b.runPlugin(n, plugin, verb, pod, stdin)
		}
		bridgePlugin, ourPlugin := filepath.Join(testbed.CNIPlugins, "bridge"), filepath.Join(b.bin, "sluice")
		out, ms := call(bridgePlugin, "ADD", first)
		bridge = ms
		second["prevResult"] = json.RawMessage(out)
		_, ours = call(ourPlugin, "ADD", second)
		call(ourPlugin, "DEL", second)
		first["prevResult"] = json.RawMessage(out)
		call(bridgePlugin, "DEL", first)
	})
	return bridge, ours
}

// chain returns the configuration of the two plugins as libcni passes it to them.
func (b *bench) chain(n *testbed.Node, backend string) (bridge, ours map[string]any) {
	list := n.Conflist()
	confs := make([]map[string]any, len(list.Plugins))
	for i, p := range list.Plugins {
		b.tb.must(json.Unmarshal(p.Bytes, &confs[i]), "conflist")
		maps.Copy(confs[i], map[string]any{"cniVersion": list.CNIVersion, "name": list.Name})
	}
	confs[1]["backend"] = backend
	return confs[0], confs[1]
}

// runPlugin runs a plugin on the node. It returns the plugin's output, and the time from before exec to its end in ms.
func (b *bench) runPlugin(n *testbed.Node, path, verb string, pod *testbed.Pod, stdin []byte) (out []byte, ms float64) {
	return b.timed(b.plugin(path, verb, pod, stdin), n.Do)
}

// plugin returns the command that runs a plugin as a runtime does.
func (b *bench) plugin(path, verb string, pod *testbed.Pod, stdin []byte) *exec.Cmd {
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_PATH="+testbed.CNIPlugins)
	if pod != nil {
		cmd.Env = append(cmd.Env, "CNI_CONTAINERID="+pod.ID, "CNI_NETNS="+pod.Path(), "CNI_IFNAME=eth0",
			"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME="+pod.Name()+";K8S_POD_UID="+pod.UID())
	}
	cmd.Stdin = bytes.NewReader(stdin)
	return cmd
}

// timed runs a command on the thread that do chooses.
func (b *bench) timed(cmd *exec.Cmd, do func(func() error) error) (out []byte, ms float64) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var took time.Duration
	err := do(func() error {
		start := time.Now()
		defer func() { took = time.Since(start) }()
		return cmd.Run()
	})
	if err != nil {
		b.tb.Fatalf("%s: %v\n%s%s", cmd, err, stdout.String(), stderr.String())
	}
	return stdout.Bytes(), float64(took) / 1e6
}

// addWall measures the part of the wall in the time of an ADD. A seccomp filter refuses nftables to the plugin of
// every second pod, as a kernel without nftables does, and the tools of iptables are replaced by /bin/true: the ADDs
// differ by the wall only. Without a daemon each pod is captured provisionally, and nothing verifies its rules.
func (b *bench) addWall(pods int) {
	n := b.newNode()
	b.progress("ADD of %d pods with the wall, and of %d without", pods, pods)
	tools := filepath.Join(n.Dir, "tools")
	b.tb.must(os.Mkdir(tools, 0o755), "tools")
	for _, name := range []string{"iptables-restore", "ip6tables-restore"} {
		b.tb.must(os.Symlink("/bin/true", filepath.Join(tools, name)), "tools")
	}
	var took [2][]float64
	for i := range 2 * pods {
		refused := []uint32{walled: unix.NETLINK_GENERIC, unwalled: unix.NETLINK_NETFILTER}[i%2]
		ms := b.addRefusing(n, fmt.Sprint("pod", i), tools, refused)
		if i >= 2 { // the first ones are for warm-up
			took[i%2] = append(took[i%2], ms)
		}
	}
	b.add(measured("add", "ADD: the part of the wall", median(took[walled])-median(took[unwalled]), "ms").atMost(5).
		beside("with", median(took[walled]), "ms").beside("without", median(took[unwalled]), "ms").
		beside("difference of the minima", slices.Min(took[walled])-slices.Min(took[unwalled]), "ms"))
}

// addRefusing adds a pod while the kernel refuses netlink sockets of one protocol. It returns the duration of sluice's
// ADD in ms. It fails unless the pod has a wall exactly if nftables is not refused.
func (b *bench) addRefusing(n *testbed.Node, name, tools string, protocol uint32) (ms float64) {
	b.tb.within(func() {
		pod := n.NewPod(name)
		first, second := b.chain(n, "iptables")
		stdin := func(conf map[string]any) []byte {
			data, err := json.Marshal(conf)
			b.tb.must(err, "configuration")
			return data
		}
		bridgePlugin, ourPlugin := filepath.Join(testbed.CNIPlugins, "bridge"), filepath.Join(b.bin, "sluice")
		out, _ := b.runPlugin(n, bridgePlugin, "ADD", pod, stdin(first))
		second["prevResult"] = json.RawMessage(out)
		add := b.plugin(ourPlugin, "ADD", pod, stdin(second))
		add.Env = append(add.Env, "PATH="+tools)
		_, ms = b.timed(add, func(f func() error) error { return refusing(protocol, n.Host, f) })
		for _, r := range n.Records() {
			has := r.Installed != nil && r.Installed.Wall == ruleset.WallFull
			if r.ContainerID == pod.ID && has != (protocol != unix.NETLINK_NETFILTER) {
				b.tb.Fatalf("%s: the wall is %q", pod, r.Installed.Wall)
			}
		}
		del := b.plugin(ourPlugin, "DEL", pod, stdin(second))
		del.Env = append(del.Env, "PATH="+tools)
		b.timed(del, n.Do)
		first["prevResult"] = json.RawMessage(out)
		b.runPlugin(n, bridgePlugin, "DEL", pod, stdin(first))
	})
	return ms
}
