package trust

import (
	"slices"
	"testing"
	"time"
)

// rounds is the number of containers of each kind.
const rounds = 40

// BenchmarkContainerStart measures the time from the creation of a container to its start: go test -bench . -run '^$'
// -benchtime 1x. The budget of a wanted container is 15 ms more than without a daemon.
func BenchmarkContainerStart(b *testing.B) {
	c := newContainerd(b)
	c.prepare()
	other, wanted := c.newPod("other"), c.newPod("wanted").want()
	kinds := []struct {
		name  string
		pod   *pod
		image string
	}{{"other", other, withStore}, {"wanted", wanted, withStore}, {"wanted-without-store", wanted, withoutStore}}
	for b.Loop() {
		without := median(other, withStore)
		c.newDaemon()
		b.ReportMetric(without.Seconds()*1e3, "ms/without-daemon")
		times := make(map[string][]time.Duration)
		for range rounds { // in turn, so that a busy machine slows all alike
			for _, k := range kinds {
				times[k.name] = append(times[k.name], k.pod.timeOf(k.image))
			}
		}
		for _, k := range kinds {
			slices.Sort(times[k.name])
			b.ReportMetric(times[k.name][rounds/2].Seconds()*1e3, "ms/"+k.name)
		}
	}
}

// median is the median time of containers of one kind.
func median(p *pod, image string) time.Duration {
	var times []time.Duration
	for range rounds {
		times = append(times, p.timeOf(image))
	}
	slices.Sort(times)
	return times[rounds/2]
}

// timeOf is the time that a container takes to start.
func (p *pod) timeOf(image string) time.Duration {
	p.c.t.Helper()
	start := time.Now()
	container := p.run("app", image)
	took := time.Since(start)
	container.remove()
	return took
}
