package e2e

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/e2e-framework/klient/k8s/resources"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// These benchmarks compare sluice on a Kubernetes node with its budgets. Each one is a single run: use -benchtime 1x.

const (
	pairs       = 30  // pods of each kind, one after the other
	crowd       = 110 // pods at the same time: kubelet's default limit
	idleTime    = time.Minute
	sleepForDay = "sleep 86400"
)

func mustBench(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkPodStart measures the time from the creation of a pod until it runs, alternately for a pod that is captured
// and for one that is not.
func BenchmarkPodStart(b *testing.B) {
	ctx, c := b.Context(), suite.EnvConf()
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	mustBench(b, err)
	start := func(name string, labels map[string]string) time.Duration {
		options := metav1.ListOptions{FieldSelector: "metadata.name=" + name, ResourceVersion: "0"}
		w, err := k.CoreV1().Pods(namespace).Watch(ctx, options)
		mustBench(b, err)
		defer w.Stop()
		began := time.Now()
		p := newPod(name, namespace, labels, sleepForDay, "")
		mustBench(b, client(c).Create(ctx, p))
		waitForEvent(b, w, func(e watch.Event) bool { return e.Object.(*corev1.Pod).Status.Phase == corev1.PodRunning })
		took := time.Since(began)
		mustBench(b, client(c).Delete(ctx, p))
		waitForEvent(b, w, func(e watch.Event) bool { return e.Type == watch.Deleted })
		return took
	}
	for b.Loop() {
		var captured, plain []time.Duration
		for i := range pairs {
			captured = append(captured, start(fmt.Sprintf("start-captured-%d", i), capture))
			plain = append(plain, start(fmt.Sprintf("start-plain-%d", i), nil))
		}
		slices.Sort(captured)
		slices.Sort(plain)
		b.ReportMetric(captured[pairs/2].Seconds(), "s/captured")
		b.ReportMetric(plain[pairs/2].Seconds(), "s/plain")
		b.ReportMetric(float64(captured[pairs/2])/float64(plain[pairs/2]), "captured/plain")
	}
}

// waitForEvent waits up to a minute for an event of a watch.
func waitForEvent(b *testing.B, w watch.Interface, cond func(watch.Event) bool) {
	b.Helper()
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok || e.Type == watch.Error {
				b.Fatalf("the watch ended: %v", apierrors.FromObject(e.Object))
			}
			if cond(e) {
				return
			}
		case <-time.After(time.Minute):
			b.Fatal("timed out waiting for an event of the watch")
		}
	}
}

// BenchmarkCrowd starts as many pods at the same time as a node runs. It measures the time until all of them run, and
// then the daemon's memory and its API requests while nothing changes.
func BenchmarkCrowd(b *testing.B) {
	ctx, c := b.Context(), suite.EnvConf()
	for b.Loop() {
		began := time.Now()
		for i := range crowd {
			labels := map[string]string{"sluice.dev/capture": "true", "crowd": "yes"}
			p := newPod(fmt.Sprintf("crowd-%d", i), namespace, labels, sleepForDay, "")
			mustBench(b, client(c).Create(ctx, p))
		}
		mustBench(b, within(ctx, 10*time.Minute, "all pods run", func() (bool, error) {
			n, err := countCrowd(ctx, c, func(p corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
			return n == crowd, err
		}))
		b.ReportMetric(time.Since(began).Seconds(), "s/all-running")
		s, err := status(ctx, c)
		mustBench(b, err)
		captured := 0
		for _, a := range s.Attachments {
			if a.State == "captured" {
				captured++
			}
		}
		b.ReportMetric(float64(captured), "captured")
		b.ReportMetric(float64(failedSandboxes(ctx, b, c)), "failed-sandboxes")
		b.ReportMetric(rss(ctx, b, c)/(1<<20), "MiB-RSS")
		countIdleRequests(ctx, b, c)

		pods, err := countCrowd(ctx, c, func(p corev1.Pod) bool { return client(c).Delete(ctx, &p) == nil })
		if err != nil || pods != crowd {
			b.Fatalf("deleted %d of %d: %v", pods, crowd, err)
		}
		mustBench(b, within(ctx, 10*time.Minute, "no pod remains", func() (bool, error) {
			n, err := countCrowd(ctx, c, func(corev1.Pod) bool { return true })
			return n == 0, err
		}))
	}
}

// countCrowd calls cond for each pod of the crowd, and counts the pods for which it returns true.
func countCrowd(ctx context.Context, c *envconf.Config, cond func(corev1.Pod) bool) (n int, err error) {
	var pods corev1.PodList
	err = client(c).WithNamespace(namespace).List(ctx, &pods, resources.WithLabelSelector("crowd=yes"))
	if err != nil {
		return 0, err
	}
	for _, p := range pods.Items {
		if cond(p) {
			n++
		}
	}
	return n, nil
}

func failedSandboxes(ctx context.Context, b *testing.B, c *envconf.Config) (n int) {
	b.Helper()
	var events corev1.EventList
	mustBench(b, client(c).WithNamespace(namespace).List(ctx, &events))
	for _, e := range events.Items {
		if e.Reason == "FailedCreatePodSandBox" {
			b.Log(e.Message)
			n++
		}
	}
	return n
}

func rss(ctx context.Context, b *testing.B, c *envconf.Config) float64 {
	b.Helper()
	text, err := inPod(ctx, c, namespace, "node", "wget", "-q", "-O-", "http://127.0.0.1:15090/metrics")
	mustBench(b, err)
	return metric(b, text, `(?m)^process_resident_memory_bytes (\S+)$`)
}

func metric(b *testing.B, text, pattern string) (sum float64) {
	b.Helper()
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		v, err := strconv.ParseFloat(m[1], 64)
		mustBench(b, err)
		sum += v
	}
	return sum
}

// daemonFlow makes the API server count the requests of the daemon's service account separately.
const daemonFlow = `
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: FlowSchema
metadata: {name: sluice-bench}
spec:
  matchingPrecedence: 100
  priorityLevelConfiguration: {name: workload-high}
  rules:
    - subjects: [{kind: ServiceAccount, serviceAccount: {namespace: sluice-system, name: sluice}}]
      resourceRules: [{apiGroups: ["*"], resources: ["*"], verbs: ["*"], clusterScope: true, namespaces: ["*"]}]
      nonResourceRules: [{nonResourceURLs: ["*"], verbs: ["*"]}]
`

// countIdleRequests counts the daemon's requests to the API server while nothing changes. It begins when the API server
// uses the FlowSchema, and when the daemon has sent its events about earlier changes.
func countIdleRequests(ctx context.Context, b *testing.B, c *envconf.Config) {
	b.Helper()
	mustBench(b, apply(ctx, c, daemonFlow))
	defer func() { mustBench(b, remove(context.WithoutCancel(ctx), c, daemonFlow)) }()
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	mustBench(b, err)
	count := func() float64 {
		text, err := k.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
		mustBench(b, err)
		return metric(b, string(text),
			`(?m)^apiserver_flowcontrol_dispatched_requests_total\{flow_schema="sluice-bench".*\} (\S+)$`)
	}
	// Another pod makes the daemon send requests, which shows that the API server counts them.
	p := newPod("counted", namespace, capture, sleepForDay, "")
	mustBench(b, client(c).Create(ctx, p))
	mustBench(b, within(ctx, time.Minute, "requests are counted", func() (bool, error) { return count() > 0, nil }))
	last := count()
	mustBench(b, within(ctx, time.Minute, "no request for ten seconds", func() (bool, error) {
		time.Sleep(10 * time.Second)
		previous := last
		last = count()
		return last == previous, nil
	}))
	time.Sleep(idleTime)
	b.ReportMetric((count()-last)/idleTime.Minutes(), "requests/min-at-rest")
	mustBench(b, client(c).Delete(ctx, p))
}
