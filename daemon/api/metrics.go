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
	pluginContested = describe("sluice_plugin_contested",
		"1 while another program keeps undoing the installation of the plugin, 0 while none does.")
	pluginUndone = describe("sluice_plugin_undone_total",
		"How many times another program had undone the installation of the plugin.")
	uncapturedPods = describe("sluice_uncaptured_pods",
		"Running pods that opted in and are not captured.")
	enrolledPods = describe("sluice_enrolled_pods_total",
		"Pods that were captured while they ran, because they had started without the plugin.")
	podWaitingConnections = describe("sluice_pod_waiting_connections",
		"Captured connections of one pod that wait for the upstream.", "pod")
	containers = describe("sluice_containers",
		"Running containers that are to trust the proxy's CA, by how far they do: trusted, files-only or unknown.",
		"trust")
	nestedContainers = describe("sluice_nested_containers",
		"Running containers that a Docker in a pod has started, in pods with the policy inspect for them, by how far "+
			"they trust the proxy's CA: trusted, files-only or unknown.",
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
		stoppedPackets, restoredRules, pluginContested, pluginUndone, uncapturedPods, enrolledPods,
		podWaitingConnections, containers, nestedContainers, runtimeConnected, proxies, proxyPods,
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
		value := 0.0
		if v {
			value = 1
		}
		send(d, prometheus.GaugeValue, value)
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
	gauges(nestedContainers, sums.nested)
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
	send(uncapturedPods, prometheus.GaugeValue, float64(len(m.API.Agent.Uncaptured())))
	send(enrolledPods, prometheus.CounterValue, float64(m.API.Agent.Enrolled()))
	if k := m.API.Keeper; k != nil {
		flag(pluginContested, !k.Contest().IsZero())
		send(pluginUndone, prometheus.CounterValue, float64(k.Undone()))
	}
}

// sums are the gauges' values.
type sums struct {
	waiting, open                            int
	states, waitingByPod, proxies, proxyPods map[string]int
	containers, nested                       map[string]int
}

func (m Metrics) sum(up attach.UpstreamStatus) sums {
	s := sums{
		states: map[string]int{}, waitingByPod: map[string]int{},
		proxies: map[string]int{}, proxyPods: map[string]int{}, containers: map[string]int{}, nested: map[string]int{},
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
			for _, c := range a.Nested {
				s.nested[c.Trust]++
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

// ListenMetrics listens at address, and returns the function that serves /metrics there until its context ends. It
// fails before the daemon takes over from another one, and the function does not fail because of the address: capture
// must not depend on metrics. A port that is in use is tried again without limit, since a daemon that hangs does not
// free it.
func (a *API) ListenMetrics(address string) (serve func(context.Context) error, err error) {
	l, err := net.Listen("tcp", address)
	if err != nil && !errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("metricsAddress: %w", err)
	}
	return func(ctx context.Context) error {
		if l == nil {
			if l = a.awaitPort(ctx, address); l == nil {
				return nil
			}
		}
		return a.serveMetrics(ctx, l)
	}, nil
}

// awaitPort listens at address as soon as it can. It returns nil when ctx ends.
func (a *API) awaitPort(ctx context.Context, address string) net.Listener {
	for since, said := time.Now(), false; pause.For(ctx, portRetry) == nil; {
		l, err := net.Listen("tcp", address)
		if err == nil {
			return l
		}
		if !said && time.Since(since) >= portTimeout {
			a.Log.Error("metrics are not served; trying again", "metricsAddress", address, "err", err)
			said = true
		}
	}
	return nil
}

func (a *API) serveMetrics(ctx context.Context, l net.Listener) error {
	r := prometheus.NewRegistry()
	r.MustRegister(Metrics{API: a}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
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
