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

// benchPods is a full node that has nothing to do.
func benchPods(b *bench) {
	count, idle, restarts := 250, 10*time.Second, 5
	if b.short {
		count, idle, restarts = 20, 2*time.Second, 2
	}
	n := b.newNode()
	d := n.StartDaemon()
	b.progress("%d pods", count)
	pods := b.addMany(n, count)
	name := func(what string) string { return fmt.Sprintf("%d pods: %s", count, what) }

	time.Sleep(3 * time.Second) // what ADD has set going has ended
	down := b.cpu(d.Program, idle)
	proxy := b.startConnectproxy(n)
	time.Sleep(time.Second)
	up := b.cpu(d.Program, idle)
	b.add(result{Part: "pods", figure: figure{name("memory"), b.rss(d.Program) / (1 << 20), "MiB"}}.atMost(64))
	b.add(result{Part: "pods", figure: figure{name("idle CPU, upstream up"), up, "% of a core"}}.atMost(0.5))
	b.add(result{Part: "pods", figure: figure{name("idle CPU, upstream down"), down, "% of a core"}}.atMost(0.5))
	proxy.Kill()

	var took []float64
	for range restarts {
		d.Kill()
		start := time.Now()
		d = n.StartDaemon() // its socket answers when every gate is open
		took = append(took, time.Since(start).Seconds())
		b.listening(d, pods)
	}
	b.add(result{Part: "pods", figure: figure{name("killed, started, all listening"), median(took), "s"}}.atMost(1).
		beside("at worst", quantile(took, 1), "s").beside("memory then", b.rss(d.Program)/(1<<20), "MiB"))
}

// addMany makes netns without a link, and has the plugin capture them.
func (b *bench) addMany(n *testbed.Node, count int) []*testbed.Pod {
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "pods", "type": "sluice", "agentSocket": n.AgentSocket(), "stateDir": n.StateDir(),
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

// listening fails unless the daemon says, and every netns shows, that all gates are open.
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
	listener := fmt.Sprintf(":%04X ", ruleset.OutboundPort)
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

// cpu is the share of one core that a program takes for a while, in percent.
func (b *bench) cpu(p *testbed.Program, d time.Duration) float64 {
	b.progress("idle for %s", d)
	before, start := b.ticks(p), time.Now()
	time.Sleep(d)
	const hertz = 100 // USER_HZ
	return 100 * (b.ticks(p) - before) / hertz / time.Since(start).Seconds()
}

// ticks is the processor time of a program: utime and stime of proc(5).
func (b *bench) ticks(p *testbed.Program) float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid()))
	b.tb.must(err, "processor time")
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest) // from the third on
	if len(fields) < 13 {
		b.tb.Fatalf("%s cannot be read", data)
	}
	utime, _ := strconv.Atoi(fields[11])
	stime, _ := strconv.Atoi(fields[12])
	return float64(utime + stime)
}
