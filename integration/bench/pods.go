package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// benchPods measures the daemon on a node with many idle pods: its memory, its CPU time, and its restart.
func benchPods(b *bench) {
	for i, flavour := range testbed.Flavours {
		b.tb.within(func() { b.podsOf(flavour, i == 0) })
	}
}

// podsOf measures the CPU time with pods of one flavour, and the rest if all is true.
func (b *bench) podsOf(flavour testbed.Flavour, all bool) {
	count, settle, idle, restarts := 250, 10*time.Second, time.Minute, 5
	if b.short {
		count, settle, idle, restarts = 20, 3*time.Second, 2*time.Second, 2
	}
	n := b.newNode()
	d := n.StartDaemon()
	b.progress("%d pods, %s", count, flavour.Name)
	pods := b.addMany(n, count, flavour)
	figureOf := func(name string, value float64, unit string) result {
		return measured("pods", fmt.Sprintf("%d pods: %s", count, name), value, unit)
	}

	proxy := b.startConnectproxy(n)
	time.Sleep(settle) // the daemon finishes the work that the ADDs have caused
	atRest := func(name string) {
		b.add(figureOf("idle CPU, "+name, b.cpu(d.Program, idle), "% of a core").atMost(0.5))
	}
	atRest(flavour.Name + ", upstream up")
	if !all {
		return
	}
	b.add(figureOf("memory", b.rss(d.Program)/(1<<20), "MiB").atMost(64))
	proxy.Kill()
	time.Sleep(time.Second)
	atRest(flavour.Name + ", upstream down")

	var took []float64
	for range restarts {
		d.Kill()
		start := time.Now()
		d = n.StartDaemon() // returns when the agent socket answers: then every gate has its listeners
		took = append(took, time.Since(start).Seconds())
		b.listening(d, pods)
	}
	b.add(figureOf("start after kill -9, until all pods have listeners", median(took), "s").atMost(1).
		beside("maximum", quantile(took, 1), "s").beside("memory afterwards", b.rss(d.Program)/(1<<20), "MiB"))
}

// addMany creates pods, each with an interface whose other end is in the pod too, and runs the plugin's ADD for each.
func (b *bench) addMany(n *testbed.Node, count int, flavour testbed.Flavour) []*testbed.Pod {
	const address = "10.88.0.200/16"
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "pods", "type": "sluice",
		"agentSocket": n.AgentSocket(), "stateDir": n.StateDir(), "backend": flavour.Backend,
		"prevResult": map[string]any{"cniVersion": "1.0.0", "ips": []map[string]string{{"address": address}}},
	})
	b.tb.must(err, "configuration")
	pods := make([]*testbed.Pod, count)
	var wg sync.WaitGroup
	todo := make(chan int)
	for range 4 {
		wg.Go(func() {
			for i := range todo {
				p := n.NewPod(fmt.Sprint("pod", i))
				p.IP("link", "add", "eth0", "up", "type", "veth", "peer", "name", "other")
				p.IP("addr", "add", address, "dev", "eth0")
				flavour.Prepare(p)
				pods[i] = p
				b.runPlugin(n, filepath.Join(b.bin, "sluice"), "ADD", pods[i], conf)
			}
		})
	}
	for i := range count {
		todo <- i
	}
	close(todo)
	wg.Wait()
	for _, r := range n.Records() {
		if r.Installed == nil || r.Installed.Backend != flavour.Name {
			b.tb.Fatalf("%s is not captured with %s", r.Attachment, flavour.Name)
		}
	}
	return pods
}

// listening fails unless the daemon reports all pods as captured and every netns has listeners.
func (b *bench) listening(d *testbed.Daemon, pods []*testbed.Pod) {
	captured := 0
	for _, a := range d.Status().Attachments {
		if a.State == attach.Captured && len(a.Notes) == 0 {
			captured++
		}
	}
	if captured != len(pods) {
		b.tb.Fatalf("%d pods are captured after a restart, want %d", captured, len(pods))
	}
	listener := fmt.Sprintf(":%04X ", ruleset.DefaultPorts.Outbound)
	for _, p := range pods {
		b.tb.must(p.Do(func() error {
			for _, family := range []string{"tcp", "tcp6"} {
				data, err := os.ReadFile("/proc/thread-self/net/" + family)
				if err != nil {
					return err
				}
				if !strings.Contains(string(data), listener) {
					return fmt.Errorf("no listener in %s", family)
				}
			}
			return nil
		}), p.String())
	}
}

// cpu measures for a duration the share of one core that a program and the programs that it starts use, in
// percent.
func (b *bench) cpu(p *testbed.Program, d time.Duration) float64 {
	b.progress("idle for %s", d)
	before, start := b.ticks(p), time.Now()
	time.Sleep(d)
	const hertz = 100 // USER_HZ
	return 100 * (b.ticks(p) - before) / hertz / time.Since(start).Seconds()
}

// ticks returns the CPU time of a program in clock ticks: utime, stime, cutime and cstime of proc(5).
func (b *bench) ticks(p *testbed.Program) float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid()))
	b.tb.must(err, "CPU time")
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest) // begins with the third field, state
	if len(fields) < 15 {
		b.tb.Fatalf("/proc/%d/stat has too few fields: %s", p.Pid(), data)
	}
	var sum float64
	for _, f := range fields[11:15] {
		t, err := strconv.Atoi(f)
		b.tb.must(err, "CPU time")
		sum += float64(t)
	}
	return sum
}
