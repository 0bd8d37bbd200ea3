package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-cni/sluice/plugin/attach"
)

// Metrics are the figures of Status for Prometheus, read when it asks.
type Metrics struct{ Agent *Agent }

var (
	metricReady = prometheus.NewDesc("sluice_upstream_ready", "1 while the upstream is there, 0 while it is late.", nil, nil)
	metricCount = prometheus.NewDesc("sluice_attachments", "Attachments by state.", []string{"state"}, nil)
	metricWait  = prometheus.NewDesc("sluice_waiting_connections", "Captured connections that wait for the upstream.", nil, nil)
	metricOpen  = prometheus.NewDesc("sluice_open_connections", "Captured connections that are open, through the upstream or direct.", nil, nil)

	metricExpired = prometheus.NewDesc("sluice_expired_connections_total", "Captured connections that were reset because they had waited too long for the upstream.", nil, nil)
	metricDirect  = prometheus.NewDesc("sluice_direct_connections_total", "Captured connections that went to their destinations without the upstream, because they had waited too long for it.", nil, nil)

	metricPodWait   = prometheus.NewDesc("sluice_pod_waiting_connections", "Captured connections of one pod that wait for the upstream.", []string{"pod"}, nil)
	metricProxies   = prometheus.NewDesc("sluice_proxies", "Connected proxies that take sockets, by whether they answer.", []string{"state"}, nil)
	metricProxyPods = prometheus.NewDesc("sluice_proxy_pods", "Pods whose sockets a proxy has, over the proxies of one name.", []string{"proxy"}, nil)
)

// Describe implements prometheus.Collector.
func (Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{metricExpired, metricDirect, metricReady, metricCount, metricWait, metricOpen, metricPodWait, metricProxies, metricProxyPods} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m Metrics) Collect(ch chan<- prometheus.Metric) {
	up := m.Agent.upstream.Status()
	ready, waiting, open := 0, 0, 0
	if up.Ready {
		ready = 1
	}
	states, pods := map[string]int{}, map[string]int{}
	for _, v := range m.Agent.views() {
		a := v.status()
		states[string(a.State)]++
		if a.State == attach.Captured {
			pods[a.Pod] += a.Waiting
		}
		waiting += a.Waiting
		if len(up.Proxies) == 0 { // else they say it, and to find it out takes milliseconds for each pod
			n, _ := v.open()
			open += n
		}
	}
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	gauges := func(d *prometheus.Desc, values map[string]int) {
		for label, v := range values {
			gauge(d, v, label)
		}
	}
	proxies, held := map[string]int{}, map[string]int{}
	for _, p := range up.Proxies {
		open += p.Connections
		state := "answers"
		if p.Hangs {
			state = "hangs"
		}
		proxies[state]++
		held[p.Name] += p.Pods
	}
	gauge(metricReady, ready)
	gauges(metricCount, states)
	gauges(metricPodWait, pods)
	gauges(metricProxies, proxies)
	gauges(metricProxyPods, held)
	gauge(metricWait, waiting)
	gauge(metricOpen, open)
	ch <- prometheus.MustNewConstMetric(metricExpired, prometheus.CounterValue, float64(m.Agent.expired.Load()))
	ch <- prometheus.MustNewConstMetric(metricDirect, prometheus.CounterValue, float64(m.Agent.direct.Load()))
}
