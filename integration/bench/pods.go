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
	count, idle, restarts := 250, 10*time.Second, 5
	if b.short {
		count, idle, restarts = 20, 2*time.Second, 2
	}
	n := b.newNode()
	d := n.StartDaemon()
	b.progress("%d pods", count)
	pods := b.addMany(n, count)
	figureOf := func(name string, value float64, unit string) result {
		return measured("pods", fmt.Sprintf("%d pods: %s", count, name), value, unit)
	}

	time.Sleep(3 * time.Second) // the daemon finishes the work that the ADDs have caused
	down := b.cpu(d.Program, idle)
	proxy := b.startConnectproxy(n)
	time.Sleep(time.Second)
	up := b.cpu(d.Program, idle)
	b.add(figureOf("memory", b.rss(d.Program)/(1<<20), "MiB").atMost(64))
	b.add(figureOf("idle CPU, upstream up", up, "% of a core").atMost(0.5))
	b.add(figureOf("idle CPU, upstream down", down, "% of a core").atMost(0.5))
	proxy.Kill()

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

// addMany creates pods whose netns have no link, and runs the plugin's ADD for each.
func (b *bench) addMany(n *testbed.Node, count int) []*testbed.Pod {
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "pods", "type": "sluice",
		"agentSocket": n.AgentSocket(), "stateDir": n.StateDir(),
		"prevResult": map[string]any{"cniVersion": "1.0.0", "ips": []map[string]string{{"address": "10.88.0.200/16"}}},
	})
	b.tb.must(err, "configuration")
	pods := make([]*testbed.Pod, count)
	var wg sync.WaitGroup
	todo := make(chan int)
	for range 4 {
		wg.Go(func() {
			for i := range todo {
				pods[i] = n.NewPod(fmt.Sprint("pod", i))
				b.runPlugin(n, filepath.Join(b.bin, "sluice"), "ADD", pods[i], conf)
			}
		})
	}
	for i := range count {
		todo <- i
	}
	close(todo)
	wg.Wait()
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

// cpu measures for a duration the share of one core that a program uses, in percent.
func (b *bench) cpu(p *testbed.Program, d time.Duration) float64 {
	b.progress("idle for %s", d)
	before, start := b.ticks(p), time.Now()
	time.Sleep(d)
	const hertz = 100 // USER_HZ
	return 100 * (b.ticks(p) - before) / hertz / time.Since(start).Seconds()
}

// ticks returns the CPU time of a program in clock ticks: utime and stime of proc(5).
func (b *bench) ticks(p *testbed.Program) float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid()))
	b.tb.must(err, "CPU time")
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest) // begins with the third field, state
	if len(fields) < 13 {
		b.tb.Fatalf("/proc/%d/stat has too few fields: %s", p.Pid(), data)
	}
	utime, _ := strconv.Atoi(fields[11])
	stime, _ := strconv.Atoi(fields[12])
	return float64(utime + stime)
}
