package api

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// Metrics is the status for Prometheus, read at each scrape.
type Metrics struct{ API *API }

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	upstreamReady = describe("sluice_upstream_ready",
		"1 while the upstream is there, 0 while it is late.")
	attachments = describe("sluice_attachments",
		"Attachments by state.", "state")
	waitingConnections = describe("sluice_waiting_connections",
		"Captured connections that wait for the upstream.")
	openConnections = describe("sluice_open_connections",
		"Captured connections that are open, through the upstream or direct.")
	expiredConnections = describe("sluice_expired_connections_total",
		"Captured connections that were reset because they had waited too long for the upstream.")
	directConnections = describe("sluice_direct_connections_total",
		"Captured connections that went to their destinations without the upstream, because they had waited too "+
			"long for it.")
	stoppedPackets = describe("sluice_stopped_packets_total",
		"Packets of captured pods that were stopped. The causes pod, nested and packet name the likely sender of "+
			"those that would have left around the upstream; quic and other were rejected by the configuration.",
		"cause")
	restoredRules = describe("sluice_rules_restored_total",
		"How many times the rules of a pod were not as installed and were restored.")
	podWaitingConnections = describe("sluice_pod_waiting_connections",
		"Captured connections of one pod that wait for the upstream.", "pod")
	containers = describe("sluice_containers",
		"Running containers that are to trust the proxy's CA, by how far they do: trusted, files-only or unknown.",
		"trust")
	runtimeConnected = describe("sluice_runtime_connected",
		"1 while the container runtime asks sluice about new containers (NRI), 0 while they start without the proxy's "+
			"CA. Absent as long as there is no CA.")
	proxies = describe("sluice_proxies",
		"Connected proxies that take sockets, by whether they answer.", "state")
	proxyPods = describe("sluice_proxy_pods",
		"Pods whose sockets a proxy has, summed up over the proxies of one name.", "proxy")
)

// Describe implements prometheus.Collector.
func (Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		upstreamReady, attachments, waitingConnections, openConnections, expiredConnections, directConnections,
		stoppedPackets, restoredRules, podWaitingConnections, containers, runtimeConnected, proxies, proxyPods,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m Metrics) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	gauges := func(d *prometheus.Desc, values map[string]int) {
		for label, v := range values {
			send(d, prometheus.GaugeValue, float64(v), label)
		}
	}
	flag := func(d *prometheus.Desc, v bool) {
		values := map[bool]float64{true: 1}
		send(d, prometheus.GaugeValue, values[v])
	}
	up := m.API.Upstream.Status()
	sums := m.sum(up)
	flag(upstreamReady, up.Ready)
	if m.API.Runtime != nil {
		if asks, needed := m.API.Runtime(); needed {
			flag(runtimeConnected, asks)
		}
	}
	gauges(attachments, sums.states)
	gauges(podWaitingConnections, sums.waitingByPod)
	gauges(containers, sums.containers)
	gauges(proxies, sums.proxies)
	gauges(proxyPods, sums.proxyPods)
	send(waitingConnections, prometheus.GaugeValue, float64(sums.waiting))
	send(openConnections, prometheus.GaugeValue, float64(sums.open))
	send(expiredConnections, prometheus.CounterValue, float64(m.API.Table.Expired()))
	send(directConnections, prometheus.CounterValue, float64(m.API.Table.Direct()))
	m.API.Agent.Count()
	stopped := m.API.Agent.Stopped()
	for _, cause := range ruleset.Causes {
		send(stoppedPackets, prometheus.CounterValue, float64(stopped[cause]), string(cause))
	}
	send(restoredRules, prometheus.CounterValue, float64(m.API.Agent.Restored()))
}

// sums are the gauges' values.
type sums struct {
	waiting, open                            int
	states, waitingByPod, proxies, proxyPods map[string]int
	containers                               map[string]int
}

func (m Metrics) sum(up attach.UpstreamStatus) sums {
	s := sums{
		states: map[string]int{}, waitingByPod: map[string]int{},
		proxies: map[string]int{}, proxyPods: map[string]int{}, containers: map[string]int{},
	}
	counted := map[string]bool{} // netns of which the containers are counted: a pod may have several attachments
	for _, snapshot := range m.API.Table.Snapshots() {
		a := snapshot.Status()
		if m.API.Trust != nil {
			m.API.Trust(&a)
		}
		if !counted[a.Netns] {
			for _, c := range a.Containers {
				s.containers[c.Trust]++
			}
		}
		counted[a.Netns] = true
		s.states[string(a.State)]++
		if a.State == attach.Captured {
			s.waitingByPod[a.Pod] += a.Waiting
		}
		s.waiting += a.Waiting
		if len(up.Proxies) == 0 { // proxies count their connections; to ask the kernel takes milliseconds for each pod
			s.open += snapshot.Counts().Open
		}
	}
	for _, p := range up.Proxies {
		s.open += p.Connections
		state := "answers"
		if p.Hangs {
			state = "hangs"
		}
		s.proxies[state]++
		s.proxyPods[p.Name] += p.Pods
	}
	return s
}

const (
	// portTimeout is how long a daemon that has handed over needs at most to free its port.
	portTimeout = 5 * time.Second
	// portRetry is the time between attempts to listen on the port.
	portRetry = 50 * time.Millisecond
)

// ServeMetrics serves /metrics at address until ctx ends. A port that is in use is tried again without limit: a daemon
// that hangs does not free it, and capture must not depend on metrics.
func (a *API) ServeMetrics(ctx context.Context, address string) error {
	r := prometheus.NewRegistry()
	r.MustRegister(Metrics{API: a}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	l, err := net.Listen("tcp", address)
	warning := time.AfterFunc(portTimeout, func() {
		a.Log.Error("metrics are not served: the port is in use; trying again", "metricsAddress", address)
	})
	defer warning.Stop()
	for errors.Is(err, unix.EADDRINUSE) {
		if pause.For(ctx, portRetry) != nil {
			return nil
		}
		l, err = net.Listen("tcp", address)
	}
	warning.Stop()
	if err != nil {
		return fmt.Errorf("metricsAddress: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{}))
	s := &http.Server{Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() }) // an interrupted scrape is repeated
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving metrics: %w", err)
	}
	return nil
}
