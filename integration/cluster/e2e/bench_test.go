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

// The budgets on a real node. Each benchmark is one run, whatever b.N is: -benchtime 1x.

const (
	pairs    = 30  // pods of each kind, one after the other
	crowd    = 110 // pods at once: as many as kubelet runs by default
	restTime = time.Minute
)

func wait(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkPodStart measures from the creation of a pod to its running, captured and not captured in turn.
func BenchmarkPodStart(b *testing.B) {
	ctx, c := b.Context(), suite.EnvConf()
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	wait(b, err)
	start := func(name string, labels map[string]string) time.Duration {
		w, err := k.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name, ResourceVersion: "0"})
		wait(b, err)
		defer w.Stop()
		began := time.Now()
		p := newPod(name, namespace, labels, "sleep 86400", "")
		wait(b, client(c).Create(ctx, p))
		until(b, w, func(e watch.Event) bool { return e.Object.(*corev1.Pod).Status.Phase == corev1.PodRunning })
		took := time.Since(began)
		wait(b, client(c).Delete(ctx, p))
		until(b, w, func(e watch.Event) bool { return e.Type == watch.Deleted })
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

func until(b *testing.B, w watch.Interface, cond func(watch.Event) bool) {
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
			b.Fatal("it never happened")
		}
	}
}

// BenchmarkCrowd starts as many pods at once as a node runs, and then looks at the daemon at rest.
func BenchmarkCrowd(b *testing.B) {
	ctx, c := b.Context(), suite.EnvConf()
	for b.Loop() {
		began := time.Now()
		for i := range crowd {
			wait(b, client(c).Create(ctx, newPod(fmt.Sprintf("crowd-%d", i), namespace, map[string]string{"sluice.dev/capture": "true", "crowd": "yes"}, "sleep 86400", "")))
		}
		wait(b, within(ctx, 10*time.Minute, "all of them run", func() (bool, error) {
			n, err := inCrowd(ctx, c, func(p corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
			return n == crowd, err
		}))
		b.ReportMetric(time.Since(began).Seconds(), "s/all-running")
		s, err := status(ctx, c)
		wait(b, err)
		captured := 0
		for _, a := range s.Attachments {
			if a.State == "captured" {
				captured++
			}
		}
		b.ReportMetric(float64(captured), "captured")
		b.ReportMetric(float64(failedSandboxes(ctx, b, c)), "failed-sandboxes")
		b.ReportMetric(rss(ctx, b, c)/(1<<20), "MiB-RSS")
		atRest(ctx, b, c)

		pods, err := inCrowd(ctx, c, func(p corev1.Pod) bool { return client(c).Delete(ctx, &p) == nil })
		if err != nil || pods != crowd {
			b.Fatalf("deleted %d of %d: %v", pods, crowd, err)
		}
		wait(b, within(ctx, 10*time.Minute, "they are gone", func() (bool, error) {
			n, err := inCrowd(ctx, c, func(corev1.Pod) bool { return true })
			return n == 0, err
		}))
	}
}

// inCrowd counts the pods of the crowd of which cond is true.
func inCrowd(ctx context.Context, c *envconf.Config, cond func(corev1.Pod) bool) (n int, err error) {
	var pods corev1.PodList
	if err := client(c).WithNamespace(namespace).List(ctx, &pods, resources.WithLabelSelector("crowd=yes")); err != nil {
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
	wait(b, client(c).WithNamespace(namespace).List(ctx, &events))
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
	wait(b, err)
	return metric(b, text, `(?m)^process_resident_memory_bytes (\S+)$`)
}

func metric(b *testing.B, text, pattern string) (sum float64) {
	b.Helper()
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		v, err := strconv.ParseFloat(m[1], 64)
		wait(b, err)
		sum += v
	}
	return sum
}

// ownFlow lets the API server count the requests of the daemon's service account by themselves.
const ownFlow = `
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

// atRest counts what the daemon asks of the API server while nothing changes. Events of what came before have to be
// out first, and the schema has to be known.
func atRest(ctx context.Context, b *testing.B, c *envconf.Config) {
	b.Helper()
	wait(b, apply(ctx, c, ownFlow))
	defer func() { wait(b, remove(context.WithoutCancel(ctx), c, ownFlow)) }()
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	wait(b, err)
	count := func() float64 {
		text, err := k.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
		wait(b, err)
		return metric(b, string(text), `(?m)^apiserver_flowcontrol_dispatched_requests_total\{flow_schema="sluice-bench".*\} (\S+)$`)
	}
	// One pod more shows that its requests are counted.
	p := newPod("counted", namespace, capture, "sleep 86400", "")
	wait(b, client(c).Create(ctx, p))
	wait(b, within(ctx, time.Minute, "requests are counted", func() (bool, error) { return count() > 0, nil }))
	last := count()
	wait(b, within(ctx, time.Minute, "it is at rest", func() (bool, error) {
		time.Sleep(10 * time.Second)
		was := last
		last = count()
		return last == was, nil
	}))
	time.Sleep(restTime)
	b.ReportMetric((count()-last)/restTime.Minutes(), "requests/min-at-rest")
	wait(b, client(c).Delete(ctx, p))
}
