package agent

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the figures of Status for Prometheus, read when it asks.
type Metrics struct{ Agent *Agent }

var (
	metricReady = prometheus.NewDesc("sluice_upstream_ready", "1 while the upstream is there, 0 while it is late.", nil, nil)
	metricCount = prometheus.NewDesc("sluice_attachments", "Attachments by state.", []string{"state"}, nil)
	metricWait  = prometheus.NewDesc("sluice_waiting_connections", "Captured connections that wait for the upstream.", nil, nil)
	metricOpen  = prometheus.NewDesc("sluice_open_connections", "Captured connections that are being relayed.", nil, nil)
)

// Describe implements prometheus.Collector.
func (Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{metricReady, metricCount, metricWait, metricOpen} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m Metrics) Collect(ch chan<- prometheus.Metric) {
	s := m.Agent.Status()
	ready, waiting, open := 0, 0, 0
	if s.Upstream.Ready {
		ready = 1
	}
	states := map[string]int{}
	for _, a := range s.Attachments {
		states[string(a.State)]++
		waiting += a.Waiting
		open += a.Open
	}
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	gauge(metricReady, ready)
	for state, n := range states {
		gauge(metricCount, n, state)
	}
	gauge(metricWait, waiting)
	gauge(metricOpen, open)
}
